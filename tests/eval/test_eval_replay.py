"""Replay equals live decoding, cycle for cycle, for every verify length, at both ends of a text."""

import dataclasses

import numpy as np
import pytest
import torch

from eval.decode import DecodeSettings, decode
from eval.metrics import Cycles
from eval.proposer import DrafterProposer
from eval.replay import Text, answer_spans, matches, matches_of, replay, walk
from infra.errors import DataError

PROMPTS = [list(f"{i}. Once upon {i * 37} times".encode()) for i in range(12)]


def as_text(target, trace):
    ids = torch.tensor(trace.text_ids)
    hidden = target.forward(ids[None, :-1], logits="none").hidden_BSLD[0]
    return Text(ids, hidden, ((len(trace.prompt_ids), len(ids)),))


def live_and_replayed(target, drafter, b, prompts=PROMPTS, **settings):
    settings = DecodeSettings(**{"max_new_tokens": 50, "verify_length": b, **settings})
    traces = decode(target, DrafterProposer(drafter, target.frozen_head()), prompts, settings)
    texts = [as_text(target, t) for t in traces]
    replayed = replay(drafter, target.frozen_head(), texts, verify_lengths=(2, 5, 8), chunk=17)[b or 8]
    return [Cycles.of_trace(t) for t in traces], replayed, traces


def assert_same(live, replayed):
    for a, b in zip(live, replayed, strict=True):
        for field in dataclasses.fields(Cycles):
            assert getattr(a, field.name).tolist() == getattr(b, field.name).tolist(), field.name


@pytest.mark.parametrize("b", [None, 2, 5])
def test_replay_is_live(tiny, drafter, b):
    live, replayed, traces = live_and_replayed(tiny, drafter, b, PROMPTS if b is None else PROMPTS[:7])
    assert_same(live, replayed)
    together = Cycles.concat(live)
    assert len(set(together.accepted.tolist())) >= (b or 6) - 1, "a drafter that is always wrong or right tests little"
    assert {t.stopped for t in traces} == {True, False}, "both kinds of end"
    assert together.emitted.sum() == sum(len(t.answer_ids) - 1 for t in traces)


def test_replay_is_live_when_sampling(tiny, drafter):
    live, replayed, _ = live_and_replayed(tiny, drafter, None, PROMPTS[:6], temperature=0.3, seed=1)
    assert_same(live, replayed)


def test_replay_is_live_in_a_batch(tiny, drafter):
    live, replayed, _ = live_and_replayed(tiny, drafter, None, batch_size=5)
    assert_same(live, replayed)


@pytest.mark.parametrize(
    "fields", [{"drafting": "autoregressive"}, {"conditioning": "none"}, {"conditioning": "input_fusion"}]
)
def test_replay_is_live_for_ablations(tiny, make_drafter, train, long_texts, fields):
    drafter = train(make_drafter(**fields), long_texts[:4], 12)
    live, replayed, _ = live_and_replayed(tiny, drafter, None, PROMPTS[:4])
    assert_same(live, replayed)


def test_untrained_drafter_accepts_almost_nothing(tiny, make_drafter):
    live, replayed, _ = live_and_replayed(tiny, make_drafter(seed=5), None, PROMPTS[:5])
    assert_same(live, replayed)
    assert Cycles.concat(live).emitted.mean() < 1.2


def test_chunks_do_not_matter(tiny, drafter, long_texts):
    text = as_text(tiny, long_texts[0])
    whole = matches(drafter, tiny.frozen_head(), text, chunk=1000)
    assert (whole == matches(drafter, tiny.frozen_head(), text, chunk=3)).all()
    first, end = text.answers[0]
    assert (whole[:first] == -1).all() and whole[end - 1] == -1 and (whole[first : end - 1] >= 0).all()
    assert (whole[first : end - 1] <= end - 1 - np.arange(first, end - 1)).all()


@pytest.mark.parametrize("chunk", [5, 64, 10_000])
def test_texts_that_share_passes_do_not_see_each_other(tiny, drafter, long_texts, chunk):
    texts = [as_text(tiny, t) for t in long_texts[:6]]
    texts.insert(2, dataclasses.replace(texts[0], answers=()))  # nothing to find
    together = list(matches_of(drafter, tiny.frozen_head(), iter(texts), chunk=chunk))
    assert len(together) == len(texts)
    for (which, found), text in zip(together, texts, strict=True):
        assert which is text
        assert (found == matches(drafter, tiny.frozen_head(), text)).all()


def test_several_answers_in_one_text(tiny, drafter, long_texts):
    """A conversation is decoded turn by turn: each answer starts afresh, with all before it as context."""
    text = as_text(tiny, long_texts[0])
    first, end = text.answers[0]
    middle = first + 9
    split = dataclasses.replace(text, answers=((first, middle), (middle + 2, end)))
    found = matches(drafter, tiny.frozen_head(), split)
    whole = matches(drafter, tiny.frozen_head(), text)
    places = np.arange(first, middle - 1)
    assert (found[places] == np.minimum(whole[places], middle - 1 - places)).all()
    assert (found[middle + 2 : end - 1] == whole[middle + 2 : end - 1]).all()
    cycles = walk(found, split.answers, 8)
    assert cycles.emitted.sum() == (middle - first - 1) + (end - middle - 3)


def test_walk_example():
    found = np.full(9, -1)
    found[3], found[6] = 2, 1
    cycles = walk(found, [(3, 9)], 4)
    assert cycles.start.tolist() == [3, 6] and cycles.emitted.tolist() == [3, 2]
    assert len(walk(found, [(3, 4)], 4)) == 0


def test_answer_spans():
    assert answer_spans(np.array([0, 0, 1, 1, 1, 0, 1])) == ((2, 5), (6, 7))
    assert answer_spans(np.zeros(3)) == ()


def test_bad_texts_are_named(tiny, drafter, long_texts):
    text = as_text(tiny, long_texts[0])
    with pytest.raises(DataError, match="rows of features"):
        matches(drafter, tiny.frozen_head(), dataclasses.replace(text, hidden_SLD=text.hidden_SLD[:-5]))
    with pytest.raises(DataError, match=r"answer at 0\.\.5"):
        matches(drafter, tiny.frozen_head(), dataclasses.replace(text, answers=((0, 5),)))
