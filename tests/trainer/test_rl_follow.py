"""Blocks that a step moves on to where decoding goes from them: against replay, and against the store.

Legend: A blocks, K block size.
"""

import itertools
import json

import pytest
import torch
from test_rl_stage import SMALL, config, start, world  # noqa: F401 - fixtures

from eval.replay import matches
from features.reader import FeatureStore
from features.stream import AnchorStream, StreamConfig
from infra.errors import ConfigError
from trainer.drafter.checkpoint import load_drafter
from trainer.follow import blocks_of, evenly, moved, runs
from trainer.heldout import store_text
from trainer.onpolicy.config import OnPolicyConfig
from trainer.rl import train
from trainer.rl_config import RlConfig

K = 6


def batches(store, n, **changes):
    cfg = StreamConfig(block_size=K, anchors_per_document=8, documents_per_micro_batch=2, global_batch=4, **changes)
    return list(itertools.islice(AnchorStream(store, cfg), n))


@pytest.mark.parametrize("shape", ["fixed", "trimmed"])
def test_blocks_go_where_decoding_goes(tiny, start, tiny_store, shape):  # noqa: F811
    store, drafter, head = FeatureStore.open(tiny_store), load_drafter(start).eval(), tiny.frozen_head()
    row_of = {d: i for i, d in enumerate(store.documents["document"].to_pylist())}
    went = stayed = 0
    for batch in batches(store, 6, shape=shape, lookahead=K):
        picked = evenly(batch.anchor_valid_A, 0.5)
        run = runs(drafter, drafter.config, blocks_of(batch, picked), head, None)
        new, moved_A = moved(batch, picked, run)
        assert not moved_A[torch.isin(torch.arange(len(moved_A)), picked, invert=True)].any()
        for a in torch.nonzero(batch.anchor_valid_A).flatten().tolist():
            d, p = int(batch.anchor_document_A[a]), int(batch.anchor_position_A[a])
            row = row_of[batch.documents[d]]
            tokens, mask = store.read_array("token_ids", row), store.read_array("loss_mask", row)
            q = int(new.anchor_position_A[a])
            if moved_A[a]:
                stands = matches(drafter, head, store_text(store, row))
                assert q == p + 1 + int(stands[p])
                went += 1
            else:
                assert q == p
                stayed += a in picked.tolist()
            assert mask[q] and mask[q + 1]
            n = min(K, len(tokens) - q)
            assert new.labels_AK[a, :n].tolist() == tokens[q : q + n].tolist()
            assert new.supervised_AK[a].tolist() == [False, *map(bool, mask[q + 1 : q + n]), *[False] * (K - n)]
            assert int(new.context_end_A[a] - new.context_start_A[a]) == q
            here = slice(int(new.context_start_A[a]), int(new.context_end_A[a]))
            assert torch.equal(new.hidden_SLD[here], store.read(row, 0, q).hidden_SLD)
        assert int(new.supervised_AK.any(1).sum()) == int(batch.supervised_AK.any(1).sum())  # the denominator holds
    assert went > 20 and stayed > 0


def test_without_a_lookahead_it_is_refused(tiny_store):
    (batch,) = batches(FeatureStore.open(tiny_store), 1)
    with pytest.raises(ValueError, match=r"set StreamConfig\.lookahead"):
        moved(batch, torch.tensor([0]), torch.tensor([0]))


def test_a_lookahead_changes_nothing_else(tiny_store):
    store = FeatureStore.open(tiny_store)
    for plain, ahead in zip(batches(store, 3), batches(store, 3, lookahead=K), strict=True):
        for name in ("labels_AK", "supervised_AK", "target_logprob_AK", "anchor_position_A", "anchor_document_A"):
            assert torch.equal(getattr(plain, name), getattr(ahead, name))
        assert torch.equal(ahead.ahead_labels_AX[:, :K], ahead.labels_AK)


def test_rollouts_have_starts_of_their_own(start, tiny_store):  # noqa: F811
    with pytest.raises(ConfigError, match=r"has the starts that rollouts visited .* set rl\.follow_share = 0"):
        config(OnPolicyConfig, start, tiny_store, rl={"follow_share": 0.5}, rollout={"prompts_per_round": 8})


def test_the_stage_trains_on_them(in_tmp, start, tiny_store, world):  # noqa: F811
    cfg = config(RlConfig, start, tiny_store, rl={"visited_share": 0.0, "follow_share": 0.5}, name="follow")
    train(cfg, world)
    logged = [json.loads(x) for x in (in_tmp / "runs" / "follow" / "metrics.jsonl").read_text().splitlines()]
    shares = [r["visited_blocks_share"] for r in logged if "visited_blocks_share" in r]
    assert len(logged) == SMALL["train"]["steps"] and all(0.25 < s <= 0.5 for s in shares)
    assert {"tau_hat_visited", "tau_hat_uniform"} <= logged[-1].keys()
