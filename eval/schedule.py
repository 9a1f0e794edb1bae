"""How many positions to verify: the block-size schedule that the DFlash paper leaves open.

The draft stays K wide (narrowing it would change the proposals); of it only the first b - 1 drafts are verified. With c
sequences decoded at once a cycle takes T(b, c) and yields c·τ(b) tokens, so

    b*(c) = argmax_b c · τ(b) / T(b, c)          over the whole measured table, b = 1 (plain decoding) included:

costs are staircases, and a local search stops on a step. τ(b) comes from replay, T from this machine with this target.
For a batch of unlike requests, `allocate` divides the verified positions by survival.

    python -m eval schedule --drafter runs/demo --suite heldout --concurrency 1,2,4,8,16

Legend: B sequences, S tokens, K block size, b verified positions, c concurrency.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from eval.decode import DecodeSettings, Proposer, decode, plain_decode
from eval.kv_cache import RowCache
from features.target import Target
from infra.errors import DataError

GRID = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


def verify_lengths(block_size: int) -> list[int]:
    """The columns of the table: GRID up to K, and K."""
    return sorted({b for b in GRID if b <= block_size} | {block_size})


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured milliseconds. `verify[c][b]`: one pass of the target over c·b positions. `draft[c]`: c blocks of K."""

    verify: dict[int, dict[int, float]]
    draft: dict[int, float]

    def cycle(self, c: int, b: int) -> float:
        """T(b, c); plain decoding (b = 1) drafts nothing."""
        return self.verify[c][b] + (self.draft[c] if b > 1 else 0.0)


@torch.inference_mode()
def measure_costs(
    target: Target, proposer: Proposer, concurrency: Sequence[int], *, context: int = 256, repeats: int = 5
) -> Costs:
    """The cost table at a context of `context` tokens per sequence; medians of `repeats` after one unrecorded round.

    The columns of a row take turns, so that drifting load of the machine does not bend the row.
    """
    lengths = verify_lengths(proposer.block_size)
    verify: dict[int, dict[int, float]] = {}
    draft: dict[int, float] = {}
    generator = torch.Generator().manual_seed(0)
    ids_1S = torch.randint(target.vocab_size, (1, context), generator=generator).to(target.device)
    hidden_SLD = target.forward(ids_1S, logits="none").hidden_BSLD[0]
    for c in concurrency:
        cache = RowCache(target.text_config, c, context + 2 * proposer.block_size)
        proposer.open(c, cache.capacity)
        for row in range(c):
            cache.open_row()
            positions, mask = cache.prepare(row, 1, context, target.device)
            target.forward(ids_1S, attention_mask=mask, position_ids=positions, cache=cache, logits="last", taps=False)
            cache.lengths[row] = context
            proposer.extend(row, 0, hidden_SLD, ids_1S[0])
        slots, starts, anchors_B = list(range(c)), [context] * c, ids_1S[0, :1].expand(c)

        def one_pass(b: int, c=c, cache=cache) -> None:
            positions, mask = cache.prepare(0, c, b, target.device)
            ids = ids_1S[0, :b].expand(c, b)
            out = target.forward(ids, attention_mask=mask, position_ids=positions, cache=cache, taps=b > 1)
            out.logits_BSV.argmax(-1).tolist()

        def one_draft(slots=slots, anchors_B=anchors_B, starts=starts) -> None:
            proposer.propose(slots, anchors_B, starts).argmax(-1).tolist()

        times: dict[int, list[float]] = {b: [] for b in (0, *lengths)}
        for round_ in range(repeats + 1):
            for b in times:
                began = time.perf_counter()
                one_draft() if b == 0 else one_pass(b)
                if round_:
                    times[b].append(1e3 * (time.perf_counter() - began))
        draft[c] = statistics.median(times.pop(0))
        verify[c] = {b: statistics.median(t) for b, t in times.items()}
    return Costs(verify, draft)


def best_lengths(costs: Costs, tau: dict[int, float]) -> dict[int, dict[str, Any]]:
    """Per concurrency: the best b, its expected tokens per second, and the gain over the fixed lengths K and K/2.

    Args:
        tau: τ(b) for b >= 2; τ(1) = 1 by definition.
    """
    tau = {1: 1.0, **tau}
    K = max(tau)
    out = {}
    for c in costs.verify:
        speed = {b: 1e3 * c * tau[b] / costs.cycle(c, b) for b in costs.verify[c] if b in tau}
        best = max(speed, key=lambda b: (speed[b], -b))
        half = max((b for b in speed if b <= max(K // 2, 2)), default=best)
        out[c] = {
            "best": best,
            "tokens_per_s": speed,
            "gain_over_full": speed[best] / speed[K] - 1,
            "gain_over_half": speed[best] / speed[half] - 1,
            "half": half,
            "speedup_over_plain": speed[best] / speed[1],
        }
    return out


def crossover(best: dict[int, dict[str, Any]], block_size: int) -> int | None:
    """The smallest measured concurrency at which verifying the whole block is no longer best; None if it always is."""
    return next((c for c in sorted(best) if best[c]["best"] < block_size), None)


def rule(best: dict[int, dict[str, Any]], block_size: int) -> Callable[[int], int]:
    """`verify_length` for `DecodeSettings`: b* of the nearest measured concurrency at or below the running sequences.

    Where plain decoding is best, 2: the loop always drafts, and 2 wastes least.
    """
    measured = sorted(best)

    def verify_length(running: int) -> int:
        nearest = max((c for c in measured if c <= running), default=measured[0])
        return min(max(best[nearest]["best"], 2), block_size)

    return verify_length


def allocate(survival_RN: Sequence[Sequence[float]], cost_ms: Callable[[int], float]) -> list[int]:
    """Verify lengths for a batch of requests that differ: as many drafts as pay, the likeliest to survive first.

    Each of R requests costs one position (its anchor) whatever happens; verifying n drafts more, in order of survival,
    yields (R + Σ of the n largest survivals) / cost(R + n) tokens per millisecond. The global maximum over n wins,
    since costs are staircases. Survival falls along a request, so taking the largest first never skips a draft.

    Args:
        survival_RN: per request, probability that at least k drafts stand, k = 1 .. K-1 (non-increasing).
        cost_ms: milliseconds of a cycle that verifies so many positions in all.

    Returns:
        b per request (1 = verify no draft).
    """
    R = len(survival_RN)
    order = sorted(
        ((s, -k, r) for r, row in enumerate(survival_RN) for k, s in enumerate(row)), reverse=True
    )  # equal survivals: earlier drafts first
    gained, best_rate, best_n = 0.0, R / cost_ms(R), 0
    for n, (s, _, _) in enumerate(order, 1):
        gained += s
        rate = (R + gained) / cost_ms(R + n)
        if rate > best_rate:
            best_rate, best_n = rate, n
    out = [1] * R
    for _, _, r in order[:best_n]:
        out[r] += 1
    return out


def measured_throughput(
    target: Target, proposer: Proposer, prompts: list[list[int]], c: int, b: int, tokens: int
) -> tuple[float, float]:
    """(tokens per second, τ) of batched decoding, over the passes that really had c sequences."""
    prompts = [prompts[i % len(prompts)] for i in range(2 * c)]
    settings = DecodeSettings(max_new_tokens=tokens, batch_size=c, verify_length=b)
    traces = decode(target, proposer, prompts, settings)
    full = [x for t in traces for x in t.cycles if x.concurrency == c]
    if not full:
        raise DataError(f"no pass had {c} sequences at once; give longer answers than {tokens} tokens")
    seconds = sum(x.draft_ms + x.verify_ms for x in full) / c / 1e3
    return sum(x.emitted for x in full) / seconds, sum(x.emitted for x in full) / len(full)


def verify_schedule(
    target: Target,
    proposer: Proposer,
    prompts: list[list[int]],
    costs: Costs,
    best: dict[int, dict[str, Any]],
    tokens: int,
) -> list[dict[str, Any]]:
    """Decode at every concurrency with b = K, b = K/2 and the schedule; predicted against measured tokens per second.

    `predicted` uses the table's cost and the suite's τ; `predicted_here` the τ of the very answers decoded, so the two
    tell whether a miss is the cost model's or the text's.
    """
    K, rows = proposer.block_size, []
    pick = rule(best, K)
    for c in costs.verify:
        tried: dict[int, tuple[float, float]] = {}
        for name, b in (("full", K), ("half", best[c]["half"]), ("schedule", pick(c))):
            b = max(b, 2)
            if b not in tried:
                tried[b] = measured_throughput(target, proposer, prompts, c, b, tokens)
            speed, tau = tried[b]
            here = 1e3 * c * tau / costs.cycle(c, b)
            rows.append(
                {
                    "concurrency": c, "which": name, "b": b, "measured_tokens_per_s": speed, "tau": tau,
                    "predicted_tokens_per_s": best[c]["tokens_per_s"][b], "predicted_here_tokens_per_s": here,
                    "error": best[c]["tokens_per_s"][b] / speed - 1, "error_here": here / speed - 1,
                }
            )  # fmt: skip
    return rows


def taus(suite: dict[str, Any]) -> dict[int, float]:
    """τ(b) of a suite's report.

    Raises:
        DataError: the suite was measured without replay (rejection sampling).
    """
    if "tau_by_verify_length" not in suite:
        raise DataError("the suite has no replay; evaluate it with verification=exact first")
    return {int(b): tau for b, tau in suite["tau_by_verify_length"].items() if tau is not None}


def text(result: dict[str, Any]) -> str:
    """The table of the command line."""
    lines = [["c", "b*", "tokens/s", "over plain", "over b = K", "over b = K/2", "measured", "error"]]
    checked = {r["concurrency"]: r for r in result["checked"] if r["which"] == "schedule"}
    for c, row in result["best"].items():
        check = checked.get(int(c))
        lines.append(
            [
                str(c), str(row["best"]), f"{row['tokens_per_s'][row['best']]:.1f}",
                f"{row['speedup_over_plain']:.2f}×",
                f"{row['gain_over_full']:+.0%}", f"{row['gain_over_half']:+.0%}",
                f"{check['measured_tokens_per_s']:.1f} (b = {check['b']})" if check else "–",
                f"{check['error']:+.0%}" if check else "–",
            ]
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines]
    at = result["crossover"]
    K = result["block_size"]
    rows.append(
        f"Verifying all {K} positions is best at every measured concurrency."
        if at is None
        else f"From concurrency {at} on, verifying fewer than {K} positions is better."
    )
    missed = [r for r in result["checked"] if abs(r["error"]) > 0.15]
    if missed:
        cost = sum(abs(r["error_here"]) > 0.15 for r in missed)
        rows.append(
            f"The prediction misses by more than 15 % in {len(missed)} of {len(result['checked'])} checks: in {cost} "
            f"of them the cost table is off, in {len(missed) - cost} these answers have another τ than the suite."
        )
    return "\n".join(rows)


def figure(result: dict[str, Any]) -> Figure:
    """Expected tokens per second against b, a line per concurrency, its best marked."""
    fig = Figure(figsize=(6.4, 4), layout="constrained")
    ax = fig.subplots()
    for c, row in result["best"].items():
        speed = {int(b): v for b, v in row["tokens_per_s"].items()}
        (line,) = ax.plot(list(speed), list(speed.values()), "o-", ms=3, label=f"{c} at once")
        ax.plot(row["best"], speed[row["best"]], "*", ms=13, color=line.get_color())
    ax.set(xlabel="verified positions b (1: plain decoding)", ylabel="expected tokens/s", yscale="log")
    ax.legend(frameon=False, fontsize=8)
    return fig


def make_schedule(
    target: Target,
    proposer: Proposer,
    prompts: list[list[int]],
    suite: dict[str, Any],
    concurrency: Sequence[int],
    *,
    tokens: int = 64,
    repeats: int = 5,
    check: bool = True,
) -> dict[str, Any]:
    """Costs, best lengths and their check, JSON-able."""
    context = int(np.median([len(p) for p in prompts])) + tokens // 2
    plain_decode(target, prompts[:1], DecodeSettings(max_new_tokens=4))
    costs = measure_costs(target, proposer, concurrency, context=context, repeats=repeats)
    best = best_lengths(costs, taus(suite))
    return {
        "block_size": proposer.block_size,
        "context": context,
        "tau": taus(suite),
        "draft_ms": costs.draft,
        "verify_ms": costs.verify,
        "best": best,
        "crossover": crossover(best, proposer.block_size),
        "checked": verify_schedule(target, proposer, prompts, costs, best, tokens) if check else [],
    }


def run(argv: list[str]) -> int:
    import argparse

    from eval.compare import load
    from eval.config import EvalConfig
    from eval.report import finite
    from eval.run import output_folder
    from eval.session import (
        Renderer,
        checkpoint_folder,
        load_drafters,
        load_matching_target,
        load_suites,
        newest_run,
        open_store,
    )
    from infra.provenance import provenance, write_json

    p = argparse.ArgumentParser(prog="python -m eval schedule", description="how many positions to verify")
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--drafter", default="", help="an evaluated run; default: the newest of the target")
    p.add_argument("--suite", default="heldout", help="whose τ(b) and prompts to use; must be in the report")
    p.add_argument("--suites-from", default="", metavar="FOLDER")
    p.add_argument("--concurrency", default="1,2,4,8,16")
    p.add_argument("--tokens", type=int, default=64, help="per answer in the check")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--no-check", action="store_true", help="only the table")
    args = p.parse_args(argv)
    folder = checkpoint_folder(args.drafter or newest_run(args.model))
    cfg = EvalConfig(
        model=args.model, drafter=str(folder), suites=(args.suite,), data=args.suites_from, limit=16, track=False
    )
    out = output_folder(cfg, folder)
    suites = load(out)["suites"]
    name = Path(args.suite).stem
    if name not in suites:
        raise DataError(f"{out}/report.json has no suite {name!r} (it has {', '.join(suites)}); evaluate it first")
    target = load_matching_target(cfg, {"drafter": folder})
    drafter = load_drafters(cfg, target, {"drafter": folder})["drafter"]
    loaded = load_suites(cfg, open_store(cfg, target) if args.suite == "heldout" else None)[0]
    renderer = Renderer(target, None)
    prompts = [renderer.prompt_ids(prompt, 0, []) for prompt in loaded.prompts]
    result = make_schedule(
        target, drafter.proposer, prompts, suites[name], [int(c) for c in args.concurrency.split(",")],
        tokens=args.tokens, repeats=args.repeats, check=not args.no_check,
    )  # fmt: skip
    result |= {"suite": name, "target": target.config.name, "device": str(target.device), "provenance": provenance()}
    write_json(out / "schedule.json", finite(result))
    figure(result).savefig(out / "figures" / "schedule.png", dpi=110)
    print(text(result))
    print(f"\nwritten to {out / 'schedule.json'}")
    return 0
