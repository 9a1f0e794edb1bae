"""report.json, the terminal table, MLflow's keys, and the cycles as a table. Schema: docs/evaluation.md."""

import json
import math
from pathlib import Path
from typing import Any

from infra.provenance import write_json

SCHEMA = 1


def merge(report: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """`report` with the suites of an earlier one that it has not measured itself, if target and drafter are the same.

    So `runs/<name>/report.json` holds the latest measurement of every suite, each with its own settings.
    """
    if not earlier or earlier.get("schema") != SCHEMA:
        return report
    merged = _same(report, earlier)
    if "before" in earlier and merged is not report:
        mine = report.get("before")
        merged["before"] = _same(mine, earlier["before"]) if mine else earlier["before"]
    return merged


def _same(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    identity = [
        (r["target"]["name"], r["target"]["weights_digest"], r["drafter"]["weights_sha256"]) for r in (new, old)
    ]
    return {**new, "suites": {**old["suites"], **new["suites"]}} if identity[0] == identity[1] else new


def read_report(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def write_report(folder: Path, report: dict[str, Any]) -> Path:
    """Write report.json; the report must be `finite`."""
    path = folder / "report.json"
    write_json(path, report)
    return path


def finite(value: Any) -> Any:
    """NaN and infinities as null: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def flat_metrics(suites: dict[str, dict[str, Any]]) -> dict[str, float]:
    """MLflow's metrics: `tau_pooled/<suite>` and so on, a column per suite in the comparison; and means over suites."""
    out: dict[str, float] = {}
    for name, s in suites.items():
        low, high = s["tau_ci95"]
        values = {
            "tau_pooled": s["tau_pooled"],
            "tau_macro": s["tau_macro"],
            "tau_ci95_low": low,
            "tau_ci95_high": high,
            "replay_tau_pooled": s.get("replay_tau_pooled"),
            "store_replay_tau_pooled": s.get("store_replay_tau_pooled"),
            "speedup": s["speedup"],
            "engine_tau_pooled": s.get("engine", {}).get("tau_pooled"),
            "engine_speedup": s.get("engine", {}).get("speedup"),
            "full_block_rate": s["full_block_rate"],
            "draft_ms": s["draft_ms"],
            "verify_ms": s["verify_ms"],
            "repeated_4grams": s["repeated_4grams"],
            "lossless_checked": s["lossless"]["checked"],
            "lossless_identical": s["lossless"]["identical"],
        }
        out |= {f"{key}/{name}": float(v) for key, v in values.items() if v is not None and math.isfinite(v)}
        for k, c in enumerate(s["conditional_acceptance"], 1):
            if c is not None:
                out[f"acceptance_at_{k:02d}/{name}"] = c
    for key in ("tau_pooled", "tau_macro", "speedup"):
        values = [s[key] for s in suites.values() if s[key] is not None and math.isfinite(s[key])]
        if values:
            out[f"{key}/mean"] = sum(values) / len(values)
    return out


def terminal_table(report: dict[str, Any]) -> str:
    """One line per suite: τ with its interval, change against before, speed-up, lossless check, replay."""
    before = (report.get("before") or {}).get("suites", {})
    lines = [
        ["suite", "prompts", "tokens", "τ pooled [95 %]", "τ macro", "speed-up", "lossless", "replay τ", "repeats"]
    ]
    if before:
        lines[0].insert(3, "τ before")
    for name, s in report["suites"].items():
        line = [
            name,
            str(len(s["prompts"])),
            str(s["tokens"]),
            f"{_f(s['tau_pooled'])} [{_f(s['tau_ci95'][0])}, {_f(s['tau_ci95'][1])}]",
            _f(s["tau_macro"]),
            f"{_f(s['speedup'])}×",
            verdict(s["lossless"]),
            replay_verdict(s),
            f"{s['repeated_4grams']:.0%}",
        ]
        if before:
            line.insert(3, _f(before[name]["tau_pooled"]) if name in before else "–")
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rows[0], "─" * len(rows[0]), *rows[1:]])


def verdict(lossless: dict[str, Any]) -> str:
    """`1152/1152 ✓`, with the number of noise-level divergences where there are some."""
    if not lossless["checked"] and "rule" in lossless:
        return "by law"
    good = lossless["checked"] == lossless["identical"]
    text = f"{lossless['identical']}/{lossless['checked']} {'✓' if good else '✗'}"
    ties = sum(d["tolerated"] for d in lossless["divergences"])
    return text + (f" ({ties} ties)" if ties else "")


def replay_verdict(s: dict[str, Any]) -> str:
    """Replay τ, `=` where it made live decoding's very cycles, else how many answers differ; store τ behind a slash."""
    if s.get("replay_tau_pooled") is None:
        return "–"
    differing = s["answers"] - s["replay_equal_answers"]
    text = f"{s['replay_tau_pooled']:.3f} " + ("=" if not differing else f"({differing} answers differ)")
    stored = s.get("store_replay_tau_pooled")
    return text + (f" / store {stored:.3f}" if stored is not None else "")


def _f(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def cycles_table(measurements: dict[str, Any]):
    """Every cycle of every drafter as a pyarrow table: the raw material of all the figures above."""
    import pyarrow as pa

    rows: dict[str, list[Any]] = {
        k: [] for k in ("suite", "prompt", "turn", "drafter", "start", "verify_length", "matched", "emitted",
                        "concurrency", "draft_ms", "verify_ms")
    }  # fmt: skip
    for suite, m in measurements.items():
        for answer in m.answers:
            for label, trace in answer.drafted.items():
                for c in trace.cycles:
                    values = (
                        suite, m.suite.prompts[answer.prompt].id, answer.turn, label, c.start, c.verify_length,
                        c.matched, c.emitted, c.concurrency, c.draft_ms, c.verify_ms,
                    )  # fmt: skip
                    for column, value in zip(rows.values(), values, strict=True):
                        column.append(value)
    return pa.table(rows)


def samples(measurement: Any, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """The first answers of a suite with their cycles, for the pages.

    `tokens`: the answer's tokens as text. `cycles[label]`: per cycle [index of its first token in the answer, emitted,
    accepted drafts among them, drafts as text].
    """
    out = []
    for answer in measurement.answers[:count]:
        P = len(answer.plain.prompt_ids)
        out.append(
            {
                "prompt_id": measurement.suite.prompts[answer.prompt].id,
                "turn": answer.turn,
                "prompt": tokenizer.decode(answer.plain.prompt_ids),
                "tokens": [tokenizer.decode([t]) for t in answer.plain.answer_ids],
                "cycles": {
                    label: [
                        [
                            c.start - P + 1,
                            c.emitted,
                            min(c.matched, c.emitted),
                            [tokenizer.decode([t]) for t in c.drafts],
                        ]
                        for c in trace.cycles
                    ]
                    for label, trace in answer.drafted.items()
                    if trace.answer_ids == answer.plain.answer_ids
                },
            }
        )
    return out
