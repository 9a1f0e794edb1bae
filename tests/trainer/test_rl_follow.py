"""Blocks that a step moves on to where decoding goes from them: against replay, and against the store.

Legend: A blocks, K block size.
"""

import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from elastic import assert_close, records
from ranks import spawn
from test_rl_stage import SMALL, config, start, world  # noqa: F401 - fixtures

from eval.replay import matches
from features.reader import FeatureStore
from features.stream import AnchorStream, StreamConfig
from infra.errors import ConfigError
from kernels import weighting
from kernels.decay_ce import weighted_cross_entropy
from trainer.drafter.checkpoint import load_drafter
from trainer.follow import BLOCK_FIELDS, follow, leaders_and_followers
from trainer.heldout import store_text
from trainer.loop import Parts
from trainer.objective import forward
from trainer.onpolicy.config import OnPolicyConfig
from trainer.rl import RlObjective, train
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
    for batch in batches(store, 24, shape=shape, lookahead=K):
        kept, led, following = leaders_and_followers(batch.anchor_valid_A, 0.5)
        assert sorted([*kept.tolist(), *following.tolist()]) == list(range(len(batch.anchor_valid_A)))
        new, there = follow(batch, led, following, run_of(drafter, batch, head)[led])
        assert int(new.supervised_AK.any(1).sum()) == len(following)  # the denominator holds
        for i, (lead, own) in enumerate(zip(led.tolist(), following.tolist(), strict=True)):
            a = lead if there[i] else own
            d, p, q = int(batch.anchor_document_A[a]), int(batch.anchor_position_A[a]), int(new.anchor_position_A[i])
            row = row_of[batch.documents[d]]
            tokens, mask = store.read_array("token_ids", row), store.read_array("loss_mask", row)
            if there[i]:
                stands = matches(drafter, head, store_text(store, row))
                assert q == p + 1 + int(stands[p])
                went += 1
            else:
                assert q == p
                stayed += 1
            assert mask[q] and mask[q + 1] and int(new.anchor_document_A[i]) == d
            n = min(K, len(tokens) - q)
            assert new.labels_AK[i, :n].tolist() == tokens[q : q + n].tolist()
            assert new.supervised_AK[i].tolist() == [False, *map(bool, mask[q + 1 : q + n]), *[False] * (K - n)]
            here = slice(int(new.context_start_A[i]), int(new.context_end_A[i]))
            assert torch.equal(new.hidden_SLD[here], store.read(row, 0, q).hidden_SLD)
    assert went > 20 and stayed > 0


def run_of(drafter, batch, head):
    with torch.no_grad():
        hidden = forward(drafter, drafter.config, batch, head)
    return weighted_cross_entropy(hidden, head.head_VD, batch.labels_AK, batch.supervised_AK, weighting.uniform()).run_A


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_every_block_leads_at_most_one(share):
    valid = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.8
    kept, led, following = leaders_and_followers(valid, share)
    assert abs(len(following) - share * int(valid.sum())) <= 1 and valid[following].all() and valid[led].all()
    assert len(set(led.tolist())) == len(led) and set(led.tolist()) <= set(kept.tolist())


def test_the_loss_is_that_of_the_blocks_at_their_places(tiny, start, tiny_store, world):  # noqa: F811
    """One pass over all blocks, put where two passes had them, has the same loss, gradient and counts."""
    store, drafter, head = FeatureStore.open(tiny_store), load_drafter(start), tiny.frozen_head()
    cfg = config(RlConfig, start, tiny_store, rl={"visited_share": 0.0, "follow_share": 0.5}, name="two-passes")
    objective = RlObjective(cfg, Parts(None, store, head, drafter, world), None, None, None)
    objective.begin(0, 10)
    (batch,) = batches(store, 1, lookahead=K)
    _, led, following = leaders_and_followers(batch.anchor_valid_A, 0.5)
    new, _ = follow(batch, led, following, run_of(drafter, batch, head)[led])
    put = {n: getattr(batch, n).index_copy(0, following, getattr(new, n)) for n in BLOCK_FIELDS}
    placed = dataclasses.replace(batch, **put, ahead_labels_AX=None)
    results = []
    for b in (batch, placed):
        drafter.zero_grad()
        out = objective(drafter, b, head)
        out.numerator.backward()
        results.append((out, [p.grad.clone() for p in drafter.parameters()]))
    (two, grads), (one, expected) = results
    for name in ("numerator", "label_logprob_AK", "value_A"):
        torch.testing.assert_close(getattr(two, name), getattr(one, name))
    for name in ("correct_AK", "run_A", "mask_AK"):
        assert torch.equal(getattr(two, name), getattr(one, name))
    for g, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-3)


def test_without_a_lookahead_it_is_refused(tiny_store):
    (batch,) = batches(FeatureStore.open(tiny_store), 1)
    with pytest.raises(ValueError, match=r"set StreamConfig\.lookahead"):
        follow(batch, torch.tensor([0]), torch.tensor([1]), torch.tensor([0]))


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


def train_followed(ranks, drafter, store, folder, zero):
    """Work of a rank; documents are micro-batches of their own, so that any number of ranks leads and follows alike."""
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    os.chdir(folder)
    sections = {"data": SMALL["data"] | {"store": store, "documents_per_micro_batch": 1}, "name": f"z{zero}"}
    sections |= {"engine": {"dtype": "fp32", "zero_stage": zero}, "rl": {"visited_share": 0.0, "follow_share": 0.5}}
    train(config(RlConfig, drafter, store, **sections), ranks)


@pytest.mark.spawn
def test_ranks_and_zero_change_nothing_but_rounding(tmp_path, start, tiny_store):  # noqa: F811
    """ZeRO-3 gathers and frees the weights once for two passes over blocks."""
    for ranks, zero in ((1, 1), (2, 3)):
        spawn(ranks, train_followed, str(start), tiny_store, str(tmp_path), zero)
    assert_close(records(tmp_path / "runs" / "z3"), records(tmp_path / "runs" / "z1"))
