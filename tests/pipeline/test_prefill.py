"""Hooked features against transformers' `output_hidden_states`, family by family, and the batching around them."""

import time

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from features.plan import DOCUMENT_SCHEMA, document_id
from features.target import Target, load_target
from pipeline import prefill
from pipeline.config import RegenerateConfig
from pipeline.generate import Generator, Request
from pipeline.prefill import Document, batches, documents_of, features_of

SMALL = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": 258, "pad_token_id": None,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "qwen3": {},
    "qwen2": {},
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "mistral": {"sliding_window": None},
    "gemma2": {"sliding_window": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "qwen3_moe": MOE,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}  # fmt: skip


def make_target(tiny, family, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SMALL | FAMILIES[family] | changes))
    return Target(tiny.config, AutoModelForCausalLM.from_config(config, dtype=torch.float32), tiny.tokenizer)


def documents(lengths, vocab=264):
    g = np.random.default_rng(0)
    made = []
    for n in lengths:
        tokens = g.integers(0, vocab, n).astype(np.int32)
        mask = (np.arange(n) > n // 3).astype(np.uint8)
        made.append(Document(document_id(tokens, mask), tokens, mask))
    return made


def independent(target, tokens):
    """(hidden states [S, L, D], log-probs) by a plain pass over one document."""
    with torch.no_grad():
        out = target.model(torch.from_numpy(tokens.astype(np.int64))[None], output_hidden_states=True)
    hidden = torch.stack([out.hidden_states[i + 1][0] for i in target.config.tap_layer_ids], dim=1)
    logprobs = out.logits[0].float().log_softmax(-1)
    realised = logprobs[:-1].gather(-1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
    return hidden, np.concatenate([[0], realised.numpy()]), logprobs


@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_an_independent_pass(tiny, family):
    target = make_target(tiny, family)
    docs = documents([5, 17, 30, 30, 2, 64])
    found = {f.document: f for f in features_of(target, docs, batch_tokens=100)}
    assert set(found) == {d.document for d in docs}
    for d in docs:
        hidden, logprob, _ = independent(target, d.token_ids_S)
        f = found[d.document]
        assert f.hidden_SLD.shape == (len(d.token_ids_S), 3, 32)
        for tap in range(3):
            error = (f.hidden_SLD[:, tap] - hidden[:, tap]).norm() / hidden[:, tap].norm()
            assert error < 1e-5, (family, tap, float(error))
        np.testing.assert_allclose(f.target_logprob_S, np.where(d.loss_mask_S, logprob, 0), atol=2e-4)
        assert (f.token_ids_S == d.token_ids_S).all() and (f.loss_mask_S == d.loss_mask_S).all()


def test_a_target_that_a_device_map_spreads_has_the_same_features(tiny):
    """What several GPUs take, without GPUs: two layers live elsewhere (in their file) and come in through hooks."""
    layers = {f"model.layers.{n}": "disk" if n in (2, 5) else "cpu" for n in range(tiny.num_layers)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    spread = load_target(tiny.config, device=layers | rest)
    assert spread.model.hf_device_map["model.layers.5"] == "disk"
    docs = documents([5, 17, 30])
    for a, b in zip(features_of(spread, docs, 100), features_of(tiny, docs, 100), strict=True):
        assert torch.equal(a.hidden_SLD, b.hidden_SLD) and (a.target_logprob_S == b.target_logprob_S).all()
    asked = [Request(str(n), [1 + n, 2, 3], 6) for n in range(3)]
    texts = [[r.token_ids for r in Generator(t, RegenerateConfig()).generate(asked)] for t in (spread, tiny)]
    assert texts[0] == texts[1]


def test_bf16_is_bit_equal_on_the_same_batch(tiny):
    target = make_target(tiny, "qwen3")
    target = Target(tiny.config, target.model.to(torch.bfloat16), tiny.tokenizer)
    docs = documents([40, 40, 40])
    found = {f.document: f for f in features_of(target, docs, batch_tokens=120)}
    ordered = sorted(docs, key=lambda d: d.document)
    ids = torch.from_numpy(np.stack([d.token_ids_S for d in ordered]).astype(np.int64))
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
    for row, d in enumerate(ordered):
        for tap, layer in enumerate(target.config.tap_layer_ids):
            assert torch.equal(found[d.document].hidden_SLD[:, tap], states[layer + 1][row])


def test_compact_teacher(tiny):
    target = make_target(tiny, "llama")
    docs = documents([20, 9])
    for f in features_of(target, docs, 64, top_k=4):
        _, _, logprobs = independent(target, f.token_ids_S)
        at = np.flatnonzero(f.loss_mask_S)
        top = logprobs[at - 1].topk(4)
        np.testing.assert_allclose(f.topk_logprobs_Sk[at].astype(np.float32), top.values, atol=5e-3)
        assert (f.topk_ids_Sk[at] == top.indices.numpy()).mean() > 0.99
        assert not f.topk_ids_Sk[f.loss_mask_S == 0].any() and not f.topk_logprobs_Sk[f.loss_mask_S == 0].any()


def test_batches_are_sorted_within_budget_and_little_padded():
    docs = documents([10, 50, 30, 30, 200, 7, 7])
    made = list(batches(docs, 100))
    assert [[len(d.token_ids_S) for d in b] for b in made] == [[200], [50], [30, 30], [10, 7, 7]]
    assert [[d.document for d in b] for b in batches(docs[::-1], 100)] == [[d.document for d in b] for b in made]
    g = np.random.default_rng(1)
    for budget in (256, 1024):
        docs = documents(g.integers(8, 400, 120))
        for batch in batches(docs, budget):
            width, real = len(batch[0].token_ids_S), sum(len(d.token_ids_S) for d in batch)
            assert len(batch) == 1 or width * len(batch) <= budget
            assert width * len(batch) - real <= max(budget / 4, real / 3)


@pytest.mark.parametrize("threads", [2, 3])
def test_batches_at_once_have_the_bits_of_one_after_another(tiny, monkeypatch, threads):
    """And no more of them at a time than there are threads, each of which computes with itself alone."""
    docs = documents([5, 17, 30, 30, 2, 64, 40, 41, 42, 43])
    alone = list(features_of(tiny, docs, 90, top_k=3))
    real, running, most, inner = prefill._batch_features, [], [], []

    def counted(target, batch, top_k):
        running.append(target)
        assert len({id(t.model) for t in running}) == len(running), "a model for each"
        most.append(len(running))
        inner.append(torch.get_num_threads())
        try:
            time.sleep(0.01)
            return real(target, batch, top_k)
        finally:
            running.remove(target)

    monkeypatch.setattr(prefill, "_batch_features", counted)
    torch.set_num_threads(threads)
    try:
        together = list(features_of(tiny, docs, 90, top_k=3))
        assert torch.get_num_threads() == threads
        docs[4].token_ids_S[1] = 100_000
        with pytest.raises((IndexError, RuntimeError)):
            list(features_of(tiny, docs, 90))
        assert torch.get_num_threads() == threads and not running
    finally:
        torch.set_num_threads(1)
    assert max(most) == threads and set(inner) == {1}
    assert [f.document for f in together] == [f.document for f in alone]
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a.hidden_SLD, b.hidden_SLD)
        for name in ("target_logprob_S", "topk_ids_Sk", "topk_logprobs_Sk"):
            assert (getattr(a, name) == getattr(b, name)).all()


def test_a_replica_shares_the_weights(tiny):
    copy = tiny.replica()
    theirs = dict(copy.model.named_parameters())
    assert all(theirs[name] is p for name, p in tiny.model.named_parameters()) and copy.head_VD is tiny.head_VD
    mine = set(map(id, tiny.model.modules()))
    assert not mine & set(map(id, copy.model.modules()))


def test_out_of_memory_halves_the_batch_and_goes_on(tiny, monkeypatch):
    """The real allocator refuses: an address-space limit would end the process, so a request of 2^60 bytes is made."""
    real, sizes = prefill._batch_features, []

    def hungry(target, batch, top_k):
        sizes.append(len(batch))
        if len(batch) > 2 or len(batch[0].token_ids_S) > 60:
            torch.empty(2**60, dtype=torch.uint8)
        return real(target, batch, top_k)

    monkeypatch.setattr(prefill, "_batch_features", hungry)
    docs = documents([20] * 7 + [64])
    found = {f.document: f for f in features_of(tiny, docs, 200)}
    assert len(found) == 8 and sizes == [1, 7, 4, 2, 2, 3, 2, 1]
    errors = [f.error for f in found.values() if f.error]
    assert errors == ["out of memory for one document of 64 tokens"]


def test_other_errors_are_not_swallowed(tiny):
    bad = documents([8], vocab=264)[0]
    bad.token_ids_S[3] = 100_000
    with pytest.raises((IndexError, RuntimeError)):
        list(features_of(tiny, [bad], 100))


def test_a_shard_travels_as_one_row():
    docs = documents([5, 9, 3])
    table = pa.Table.from_pylist(
        [
            {"document": d.document, "token_ids": d.token_ids_S, "loss_mask": d.loss_mask_S, "source": "s",
             "split": "train", "prompt_length": 1}
            for d in docs
        ],
        schema=DOCUMENT_SCHEMA,
    )  # fmt: skip

    class Plan:
        def shard_plan(self, shard):
            return pa.table({"document": [docs[2].document, docs[0].document]})

    row = prefill.shard_row(Plan(), 3, {d.document: i for i, d in enumerate(docs)}, table)
    assert row.num_rows == 1 and row["shard"][0].as_py() == 3
    got = documents_of(row)
    assert [g.document for g in got] == [docs[2].document, docs[0].document]
    assert (got[1].token_ids_S == docs[0].token_ids_S).all() and (got[1].loss_mask_S == docs[0].loss_mask_S).all()
