"""Speculative decoding changes no token, whatever drafts; counting, stop tokens, batching, sampling."""

import dataclasses

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from eval.decode import DecodeSettings, decode, plain_decode
from eval.kv_cache import RowCache
from features.target import Target
from infra.errors import ConfigError, TargetError

PROMPTS = [list(b"Once upon a time"), list(b"def f(x):"), list(b"7"), list(b"What is the answer to everything?")]
SETTINGS = DecodeSettings(max_new_tokens=40)


def answers(traces):
    return [t.answer_ids for t in traces]


def reference(target, prompt, n):
    """Greedy text with no cache at all."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(target.forward(torch.tensor([ids]), logits="last", taps=False).logits_BSV[0, -1].argmax()))
        if ids[-1] in target.stop_ids:
            break
    return ids[len(prompt) :]


def test_plain_equals_uncached(tiny):
    traces = plain_decode(tiny, PROMPTS, SETTINGS)
    assert answers(traces) == [reference(tiny, p, 40) for p in PROMPTS]
    assert all(not t.cycles for t in traces)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_perfect_constant_and_random_drafts(tiny, scripted, batch_size):
    settings = dataclasses.replace(SETTINGS, batch_size=batch_size)
    plain = plain_decode(tiny, PROMPTS[:batch_size], settings)
    texts = [t.text_ids + [0] * 10 for t in plain]  # as many prompts as slots: slot i has prompt i
    generator = torch.Generator().manual_seed(0)
    rules = {
        "perfect": lambda slot, position: texts[slot][position],
        "constant": lambda slot, position: 0,
        "random": lambda slot, position: int(torch.randint(tiny.vocab_size, (), generator=generator)),
    }
    for name, rule in rules.items():
        traces = decode(tiny, scripted(rule), PROMPTS[:batch_size], settings)
        assert answers(traces) == answers(plain), name
        for trace in traces:
            assert sum(c.emitted for c in trace.cycles) == len(trace.answer_ids) - 1
            assert all(c.verify_length == 8 and len(c.drafts) == 7 and 0 <= c.matched <= 7 for c in trace.cycles)
            if name == "perfect":  # 8 tokens a cycle, and what is left in the last
                full, rest = divmod(len(trace.answer_ids) - 1, 8)
                assert [c.emitted for c in trace.cycles] == [8] * full + [rest] * (rest > 0)
                assert all(c.matched == 7 for c in trace.cycles[:-1])


def test_verify_length_changes_cycles_not_text(tiny, scripted):
    plain = plain_decode(tiny, PROMPTS[:1], SETTINGS)
    text = plain[0].text_ids + [0] * 10
    seen = []

    def rule(running):
        seen.append(running)
        return 3

    for b in (2, 5, rule):
        settings = dataclasses.replace(SETTINGS, verify_length=b)
        (trace,) = decode(tiny, scripted(lambda slot, position: text[position]), PROMPTS[:1], settings)
        length = b if isinstance(b, int) else 3
        assert trace.answer_ids == plain[0].answer_ids
        assert trace.cycles[0].emitted == length
        assert len(trace.cycles) == -(-(len(trace.answer_ids) - 1) // length)
    assert set(seen) == {1}


def test_batch_joins_and_leaves(tiny, scripted):
    """More prompts than rows: the text of each is that of a batch of one."""
    alone = plain_decode(tiny, PROMPTS, SETTINGS)
    together = plain_decode(tiny, PROMPTS, dataclasses.replace(SETTINGS, batch_size=2))
    assert answers(together) == answers(alone)
    drafted = decode(tiny, scripted(lambda slot, p: 7 * p % 256), PROMPTS, dataclasses.replace(SETTINGS, batch_size=3))
    assert answers(drafted) == answers(alone)
    assert {c.concurrency for t in drafted for c in t.cycles} >= {3}


def test_stop_token_in_the_accepted_prefix_as_bonus_and_as_first_token(tiny, scripted):
    (plain,) = plain_decode(tiny, PROMPTS[:1], SETTINGS)
    text = plain.text_ids + [0] * 10
    first = len(PROMPTS[0])
    for at in range(12):  # every place of a cycle, and beyond
        stop = plain.answer_ids[at]
        length = plain.answer_ids.index(stop) + 1
        stopping = StopAt(tiny, stop)
        (trace,) = decode(stopping, scripted(lambda slot, position: text[position]), PROMPTS[:1], SETTINGS)
        assert trace.answer_ids == plain.answer_ids[:length] and trace.stopped
        assert sum(c.emitted for c in trace.cycles) == length - 1
        assert [c.start for c in trace.cycles] == list(range(first, first + length - 1, 8))


class StopAt:
    """A view of a target with another stop token."""

    def __init__(self, target, stop):
        self.target, self.stop_ids = target, frozenset([stop])

    def __getattr__(self, name):
        return getattr(self.target, name)


@pytest.mark.parametrize("verify_length", [2, 4, 8])
def test_exact_sampling_gives_the_text_of_plain_sampling(tiny, scripted, verify_length):
    settings = DecodeSettings(max_new_tokens=30, temperature=1.0, seed=3, verify_length=verify_length)
    plain = plain_decode(tiny, PROMPTS, settings)
    assert answers(plain) != answers(plain_decode(tiny, PROMPTS, dataclasses.replace(settings, seed=4)))
    text = plain[0].text_ids + [0] * 10
    traces = decode(tiny, scripted(lambda slot, position: text[min(position, len(text) - 1)]), PROMPTS, settings)
    assert answers(traces) == answers(plain)
    assert traces[0].cycles[0].emitted == verify_length
    batched = decode(tiny, scripted(lambda slot, p: p % 256), PROMPTS, dataclasses.replace(settings, batch_size=4))
    assert answers(batched) == answers(plain)


def test_rejection_runs_and_counts(tiny, scripted):
    settings = DecodeSettings(max_new_tokens=30, temperature=1.0, verification="rejection", batch_size=2)
    traces = decode(tiny, scripted(lambda slot, p: p % 256), PROMPTS, settings)
    assert all(len(t.answer_ids) == 30 or t.stopped for t in traces)
    assert all(sum(c.emitted for c in t.cycles) == len(t.answer_ids) - 1 for t in traces)


def test_sliding_layers(tiny, scripted):
    """A target whose layers alternate between a window of 8 tokens and all: the masks differ by kind of layer."""
    shape = {**tiny.text_config.to_dict(), "use_sliding_window": True, "sliding_window": 8}
    shape["layer_types"] = ["sliding_attention", "full_attention"] * 3
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape))
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    target = Target(tiny.config, model, tiny.tokenizer)
    plain = plain_decode(target, PROMPTS[:3], dataclasses.replace(SETTINGS, batch_size=2))
    assert answers(plain) == [reference(target, p, 40) for p in PROMPTS[:3]]
    assert len({t for a in answers(plain) for t in a}) > 10
    assert answers(decode(target, scripted(lambda slot, p: 7 * p % 256), PROMPTS[:3], SETTINGS)) == answers(plain)


def test_layers_that_cannot_forget_are_refused(tiny):
    config = tiny.text_config.__class__(**tiny.text_config.to_dict())
    config.layer_types = ["linear_attention", "full_attention"] * 3
    with pytest.raises(TargetError, match="linear_attention cannot forget"):
        RowCache(config, 1, 10)


def test_one_new_token_needs_no_cycle(tiny, scripted):
    traces = decode(tiny, scripted(lambda slot, p: 0), PROMPTS, dataclasses.replace(SETTINGS, max_new_tokens=1))
    assert all(len(t.answer_ids) == 1 and not t.cycles for t in traces)
    assert decode(tiny, None, [], SETTINGS) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify_length": 9}, "verify length 9 is not between 2 and the drafter's block size 8"),
        ({"verify_length": lambda running: 1}, "verify length 1"),
        ({"verification": "maybe"}, "verification = 'maybe'"),
        ({"temperature": -1.0}, "temperature -1"),
    ],
)
def test_bad_settings_are_named(tiny, scripted, change, message):
    with pytest.raises(ConfigError, match=message):
        decode(tiny, scripted(lambda slot, p: 0), PROMPTS, dataclasses.replace(SETTINGS, **change))
    with pytest.raises(ConfigError, match="prompt 1 has no tokens"):
        decode(tiny, None, [[1], []], SETTINGS)
