"""The study's numbers: table, verdict, figures and page.

τ is pooled (tokens / cycles) over the held-out texts, then averaged over seeds. Differences are paired by text and by
seed; the interval resamples both, seeds with their texts.
"""

import base64
import io
from html import escape
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.page import STYLE
from trainer.study.config import BASELINE, StudyConfig

RESAMPLES = 10_000
KINDS = {"greedy": "T = 0", "sampled": "T = 1"}


def difference(row: np.ndarray, base: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Mean over seeds of τ(row) - τ(base), its 95 % interval and P(row better).

    Args:
        row, base: tokens and cycles, [seeds, texts, 2], the same texts in the same order.
    """
    rng = np.random.default_rng(seed)
    runs, texts = row.shape[:2]
    both = np.concatenate([row, base], 2).astype(float)  # [seeds, texts, 4]
    whole = both.sum(1)
    point = (whole[:, 0] / whole[:, 1] - whole[:, 2] / whole[:, 3]).mean()
    times = rng.multinomial(texts, np.full(texts, 1 / texts), size=RESAMPLES)  # how often each text is drawn
    sums = times @ both  # [seeds, resamples, 4]
    differences = sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]
    drawn = differences[rng.integers(runs, size=(runs, RESAMPLES)), np.arange(RESAMPLES)].mean(0)
    low, high = np.percentile(drawn, [2.5, 97.5])
    better = float((drawn > 0).mean() + 0.5 * (drawn == 0).mean())
    return {"difference": float(point), "ci95": [float(low), float(high)], "probability_better": better}


def summarise(rows: dict, cfg: StudyConfig, target: str, stores: dict, made: dict[str, Any]) -> dict[str, Any]:
    """JSON-able: per row τ of every seed, the difference to the baseline, step cost; and the verdict.

    Args:
        rows: row -> seed -> what `measured` gives.
    """
    table: dict[str, Any] = {}
    kinds = [k for k in KINDS if k in stores]
    base = {k: np.array([r[k] for r in rows[BASELINE].values()]) for k in kinds}
    base_ms = np.mean([r["step_ms"] + r["refresh_ms"] for r in rows[BASELINE].values()])
    for name, runs in rows.items():
        entry: dict[str, Any] = {"seeds": list(runs)}
        for k in kinds:
            mine = np.array([r[k] for r in runs.values()])
            sums = mine.sum(1)
            entry[k] = {"tau": (sums[:, 0] / sums[:, 1]).tolist()}
            entry[k]["mean"] = float(np.mean(entry[k]["tau"]))
            if name != BASELINE:
                entry[k] |= difference(np.broadcast_to(mine, base[k].shape), base[k])
                entry[k]["relative"] = entry[k]["difference"] / float(
                    (base[k].sum(1)[:, 0] / base[k].sum(1)[:, 1]).mean()
                )
        entry["step_cost"] = float(np.mean([r["step_ms"] + r["refresh_ms"] for r in runs.values()]) / base_ms)
        entry["selection"] = {seed: r["selection"] for seed, r in runs.items()}
        table[name] = entry
    out = {
        "target": target,
        "start": cfg.start_from or f"{cfg.sft_steps} steps of SFT",
        "steps": cfg.steps,
        "lr_share": cfg.lr_share,
        "texts": {k: int(base[k].shape[1]) for k in kinds},
        "supervised_tokens": supervised_tokens(stores["greedy"]),
        "rows": table,
        "provenance": made,
    }
    return out | {"verdict": verdict(out)}


def supervised_tokens(store) -> int:
    """Answer tokens of the training texts."""
    d = store.documents
    train = np.array([s == "train" for s in d["split"].to_pylist()])
    return int((d["length"].to_numpy() - d["prompt_length"].to_numpy())[train].sum())


def verdict(result: dict[str, Any]) -> str:
    """Which second stage wins at T = 0, whether its interval excludes zero, and what it does at T = 1."""
    rows = {n: r for n, r in result["rows"].items() if n not in (BASELINE, "start")}
    if not rows:
        return f"Only {BASELINE} was run: nothing to compare."
    name = max(rows, key=lambda n: rows[n]["greedy"]["mean"])
    best = rows[name]["greedy"]
    low, high = best["ci95"]
    said = "excludes zero" if low > 0 or high < 0 else "contains zero"
    text = (
        f"Best at T = 0: {name} with τ {best['mean']:.3f}, {best['difference']:+.3f} ({best['relative']:+.1%}) against "
        f"equal-compute {BASELINE}; the 95 % interval [{low:+.3f}, {high:+.3f}] {said}"
    )
    if best["difference"] <= 0:
        text = f"No second stage beats {BASELINE} at T = 0. {text}"
    if "sampled" in rows[name]:
        text += f"; at T = 1 its τ changes by {rows[name]['sampled']['relative']:+.1%}"
    return text + "."


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The table, heading first."""
    kinds = [k for k in KINDS if k in result["texts"]]
    head = ["second stage"]
    for k in kinds:
        head += [f"τ {KINDS[k]}", "seeds", f"against {BASELINE}", "95 % interval"]
    out = [[*head, "step cost"]]
    for name, row in result["rows"].items():
        cells = ["none (SFT only)" if name == "start" else name]
        for k in kinds:
            r = row[k]
            cells += [f"{r['mean']:.3f}", " ".join(f"{t:.3f}" for t in r["tau"])]
            if "ci95" in r:
                cells += [
                    f"{r['difference']:+.3f} ({r['relative']:+.1%})",
                    f"[{r['ci95'][0]:+.3f}, {r['ci95'][1]:+.3f}]",
                ]
            else:
                cells += ["–", "–"]
        out.append([*cells, "–" if name == "start" else f"{row['step_cost']:.2f} ×"])
    return out


def text(result: dict[str, Any]) -> str:
    table = lines(result)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    rows = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(["", *rows, "", result["verdict"]])


def metrics(result: dict[str, Any]) -> dict[str, float]:
    """Flat numbers for MLflow."""
    out = {}
    for name, row in result["rows"].items():
        out[f"{name}/step_cost"] = row["step_cost"]
        for k in result["texts"]:
            out |= {f"{name}/{k}/{key}": row[k][key] for key in ("mean", "difference", "relative") if key in row[k]}
    return out


def figures(result: dict[str, Any]) -> dict[str, Figure]:
    """Differences with intervals; selection τ while training."""
    names = [n for n in result["rows"] if n not in (BASELINE, "start")]
    fig = Figure(figsize=(7, 1.2 + 0.5 * len(names)), layout="constrained")
    ax = fig.subplots()
    for shift, (k, color) in enumerate(zip(result["texts"], ("#2563a8", "#d9822b"), strict=False)):
        for i, n in enumerate(names):
            r = result["rows"][n][k]
            ax.plot(r["ci95"], [i + 0.18 * shift] * 2, color=color, lw=2, label=KINDS[k] if i == 0 else None)
            ax.plot(r["difference"], i + 0.18 * shift, "o", color=color)
    ax.axvline(0, color="grey", lw=0.8)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(-0.5, max(len(names), 1) - 0.4)
    ax.set_xlabel(f"τ against {BASELINE} at equal steps, 95 % interval over texts and seeds")
    if names:
        ax.legend(frameon=False)
    curves = Figure(figsize=(7, 4), layout="constrained")
    ax = curves.subplots()
    for n, row in result["rows"].items():
        runs = [np.array(s) for s in row["selection"].values()]
        if n != "start" and runs and all(len(r) == len(runs[0]) for r in runs):
            ax.plot(runs[0][:, 0], np.mean([r[:, 1] for r in runs], 0), "o-", ms=3, label=n)
    ax.set(xlabel="step of the second stage", ylabel="replay τ on the selection texts, mean over seeds")
    ax.legend(frameon=False, fontsize=8)
    return {"differences.png": fig, "selection.png": curves}


def page(result: dict[str, Any], drawn: dict[str, Figure]) -> str:
    """report.html, complete in itself."""
    head, *body = lines(result)
    rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in body)
    heads = "".join(f"<th>{escape(h)}</th>" for h in head)
    images = "".join(
        f"<figure><img alt='{name}' src='{_inline(f)}' style='max-width:100%'></figure>" for name, f in drawn.items()
    )
    about = (
        f"Target {result['target']}, {result['supervised_tokens']:,} supervised tokens. One drafter "
        f"({result['start']}); {result['steps']} further steps by each second stage, on the same texts "
        f"at {result['lr_share']:g} × the learning rate. τ by replay on {result['texts']['greedy']} held-out texts "
        "that chose no drafter. Step cost: seconds per step, replays for block starts included, over the baseline's."
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>RL study</title>"
        f"<style>{STYLE}</style></head><body><h1>Second stages compared</h1><p>{escape(result['verdict'])}</p>"
        f"<p class='note'>{escape(about)}</p><div style='overflow-x:auto'><table><tr>{heads}</tr>{rows}</table></div>"
        f"<div class='row'>{images}</div></body></html>\n"
    )


def _inline(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
