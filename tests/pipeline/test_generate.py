"""Batched generation against transformers' own, one prompt at a time."""

import copy

import pytest
import torch

from features.target import Target
from pipeline.config import RegenerateConfig
from pipeline.generate import Generator, Request, sampling_probs


def requests(n, vocab=256, max_new=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 40, (n,), generator=g).tolist()
    return [
        Request(f"{i:03d}", torch.randint(0, vocab, (s,), generator=g).tolist(), max_new - i % 5)
        for i, s in enumerate(sizes)
    ]


def alone(target, request):
    ids = torch.tensor([request.prompt_ids])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(target.stop_ids),
        pad_token_id=0,
    )
    return out[0, ids.shape[1] :].tolist()


def with_more_stops(target, ids):
    """A copy whose answers end at different lengths: a random target hardly ever emits its stop token."""
    target = copy.copy(target)
    target.stop_ids = frozenset({*target.stop_ids, *ids})
    return target


@pytest.fixture(scope="module")
def stopping(tiny):
    full = [r for r in requests(12) if r.max_new_tokens == 24]
    common = torch.tensor([alone(tiny, r) for r in full]).flatten().bincount()
    return with_more_stops(tiny, common.topk(3).indices.tolist())


@pytest.fixture(scope="module")
def expected(stopping):
    return {r.key: alone(stopping, r) for r in requests(30)}


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_greedy_equals_one_at_a_time(stopping, expected, batch_size):
    got = {r.key: r for r in Generator(stopping, RegenerateConfig(batch_size=batch_size)).generate(requests(30))}
    assert {k: r.token_ids for k, r in got.items()} == expected
    for r in got.values():
        assert r.finish_reason == ("stop" if r.token_ids[-1] in stopping.stop_ids else "length")
        assert r.text == stopping.tokenizer.decode(r.token_ids, skip_special_tokens=True)
    assert {r.finish_reason for r in got.values()} == {"stop", "length"}


def test_targets_with_sliding_windows_use_their_own_cache(stopping):
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, layer_types=["sliding_attention", "full_attention"] * 3, sliding_window=8,
        use_sliding_window=True, initializer_range=0.3,
    )  # fmt: skip
    target = Target(stopping.config, AutoModelForCausalLM.from_config(config), stopping.tokenizer)
    target.stop_ids = stopping.stop_ids
    generator = Generator(target, RegenerateConfig(batch_size=8))
    assert not generator.slabs
    asked = requests(10)
    got = {r.key: r.token_ids for r in generator.generate(asked)}
    assert got == {r.key: alone(target, r) for r in asked}


def test_sampling_depends_on_seed_and_prompt_only(stopping):
    def sample(batch_size, seed=1, which=slice(None)):
        cfg = RegenerateConfig(temperature=0.8, top_p=0.9, top_k=50, seed=seed, batch_size=batch_size)
        return {r.key: r.token_ids for r in Generator(stopping, cfg).generate(requests(20)[which])}

    everything = sample(16)
    assert sample(5) == everything
    assert sample(16, which=slice(3, 9)).items() <= everything.items()
    assert sample(16, seed=2) != everything


def test_sampling_probs():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    torch.testing.assert_close(sampling_probs(logits, 1.0, 0, 1.0), logits.softmax(-1))
    torch.testing.assert_close(sampling_probs(logits, 0.5, 0, 1.0), (2 * logits).softmax(-1))
    first_two = torch.tensor([[0.7311, 0.2689, 0, 0]])
    torch.testing.assert_close(sampling_probs(logits, 1.0, 2, 1.0), first_two, atol=1e-4, rtol=0)
    # softmax is .644 .237 .087 .032: 0.8 needs the first two
    torch.testing.assert_close(sampling_probs(logits, 1.0, 0, 0.8), first_two, atol=1e-4, rtol=0)
    assert sampling_probs(logits, 1.0, 0, 0.1)[0].tolist() == [1, 0, 0, 0]


def test_nothing_to_do(tiny):
    assert list(Generator(tiny, RegenerateConfig()).generate([])) == []
