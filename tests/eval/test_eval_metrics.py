"""Metrics: worked examples, identities between them, and the interval's coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import metrics
from eval.metrics import Cycles


def test_counting_at_the_end():
    """Answer of 9 tokens at 10..18 (end 19), K = 4: the last cycle is cut, at the bonus or inside the drafts."""
    cycles = Cycles.build([10, 14, 16], 4, [3, 1, 3], 19)
    assert cycles.emitted.tolist() == [4, 2, 2]  # matched 3 of the last, but only 17 and 18 are left
    assert cycles.accepted.tolist() == [3, 1, 2]
    assert cycles.limit.tolist() == [3, 3, 2]
    assert Cycles.build([14], 4, [3], 19).emitted.tolist() == [4]  # the bonus token is the last one
    assert Cycles.build([15], 4, [3], 19).emitted.tolist() == [3]  # the third draft is


def test_tau_pooled_and_macro():
    tokens, cycles = [30, 10, 0], [10, 10, 0]
    assert metrics.tau_pooled(tokens, cycles) == 2.0
    assert metrics.tau_macro([30, 10, 0], [5, 10, 0]) == 3.5  # mean of 6 and 1: the empty one has no say
    assert math.isnan(metrics.tau_pooled([0], [0])) and math.isnan(metrics.tau_macro([0], [0]))


def test_survival_is_of_runs_not_of_marginals():
    """Runs 3, 2, 1, 0: mean 1.5 (the product of per-position accuracies would say 1.219 or 1.734)."""
    cycles = Cycles.build([0, 10, 20, 30], 4, [3, 2, 1, 0], 1000)
    conditional = metrics.conditional_acceptance(cycles, 4)
    assert conditional == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert metrics.survival(conditional) == pytest.approx([0.75, 0.5, 0.25])
    assert sum(metrics.survival(conditional)) == pytest.approx(1.5)
    assert metrics.full_block_rate(cycles) == 0.25


def test_censored_cycles_count_as_far_as_they_go():
    """A cycle cut after one draft says nothing about the second."""
    cycles = Cycles.build([0, 97], 4, [0, 3], 99)
    assert cycles.limit.tolist() == [3, 1]
    assert metrics.conditional_acceptance(cycles, 4) == [0.5, None, None]
    assert metrics.survival([0.5, None, None]) == [0.5, 0.0, 0.0]
    assert metrics.full_block_rate(cycles) == 0.0


@given(st.integers(2, 9), st.lists(st.integers(0, 8), max_size=60), st.integers(1, 40))
def test_identities(K, drafts, length):
    """Walk an answer of `length` tokens with the given matches: histogram and totals agree."""
    end, p, starts, matched = 5 + length, 5, [], []
    while p < end - 1:
        starts.append(p)
        matched.append(min(drafts.pop() if drafts else 0, K - 1))
        p += matched[-1] + 1
    cycles = Cycles.build(starts, K, matched, end)
    assert cycles.emitted.sum() == length - 1 and (cycles.emitted >= 1).all()
    h = metrics.histogram(cycles, K)
    assert len(h) == K and sum(h) == len(cycles) and sum((i + 1) * n for i, n in enumerate(h)) == length - 1
    summary = metrics.acceptance_summary([cycles], K)
    assert summary["tokens"] == length - 1
    for c in summary["conditional_acceptance"]:
        assert c is None or 0 <= c <= 1


def test_bootstrap_covers():
    """About 95 % of intervals over 40 prompts contain the true τ of 2.5."""
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        cycles = rng.integers(5, 30, size=40)
        tokens = [int((1 + rng.binomial(3, 0.5, size=c)).sum()) for c in cycles]
        low, high = metrics.bootstrap_ci(tokens, cycles.tolist(), seed=trial, resamples=300)
        hits += low <= 2.5 <= high
    assert 180 <= hits <= 198


def test_context_buckets_and_categories():
    cycles = Cycles.build([10, 300, 301], 4, [0, 2, 0], 1000)
    buckets = metrics.by_context_length(cycles)
    assert buckets == {"0-255": {"tau_pooled": 1.0, "cycles": 1}, "256-511": {"tau_pooled": 2.0, "cycles": 2}}
    summary = metrics.acceptance_summary([cycles, cycles], 4, ["a", ""])
    assert list(summary["by_category"]) == ["a"] and summary["by_category"]["a"]["prompts"] == 1


def test_repeated_ngrams():
    assert metrics.repeated_ngrams([[1, 2, 3, 4, 5]]) == 0.0
    assert metrics.repeated_ngrams([[1] * 10]) == pytest.approx(6 / 7)
    assert metrics.repeated_ngrams([[1, 2], []]) == 0.0
