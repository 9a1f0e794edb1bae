"""The schedule: worked examples of the choice, the mixed-batch rule against brute force, and a real cost table."""

import itertools
import json

import pytest

from eval.__main__ import run
from eval.config import EvalConfig
from eval.run import evaluate
from eval.schedule import Costs, allocate, best_lengths, crossover, rule, verify_lengths


def linear(concurrency, lengths, base=6.54, slope=0.0177, draft=0.0):
    """T = base + slope·c·b milliseconds."""
    return Costs(
        {c: {b: base + slope * c * b for b in lengths} for c in concurrency}, dict.fromkeys(concurrency, draft)
    )


def test_published_costs_give_the_published_shape():
    """B200 fit, a profile with τ(16) about 8: whole blocks while the machine is idle, shorter when it is full."""
    S, tau = 1.0, {}
    for b in range(2, 17):
        S *= 0.9 if b < 10 else 0.85
        tau[b] = tau.get(b - 1, 1.0) + S
    lengths = range(1, 17)
    best = best_lengths(linear((1, 8, 32, 64, 128), lengths), tau)
    chosen = [best[c]["best"] for c in (1, 8, 32, 64, 128)]
    assert chosen[:2] == [16, 16] and chosen == sorted(chosen, reverse=True) and chosen[-1] <= 8
    assert crossover(best, 16) == 32
    assert best[1]["gain_over_full"] == 0 and best[1]["gain_over_half"] > 0.2
    assert best[128]["gain_over_full"] > 0.1
    pick = rule(best, 16)
    assert [pick(n) for n in (1, 31, 32, 1000)] == [16, 16, best[32]["best"], best[128]["best"]]


def test_a_staircase_needs_the_global_maximum():
    """Costs jump at 5 and are flat to 8: from 4 a local search would stay."""
    costs = Costs({1: {1: 10, 2: 10, 3: 10, 4: 10, 5: 16, 6: 16, 7: 16, 8: 16}}, {1: 0.0})
    tau = {b: 1 + 0.95 * (b - 1) for b in range(2, 9)}
    best = best_lengths(costs, tau)[1]
    assert best["tokens_per_s"][5] < best["tokens_per_s"][4] < best["tokens_per_s"][8] and best["best"] == 8


def test_plain_decoding_can_be_best():
    best = best_lengths(linear((1,), (1, 2, 4), base=1, slope=1, draft=5), {2: 1.1, 3: 1.1, 4: 1.1})
    assert best[1]["best"] == 1 and best[1]["speedup_over_plain"] == 1
    assert rule(best, 4)(1) == 2


@pytest.mark.parametrize("cost", [lambda n: 5 + n, lambda n: 10 + 8 * (n > 4) + 8 * (n > 8), lambda n: 1.0])
def test_allocation_is_optimal(cost):
    survival = [[0.9, 0.7, 0.2], [0.5, 0.1, 0.05], [0.99, 0.98, 0.97]]
    b = allocate(survival, cost)
    rate = lambda bs: (3 + sum(sum(s[: n - 1]) for s, n in zip(survival, bs, strict=True))) / cost(sum(bs))  # noqa: E731
    assert rate(b) == pytest.approx(max(rate(bs) for bs in itertools.product(range(1, 5), repeat=3)))


def test_verify_lengths():
    assert verify_lengths(8) == [1, 2, 3, 4, 5, 6, 8] and verify_lengths(7)[-1] == 7


def test_command_line(tiny_run, in_tmp, capsys):
    (in_tmp / "runs").mkdir()
    (in_tmp / "runs" / "demo").mkdir()
    for folder in ("drafter", "drafter-init"):
        (in_tmp / "runs" / "demo" / folder).symlink_to(tiny_run / "runs" / "demo" / folder)
    (in_tmp / "store").symlink_to(tiny_run / "store")
    evaluate(
        EvalConfig(model="tiny", drafter="runs/demo", suites=("heldout",), limit=3, max_new_tokens=16, track=False)
    )
    args = ["--model", "tiny", "--drafter", "runs/demo", "--concurrency", "1,2", "--tokens", "16", "--repeats", "2"]
    assert run(["schedule", *args]) == 0
    assert "b*" in capsys.readouterr().out
    saved = json.loads((in_tmp / "runs" / "demo" / "schedule.json").read_text())
    assert set(saved["best"]) == {"1", "2"} and len(saved["checked"]) == 6
    for row in saved["checked"]:
        assert row["measured_tokens_per_s"] > 0 and 2 <= row["b"] <= 8
    assert saved["verify_ms"]["1"].keys() == {"1", "2", "3", "4", "5", "6", "8"}
