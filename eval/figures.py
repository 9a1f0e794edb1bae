"""Figures of an evaluation, as matplotlib objects (no display needed)."""

from typing import Any

from matplotlib.figure import Figure

OURS, BEFORE, TARGET = "#2563a8", "#b0b7c0", "#d9822b"


def all_figures(report: dict[str, Any], samples: dict[str, list[dict[str, Any]]]) -> dict[str, Figure]:
    """File name -> figure."""
    before = (report.get("before") or {}).get("suites", {})
    out = {"tau.png": tau_by_suite(report["suites"], before)}
    for name, s in report["suites"].items():
        out[f"acceptance-{name}.png"] = acceptance(name, s, before.get(name))
        if samples.get(name):
            out[f"cycles-{name}.png"] = cycle_strips(name, samples[name])
    return out


def tau_by_suite(suites: dict[str, Any], before: dict[str, Any]) -> Figure:
    """Pooled τ per suite with its 95 % interval, beside the untrained drafter's."""
    fig = Figure(figsize=(2.5 + 1.1 * len(suites), 3.6), layout="constrained")
    ax = fig.subplots()
    for i, (name, s) in enumerate(suites.items()):
        if name in before:
            ax.bar(i - 0.2, before[name]["tau_pooled"], 0.38, color=BEFORE, label="before training" if i == 0 else None)
        x = i + (0.2 if name in before else 0)
        low, high = (v if v is not None else s["tau_pooled"] for v in s["tau_ci95"])
        tau = s["tau_pooled"]
        ax.bar(x, tau, 0.38, color=OURS, label="drafter" if i == 0 else None)
        ax.errorbar(x, tau, [[max(tau - low, 0)], [max(high - tau, 0)]], color="black", capsize=3)
        ax.annotate(f"{tau:.2f}", (x, max(high, tau)), ha="center", va="bottom", fontsize=9)
    ax.axhline(1, color="grey", lw=0.8, ls="--")
    ax.set_xticks(range(len(suites)), list(suites), rotation=20 if len(suites) > 3 else 0)
    ax.set_ylabel("acceptance length τ (tokens per target pass)")
    ax.margins(y=0.15)
    if before:
        ax.legend(frameon=False)
    return fig


def acceptance(name: str, suite: dict[str, Any], before: dict[str, Any] | None) -> Figure:
    """Left: cycles by emitted tokens. Right: acceptance by position, given that all earlier drafts stood."""
    fig = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = fig.subplots(1, 2)
    shown = [(before, BEFORE, "before training"), (suite, OURS, "drafter")]
    for shift, (s, color, label) in enumerate(shown):
        if s is None:
            continue
        h = s["accept_histogram"]
        total = max(sum(h), 1)
        x = [i + 1 + (0.2 if shift else -0.2) * (before is not None) for i in range(len(h))]
        left.bar(x, [n / total for n in h], 0.4 if before else 0.8, color=color, label=label)
        points = [(k, c) for k, c in enumerate(s["conditional_acceptance"], 1) if c is not None]
        if points:
            right.plot(
                *zip(*points, strict=True), "o-", color=color, label=f"{label}: given that all earlier drafts stood"
            )
        right.plot(range(1, len(h)), s["survival"], ":", color=color, label=f"{label}: all up to here stood")
    left.set(xlabel="tokens emitted by a cycle", ylabel="share of cycles", title=f"{name}: accepted lengths")
    right.set(xlabel="draft position", ylabel="acceptance", ylim=(0, 1.02), title=f"{name}: acceptance by position")
    left.legend(frameon=False)
    right.legend(frameon=False, fontsize=7)
    return fig


def cycle_strips(name: str, samples: list[dict[str, Any]]) -> Figure:
    """Where drafts died: each box a token; blue was drafted and stood, orange the target had to write itself."""
    strips = [(s["prompt_id"], label, cycles) for s in samples for label, cycles in s["cycles"].items()]
    width = min(160, max((len(s["tokens"]) for s in samples), default=1))
    fig = Figure(figsize=(11, 0.6 + 0.42 * max(len(strips), 1)), layout="constrained")
    ax = fig.subplots()
    for row, (_, _, cycles) in enumerate(strips):
        y = -row
        ax.barh(y, 1, left=0, color="black", height=0.7)  # the first token: from prefill
        for first, emitted, accepted, _ in cycles:
            if first >= width:
                break
            ax.barh(y, accepted, left=first, color=OURS, height=0.7)
            ax.barh(y, emitted - accepted, left=first + accepted, color=TARGET, height=0.7)
            ax.vlines(first, y - 0.35, y + 0.35, color="white", lw=1.2)
    ax.set_yticks(
        [-i for i in range(len(strips))], [f"{prompt[:16]} · {label}" for prompt, label, _ in strips], fontsize=7
    )
    ax.set(
        xlim=(0, width), xlabel="token of the answer", title=f"{name}: drafts that stood (blue), target's own (orange)"
    )
    return fig


def save_figures(figures: dict[str, Figure], folder) -> list:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, fig in figures.items():
        fig.savefig(folder / name, dpi=110)
        paths.append(folder / name)
    return paths
