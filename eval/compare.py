"""Two evaluated drafters side by side: which is better, by how much, how sure.

Prompts are paired by id: both drafters decoded the same prompts of the same target, so their difference is resampled
by prompt (paired bootstrap), which is far sharper than comparing two intervals.
"""

from pathlib import Path
from typing import Any

import numpy as np

from eval.report import read_report
from infra.errors import ConfigError, DataError

RESAMPLES = 10_000


def load(path: str | Path) -> dict[str, Any]:
    """The report of a run folder, or a report file.

    Raises:
        ConfigError: nothing evaluated there.
    """
    if not str(path):
        raise ConfigError("compare needs two evaluated drafters; give A= and B=, for example A=runs/demo B=runs/other")
    file = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
    report = read_report(file)
    if report is None:
        raise ConfigError(f"{str(file)!r} does not exist; evaluate that drafter first (make eval DRAFTER={path})")
    return report


def compare(a: dict[str, Any], b: dict[str, Any], *, seed: int = 0) -> dict[str, Any]:
    """B against A on the suites and prompts that both have.

    Returns:
        {"suites": {name: {...}}, "all": {...}}, each with `tau_a`, `tau_b`, `difference` (b - a, pooled), `ci95`,
        `probability_b_better`, `prompts`, and `speedup_a`, `speedup_b`; "all" weighs every suite alike.

    Raises:
        DataError: another target, or no prompt in common.
    """
    if a["target"]["name"] != b["target"]["name"]:
        raise DataError(
            f"the drafters are for different targets ({a['target']['name']}, {b['target']['name']}): nothing to compare"
        )
    rng = np.random.default_rng(seed)
    suites, draws = {}, []
    for name in a["suites"].keys() & b["suites"].keys():
        paired = pair(a["suites"][name], b["suites"][name])
        if not paired.shape[1]:
            continue
        suites[name], drawn = _difference(paired, rng)
        suites[name] |= {f"speedup_{x}": r["suites"][name]["speedup"] for x, r in (("a", a), ("b", b))}
        suites[name]["same_settings"] = a["suites"][name]["settings"] == b["suites"][name]["settings"]
        draws.append(drawn)
    if not suites:
        raise DataError("the two reports have no suite with prompts in common; evaluate both on the same ones")
    mean = np.mean(draws, axis=0)
    total = {
        "tau_a": float(np.mean([s["tau_a"] for s in suites.values()])),
        "tau_b": float(np.mean([s["tau_b"] for s in suites.values()])),
        "prompts": sum(s["prompts"] for s in suites.values()),
        **_spread(mean, float(np.mean([s["difference"] for s in suites.values()]))),
    }
    return {"suites": dict(sorted(suites.items())), "all": total}


def pair(a: dict[str, Any], b: dict[str, Any]) -> np.ndarray:
    """[4, prompts]: tokens and cycles of A, tokens and cycles of B, of prompts that both decoded with cycles."""
    mine = {p["id"]: p for p in a["prompts"]}
    rows = [
        (mine[p["id"]]["tokens"], mine[p["id"]]["cycles"], p["tokens"], p["cycles"])
        for p in b["prompts"]
        if p["id"] in mine and p["cycles"] and mine[p["id"]]["cycles"]
    ]
    return np.array(rows, float).reshape(-1, 4).T


def _difference(paired: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
    n = paired.shape[1]
    tokens_a, cycles_a, tokens_b, cycles_b = paired.sum(1)
    tau_a, tau_b = tokens_a / cycles_a, tokens_b / cycles_b
    drawn = np.empty(RESAMPLES)
    for first in range(0, RESAMPLES, 1000):  # 1,000 x prompts indices at a time: 11 MB for 1,319 prompts
        picked = paired[:, rng.integers(n, size=(1000, n))].sum(-1)
        drawn[first : first + 1000] = picked[2] / picked[3] - picked[0] / picked[1]
    return {"tau_a": tau_a, "tau_b": tau_b, "prompts": n, **_spread(drawn, tau_b - tau_a)}, drawn


def _spread(drawn: np.ndarray, difference: float) -> dict[str, Any]:
    low, high = np.percentile(drawn, [2.5, 97.5])
    better = float((drawn > 0).mean() + 0.5 * (drawn == 0).mean())
    return {"difference": float(difference), "ci95": [float(low), float(high)], "probability_b_better": better}


def winner(result: dict[str, Any]) -> str | None:
    """ "a" or "b" where the 95 % interval of the difference over all suites excludes 0, else None."""
    low, high = result["all"]["ci95"]
    return "b" if low > 0 else "a" if high < 0 else None


def text(result: dict[str, Any], name_a: str, name_b: str) -> str:
    """The table and one sentence."""
    head = ["suite", "prompts", "τ A", "τ B", "B − A", "95 % interval", "P(B better)"]
    lines = [head]
    for name, s in [*result["suites"].items(), ("mean of suites", result["all"])]:
        note = "" if s.get("same_settings", True) else " *"
        lines.append(
            [
                name + note, str(s["prompts"]), f"{s['tau_a']:.3f}", f"{s['tau_b']:.3f}", f"{s['difference']:+.3f}",
                f"[{s['ci95'][0]:+.3f}, {s['ci95'][1]:+.3f}]", f"{s['probability_b_better']:.1%}",
            ]
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rows = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    if any(not s.get("same_settings", True) for s in result["suites"].values()):
        rows.append("* measured with different settings (see each report): the difference is not the drafter's alone")
    return "\n".join([f"A = {name_a}", f"B = {name_b}", "", *rows, "", verdict(result)])


def verdict(result: dict[str, Any]) -> str:
    """One sentence: who wins, by how much, how sure."""
    total = result["all"]
    low, high = total["ci95"]
    better = winner(result)
    if better is None:
        return (
            f"No clear winner: B − A is {total['difference']:+.3f} τ, and its 95 % interval "
            f"[{low:+.3f}, {high:+.3f}] contains 0."
        )
    if better == "a":
        low, high = -high, -low
    by, of = abs(total["difference"]), total["tau_a" if better == "b" else "tau_b"]
    return f"{better.upper()} is better by {by:.3f} τ ({by / of:+.1%}), 95 % interval [{low:+.3f}, {high:+.3f}]."
