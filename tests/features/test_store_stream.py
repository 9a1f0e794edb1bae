"""The batches of AnchorStream against a direct, slow reading of the rules."""

import itertools

import numpy as np
import pytest
import torch
from store_kit import Corpus, features_of

from features.order import permuted, spread_rows
from features.reader import FeatureStore
from features.stream import AnchorStream, StreamConfig
from infra.errors import ConfigError, DataError, StoreError


@pytest.fixture(scope="module")
def corpus():
    return Corpus(n=40, top_k=3)


@pytest.fixture(scope="module")
def store(corpus, tmp_path_factory):
    return FeatureStore.open(corpus.build(tmp_path_factory.mktemp("store")).uri)


def config(**changes):
    fields = {"seed": 5, "block_size": 4, "anchors_per_document": 6, "documents_per_micro_batch": 2, "global_batch": 8}
    return StreamConfig(**(fields | changes))


def take(stream, n):
    return list(itertools.islice(stream, n))


def equal(a, b):
    assert a.documents == b.documents and a.step == b.step and a.step_blocks == b.step_blocks
    for name in a.__dataclass_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y), name


@pytest.mark.parametrize("shape", ["fixed", "trimmed"])
def test_batches_follow_the_rules(store, corpus, shape):
    cfg = config(shape=shape)
    K = cfg.block_size
    for batch in take(AnchorStream(store, cfg), 12):
        if shape == "fixed":
            assert batch.hidden_SLD.shape == (2 * 48, 3, 16) and batch.labels_AK.shape == (12, 4)
        wants = [features_of(corpus.rows[d], corpus.spec) for d in batch.documents]
        assert all(corpus.rows[d]["split"] == "train" for d in batch.documents)
        per_document = [[] for _ in wants]
        for a in range(len(batch.anchor_valid_A)):
            if not batch.anchor_valid_A[a]:
                assert not batch.supervised_AK[a].any() and batch.anchor_document_A[a] == -1
                continue
            d, p = int(batch.anchor_document_A[a]), int(batch.anchor_position_A[a])
            want = wants[d]
            n = len(want.token_ids_S)
            per_document[d].append(p)
            assert want.loss_mask_S[p] and want.loss_mask_S[p + 1]
            s, e = int(batch.context_start_A[a]), int(batch.context_end_A[a])
            assert e - s == p
            assert torch.equal(batch.hidden_SLD[s:e], want.hidden_SLD[:p].bfloat16())
            assert batch.positions_S[s:e].tolist() == list(range(p))
            assert (batch.document_S[s:e] == d).all()
            assert batch.token_ids_S[s:e].tolist() == want.token_ids_S[:p].tolist()
            for k in range(K):
                inside = p + k < n
                assert batch.labels_AK[a, k] == (want.token_ids_S[p + k] if inside else 0)
                assert batch.supervised_AK[a, k] == bool(k and inside and want.loss_mask_S[p + k])
                if inside:
                    assert batch.target_logprob_AK[a, k] == want.target_logprob_S[p + k]
                    assert batch.topk_ids_AKk[a, k].tolist() == want.topk_ids_Sk[p + k].tolist()
        for want, anchors in zip(wants, per_document, strict=True):
            legal = np.flatnonzero(want.loss_mask_S[:-1] & want.loss_mask_S[1:])
            assert anchors == sorted(set(anchors)) and len(anchors) == min(6, len(legal))


def test_step_counts_are_those_of_the_whole_global_batch(store):
    for world in (1, 2):
        batches = [take(AnchorStream(store, config(), r, world), 8 // world) for r in range(world)]
        for step in range(2):
            mine = [b for rank in batches for b in rank if b.step == step]
            assert len(mine) == 4
            supervised = torch.cat([b.supervised_AK for b in mine])
            for b in mine:
                assert torch.equal(b.step_supervised_K, supervised.sum(0))
                assert b.step_blocks == supervised.any(1).sum()


def test_same_sequence_on_any_number_of_ranks_and_after_any_resume(store):
    one = take(
        AnchorStream(store, config()), 24
    )  # 6 steps of 4 micro-batches: past the end of the epoch (32 documents or so)
    for world in (2, 4):
        ranks = [take(AnchorStream(store, config(), r, world), 24 // world) for r in range(world)]
        per_step = 4 // world
        merged = [ranks[r][step * per_step + i] for step in range(6) for r in range(world) for i in range(per_step)]
        for a, b in zip(one, merged, strict=True):
            equal(a, b)
    stream = AnchorStream(store, config())
    take(stream, 9)  # two whole steps and one micro-batch of the third, which is not done
    assert stream.state() == {"samples_seen": 16}
    resumed = [take(AnchorStream(store, config(), r, 2, **stream.state()), 2) for r in range(2)]
    for a, b in zip(one[8:12], resumed[0] + resumed[1], strict=True):
        equal(a, b)


def test_every_epoch_is_another_order_of_the_same_documents(store):
    cfg = config(global_batch=2)
    stream = AnchorStream(store, cfg)
    n = stream.steps_per_epoch
    batches = take(stream, 2 * n)
    first, second = ([d for b in part for d in b.documents] for part in (batches[:n], batches[n:]))
    assert len(set(first)) == len(first) == 2 * n and len(set(second)) == 2 * n
    assert first != second
    assert stream.epoch == 2 and stream.data_wait_s > 0


def test_permutation():
    for n in (1, 2, 3, 17, 256, 1000):
        image = permuted(np.arange(n), n, seed=3, epoch=1)
        assert sorted(image.tolist()) == list(range(n))
    assert permuted(np.arange(6), 1000, 0, 0).tolist() == permuted(np.arange(1000), 1000, 0, 0)[:6].tolist()
    assert permuted(np.arange(100), 100, 0, 0).tolist() != permuted(np.arange(100), 100, 0, 1).tolist()


def test_anchors_do_not_depend_on_the_packing(store):
    def anchors(m):
        found = {}
        for b in take(AnchorStream(store, config(documents_per_micro_batch=m)), 8 // m):
            for d, p in zip(b.anchor_document_A[b.anchor_valid_A], b.anchor_position_A[b.anchor_valid_A], strict=True):
                found.setdefault(b.documents[d], []).append(int(p))
        return found

    assert anchors(1) == anchors(4)


def test_fixed_anchors_are_the_standard_blocks(store, corpus):
    for b in take(AnchorStream(store, config(anchors="fixed", anchors_per_document=64)), 4):
        for d, document in enumerate(b.documents):
            prompt, length = corpus.rows[document]["prompt_length"], len(corpus.rows[document]["token_ids"])
            assert b.anchor_position_A[b.anchor_document_A == d].tolist() == list(range(prompt, length - 1, 4))


def test_visited_anchors_take_their_share(store, corpus):
    visited = {d: np.arange(r["prompt_length"], r["prompt_length"] + 4) for d, r in corpus.rows.items()}
    for b in take(AnchorStream(store, config(anchors_per_document=4), visited=visited), 8):
        for d, document in enumerate(b.documents):
            positions = b.anchor_position_A[b.anchor_document_A == d].tolist()
            legal = len(corpus.rows[document]["token_ids"]) - 1 - corpus.rows[document]["prompt_length"]
            assert len(positions) == min(4, legal)
            assert len(set(positions) & set(visited[document].tolist())) >= min(2, legal)


def test_crowded_micro_batches_keep_what_fits(store, corpus):
    assert spread_rows(np.array([100, 900, 500]), 1000).tolist() == [100, 450, 450]
    assert spread_rows(np.array([100, 200]), 1000).tolist() == [100, 200]
    batches = take(AnchorStream(store, config(context_tokens=40)), 8)
    for b in batches:
        assert len(b.hidden_SLD) == 40 and b.anchor_valid_A.any()
        supervised = sum(
            (x.supervised_AK.sum(0) for x in batches if x.step == b.step), torch.zeros(4, dtype=torch.int64)
        )
        assert torch.equal(supervised, b.step_supervised_K)


def test_impossible_batches_are_explained(store):
    with pytest.raises(ConfigError, match=r"no multiple of documents_per_micro_batch \* ranks = 2 \* 3; set it to 6"):
        AnchorStream(store, config(), 0, 3)
    with pytest.raises(ConfigError, match="samples_seen = 3"):
        AnchorStream(store, config(), samples_seen=3)
    with pytest.raises(DataError, match="fewer than global_batch = 512"):
        AnchorStream(store, config(global_batch=512))


def test_damage_reaches_the_consumer(corpus, tmp_path):
    uri = corpus.build(tmp_path).uri
    for path in (tmp_path / "tiny").rglob("hidden/c/*/0/0"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"is damaged: .* run `python -m features verify"):
        take(AnchorStream(FeatureStore.open(uri), config()), 1)


def test_reading_ahead_is_bounded(store):
    stream = AnchorStream(store, config(prefetch=3, workers=2))
    built = []
    build = stream._build
    stream._build = lambda *args: built.append(args) or build(*args)
    batches = iter(stream)
    for n in range(1, 6):
        next(batches)
        assert len(built) <= n + 2
    batches.close()
