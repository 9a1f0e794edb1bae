"""Numbers about acceptance: pure functions over cycles, equal for live decoding and replay.

Every cycle is four integers, all known to live decoding and to replay:

    start    position of the anchor
    b        verified positions
    left     tokens of the answer after the anchor
    accepted drafts that became text: min(matched, b - 1, left)

and emitted = min(accepted + 1, left): the target's own token follows, unless the answer ends with the drafts.
τ counts emitted tokens, the target's own included: pooled = all tokens / all cycles (the engines'), macro = mean over
prompts of each prompt's τ (the paper's).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from eval.decode import Trace

RESAMPLES = 2000
LENGTH_BUCKETS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""lower bounds, in tokens before the anchor"""


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Cycles of one answer (or of several, concatenated): int64 arrays [cycles]."""

    start: np.ndarray
    b: np.ndarray
    left: np.ndarray
    accepted: np.ndarray

    @property
    def emitted(self) -> np.ndarray:
        return np.minimum(self.accepted + 1, self.left)

    @property
    def limit(self) -> np.ndarray:
        """Drafts that could have become text."""
        return np.minimum(self.b - 1, self.left)

    @classmethod
    def build(cls, start: Iterable[int], b: Iterable[int] | int, matched: Iterable[int], end: int) -> "Cycles":
        """Cycles of one text whose last token stands at position `end - 1`."""
        start = np.fromiter(start, np.int64)
        matched = np.fromiter(matched, np.int64)
        b = np.full_like(start, b) if isinstance(b, int) else np.fromiter(b, np.int64)
        left = end - 1 - start
        return cls(start, b, left, np.minimum(matched, np.minimum(b - 1, left)))

    @classmethod
    def of_trace(cls, trace: Trace) -> "Cycles":
        c = trace.cycles
        return cls.build(
            (x.start for x in c), (x.verify_length for x in c), (x.matched for x in c), len(trace.text_ids)
        )

    @classmethod
    def concat(cls, parts: Sequence["Cycles"]) -> "Cycles":
        if not parts:
            return cls.build([], [], [], 0)
        names = [f.name for f in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))

    def __len__(self) -> int:
        return len(self.start)


def tau_pooled(tokens: Sequence[int], cycles: Sequence[int]) -> float:
    """All tokens over all cycles; NaN without cycles."""
    return float(np.sum(tokens) / np.sum(cycles)) if np.sum(cycles) else float("nan")


def tau_macro(tokens: Sequence[int], cycles: Sequence[int]) -> float:
    """Mean over prompts of tokens/cycles; prompts without a cycle (one-token answers) are left out."""
    tokens, cycles = np.asarray(tokens, float), np.asarray(cycles, float)
    has = cycles > 0
    return float((tokens[has] / cycles[has]).mean()) if has.any() else float("nan")


def bootstrap_ci(
    tokens: Sequence[int], cycles: Sequence[int], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """95 % percentile interval of the pooled τ, resampling prompts (cycles of one prompt are not independent)."""
    tokens, cycles = np.asarray(tokens, float), np.asarray(cycles, float)
    if len(tokens) < 2 or not cycles.sum():
        return float("nan"), float("nan")
    drawn = np.random.default_rng(seed).integers(len(tokens), size=(resamples, len(tokens)))
    sums = cycles[drawn].sum(1)
    values = tokens[drawn].sum(1)[sums > 0] / sums[sums > 0]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def histogram(cycles: Cycles, block_size: int) -> list[int]:
    """`h[i]`: cycles that emitted i + 1 tokens, i = 0 .. K-1. Σ (i+1)·h[i] = tokens, Σ h[i] = cycles."""
    return (
        np.bincount(cycles.emitted - 1, minlength=block_size)[:block_size].tolist() if len(cycles) else [0] * block_size
    )


def conditional_acceptance(cycles: Cycles, block_size: int) -> list[float | None]:
    """`c[k-1]`: share of cycles whose draft k stood, among those whose draft k - 1 stood and whose draft k could stand.

    Cycles cut by the end of their answer leave the count where they are cut, as censored lives do (Kaplan and Meier);
    None where no cycle came so far.
    """
    out: list[float | None] = []
    for k in range(1, block_size):
        at_risk = (cycles.accepted >= k - 1) & (cycles.limit >= k)
        out.append(float((cycles.accepted[at_risk] >= k).mean()) if at_risk.any() else None)
    return out


def survival(conditional: Sequence[float | None]) -> list[float]:
    """`S[k-1]` = P(at least k drafts stand): the product of conditional acceptances; 0 from the first unknown on."""
    out, alive = [], 1.0
    for c in conditional:
        alive *= c or 0.0
        out.append(alive)
    return out


def full_block_rate(cycles: Cycles) -> float:
    """Share of cycles that accepted every draft, among those not cut by the end of the answer."""
    whole = cycles.limit == cycles.b - 1
    return float((cycles.accepted[whole] == cycles.limit[whole]).mean()) if whole.any() else float("nan")


def by_context_length(cycles: Cycles, bounds: Sequence[int] = LENGTH_BUCKETS) -> dict[str, dict[str, float]]:
    """τ by number of tokens before the anchor; empty buckets are left out."""
    out = {}
    for low, high in zip(bounds, [*bounds[1:], None], strict=True):
        keep = (cycles.start >= low) & ((cycles.start < high) if high is not None else True)
        if keep.any():
            name = f"{low}-{high - 1}" if high is not None else f"{low}+"
            out[name] = {"tau_pooled": float(cycles.emitted[keep].mean()), "cycles": int(keep.sum())}
    return out


def repeated_ngrams(answers: Iterable[Sequence[int]], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same answer. Loops (small models, greedy) flatter τ."""
    total = repeated = 0
    for ids in answers:
        grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else 0.0


def acceptance_summary(per_prompt: Sequence[Cycles], block_size: int, categories: Sequence[str] = ()) -> dict[str, Any]:
    """Everything about acceptance of one suite, JSON-able.

    Args:
        per_prompt: the cycles of each prompt (all its turns).
        categories: one per prompt, for the breakdown; empty for none.
    """
    tokens, cycles = [int(c.emitted.sum()) for c in per_prompt], [len(c) for c in per_prompt]
    together = Cycles.concat(list(per_prompt))
    conditional = conditional_acceptance(together, block_size)
    groups: dict[str, dict[str, float]] = {}
    for name in sorted(set(categories) - {""}):
        part = [i for i, category in enumerate(categories) if category == name]
        t, c = [tokens[i] for i in part], [cycles[i] for i in part]
        groups[name] = {
            "tau_pooled": tau_pooled(t, c),
            "tau_macro": tau_macro(t, c),
            "prompts": len(part),
            "cycles": sum(c),
        }
    return {
        "tau_pooled": tau_pooled(tokens, cycles),
        "tau_macro": tau_macro(tokens, cycles),
        "tau_ci95": list(bootstrap_ci(tokens, cycles)),
        "cycles": sum(cycles),
        "tokens": sum(tokens),
        "accept_histogram": histogram(together, block_size),
        "conditional_acceptance": conditional,
        "survival": survival(conditional),
        "full_block_rate": full_block_rate(together),
        "by_context_length": by_context_length(together),
        "by_category": groups,
    }
