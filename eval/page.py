"""report.html: the evaluation on one page that needs nothing else (no network, no script library).

τ per suite against a baseline, accepted lengths, acceptance by position, and sampled answers with every token coloured
by who wrote it. Figures are inline SVG drawn here.
"""

from html import escape
from typing import Any

from eval.report import replay_verdict, verdict

STYLE = """
:root { --ours: #2563a8; --base: #b0b7c0; --target: #d9822b; --ink: #1c2430; --soft: #5d6875; --line: #dfe4ea; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p.note, figcaption, .soft { color: var(--soft); font-size: .88rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .5rem; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; color: var(--soft); font-size: .85rem; }
.good { color: #1a7f4b; } .bad { color: #b3261e; font-weight: 600; }
.row { display: flex; flex-wrap: wrap; gap: 1.2rem; } figure { margin: 0; flex: 1 1 320px; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px;
          padding: .8rem 1rem; font: 13.5px/1.75 ui-monospace, monospace; }
.d { background: #d3e3f5; border-radius: 2px; } .t { background: #f8dfc2; border-radius: 2px; }
.c { border-left: 2px solid #8794a3; padding-left: 1px; } .p { background: #e7e9ec; border-radius: 2px; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--soft); }
.strip { display: flex; height: 12px; margin: .35rem 0 .7rem; overflow: hidden; border-radius: 3px; }
.key span { padding: 0 .35rem; margin-right: .7rem; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
"""


def page(
    report: dict[str, Any], samples: dict[str, list[dict[str, Any]]], baseline: dict[str, Any] | None = None
) -> str:
    """The page.

    Args:
        report: as in report.json.
        samples: suite -> answers with cycles (samples.json).
        baseline: suites to compare with; None takes `report["before"]`, the untrained drafter.
    """
    before = report.get("before") or {}
    base = baseline if baseline is not None else before.get("suites", {})
    base_name = "baseline" if baseline is not None else "before training"
    d, t, made = report["drafter"], report["target"], report["provenance"]
    facts = (
        f"{d['parameters'] / 1e6:.1f} M parameters in {d['num_hidden_layers']} layers, blocks of {d['block_size']}, "
        f"for {t['name']} ({t['dtype']} on {t['device']})"
    )
    parts = [
        f"<h1>Drafter {escape(d['path'])}</h1><p class='note'>{escape(facts)}. Measured "
        f"{escape(made['created'])}, revision {escape(str(made['git_revision'])[:12])}.</p>",
        "<h2>Acceptance length by suite</h2>",
        "<p class='note'>τ is the number of tokens that one pass of the target yields: the drafts that stood, and one "
        "of its own. 1 is plain decoding. Whiskers: 95 % interval over prompts.</p>",
        _bars(report["suites"], base, base_name),
        _table(report["suites"], base, base_name),
    ]
    for name, suite in report["suites"].items():
        parts.append(_suite(name, suite, base.get(name), base_name, samples.get(name, [])))
    body = "\n".join(parts)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
        "content='width=device-width, initial-scale=1'>"
        f"<title>{escape(d['path'])} · acceptance</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _table(suites: dict[str, Any], base: dict[str, Any], base_name: str) -> str:
    head = ["suite", "prompts", "tokens"] + ([f"τ {base_name}"] if base else [])
    head += ["τ pooled", "95 %", "τ macro", "speed-up", "whole blocks", "unchanged text", "replay τ", "repeats"]
    rows = []
    for name, s in suites.items():
        checked = s["lossless"]
        good = checked["checked"] == checked["identical"]
        cells = [escape(name), str(len(s["prompts"])), str(s["tokens"])]
        if base:
            cells.append(_number(base[name]["tau_pooled"]) if name in base else "–")
        cells += [
            f"<b>{_number(s['tau_pooled'])}</b>",
            f"{_number(s['tau_ci95'][0])} – {_number(s['tau_ci95'][1])}",
            _number(s["tau_macro"]),
            f"{_number(s['speedup'])}×",
            _percent(s["full_block_rate"]),
            f"<span class='{'good' if good else 'bad'}'>{escape(verdict(checked))}</span>",
            escape(replay_verdict(s)),
            _percent(s["repeated_4grams"]),
        ]
        rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    heads = "".join(f"<th>{escape(h)}</th>" for h in head)
    return (
        f"<div style='overflow-x:auto'><table><tr>{heads}</tr>{''.join(rows)}</table></div>"
        "<p class='note'>Speed-up: time per token of plain decoding over that with the drafter, same run, taking "
        "turns. Unchanged text: tokens equal to plain decoding's out of those compared. Replay: τ computed from "
        "features without decoding; “=” where it made the very same cycles. Repeats: share of four-token sequences "
        "seen before in the same answer; loops flatter τ.</p>"
    )


def _suite(
    name: str, s: dict[str, Any], base: dict[str, Any] | None, base_name: str, samples: list[dict[str, Any]]
) -> str:
    origin = s["origin"]
    source = origin.get("hub") or origin.get("url") or origin.get("file") or origin.get("description", "")
    settings = s["settings"]
    how = (
        f"{len(s['prompts'])} of {origin['rows']} prompts ({source}), up to {settings['max_new_tokens']} new tokens, "
        f"temperature {settings['temperature']:g}, {settings['batch_size']} at once"
    )
    cost = ""
    if s["draft_ms"] is not None:
        cost = (
            f"<p class='note'>A cycle drafts for {s['draft_ms']:.1f} ms and verifies for {s['verify_ms']:.1f} ms; "
            f"divided by τ that is {s['predicted_ms_per_token']:.1f} ms per token, measured were "
            f"{s['ms_per_token']:.1f}; plain decoding takes {s['plain_ms_per_token']:.1f}.</p>"
        )
    tables = _breakdown("context length", "cycles", {f"{k} tokens": v for k, v in s["by_context_length"].items()})
    if s["by_category"]:
        tables += _breakdown("category", "prompts", s["by_category"])
    shown = "".join(_sample(x) for x in samples)
    return (
        f"<h2>{escape(name)}</h2><p class='note'>{escape(how)}.</p><div class='row'>"
        f"<figure>{_histogram(s, base)}<figcaption>Tokens per cycle, share of cycles.</figcaption></figure>"
        f"<figure>{_positions(s, base)}<figcaption>Acceptance of the draft at each position, where all earlier drafts "
        "stood; dotted: the share of cycles that come so far.</figcaption></figure></div>"
        f"{cost}<div class='row'>{tables}</div>"
        + (
            f"<details><summary>Sampled answers: where drafts stood and where they died</summary>{shown}</details>"
            if shown
            else ""
        )
    )


def _breakdown(by: str, counted: str, groups: dict[str, dict[str, float]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{v[counted]}</td><td>{_number(v['tau_pooled'])}</td></tr>"
        for name, v in groups.items()
    )
    head = f"<tr><th></th><th>{counted}</th><th>τ</th></tr>"
    return f"<figure><figcaption>τ by {by}</figcaption><table>{head}{rows}</table></figure>"


def _sample(sample: dict[str, Any]) -> str:
    parts = [f"<p class='soft'>{escape(sample['prompt'][-400:])}</p>"]
    for label, cycles in sample["cycles"].items():
        name = "drafter" if label == "drafter" else "before training"
        strip = "".join(
            f"<span style='flex:{a};background:var(--ours)'></span><span style='flex:{e - a};background:var(--target);"
            "border-right:1px solid white'></span>"
            for _, e, a, _ in cycles
        )
        emitted = sum(c[1] for c in cycles)
        tau = emitted / len(cycles) if cycles else float("nan")
        parts.append(f"<div class='soft'>{name}: {emitted} tokens in {len(cycles)} cycles, τ {tau:.2f}</div>")
        parts.append(f"<div class='strip'>{strip}</div>")
    if "drafter" in sample["cycles"]:
        parts.append(
            "<p class='key soft'><span class='d'>drafted, stood</span><span class='t'>the target's own</span>"
            "<span class='p'>first, from the prompt</span>a bar begins a cycle; hover shows what was drafted</p>"
        )
        parts.append(_coloured(sample["tokens"], sample["cycles"]["drafter"]))
    return "".join(parts)


def _coloured(tokens: list[str], cycles: list[list[Any]]) -> str:
    out = [f"<span class='p'>{escape(tokens[0])}</span>"] if tokens else []
    for first, emitted, accepted, drafts in cycles:
        for i in range(emitted):
            kind = "d" if i < accepted else "t"
            begin, title = "", ""
            if i == 0:
                begin, title = " c", f" title='drafted: {escape(repr(''.join(drafts)), quote=True)}'"
            out.append(f"<span class='{kind}{begin}'{title}>{escape(tokens[first + i])}</span>")
    return f"<div class='answer'>{''.join(out)}</div>"


def _bars(suites: dict[str, Any], base: dict[str, Any], base_name: str) -> str:
    """Horizontal bars, 1 at the left edge's dashed line."""
    top = max([s["tau_ci95"][1] or s["tau_pooled"] or 1 for s in suites.values()] + [2.0]) * 1.08
    left, width, step = 120, 780, 46
    height = step * len(suites) + 28
    x = lambda v: left + width * (v or 0) / top  # noqa: E731
    out = [f"<svg viewBox='0 0 {left + width + 60} {height}' role='img' aria-label='τ by suite'>"]
    for tick in range(int(top) + 1):
        dash = " stroke-dasharray='4 3' stroke='#8794a3'" if tick == 1 else " stroke='#edf0f3'"
        out.append(f"<line x1='{x(tick)}' x2='{x(tick)}' y1='0' y2='{height - 20}'{dash}/>")
        out.append(f"<text x='{x(tick)}' y='{height - 5}' text-anchor='middle'>{tick}</text>")
    for i, (name, s) in enumerate(suites.items()):
        y = i * step + 6
        out.append(f"<text x='{left - 8}' y='{y + 19}' text-anchor='end' style='fill:var(--ink)'>{escape(name)}</text>")
        if name in base:
            tau = base[name]["tau_pooled"] or 0
            out.append(
                f"<rect x='{left}' y='{y + 20}' width='{x(tau) - left}' height='11' fill='var(--base)'>"
                f"<title>{escape(base_name)}: {tau:.3f}</title></rect><text x='{x(tau) + 6}' y='{y + 30}'>{tau:.2f} "
                f"{escape(base_name)}</text>"
            )
        tau = s["tau_pooled"] or 0
        low, high = (v if v is not None else tau for v in s["tau_ci95"])
        out.append(
            f"<rect x='{left}' y='{y}' width='{x(tau) - left}' height='18' fill='var(--ours)'/>"
            f"<line x1='{x(low)}' x2='{x(high)}' y1='{y + 9}' y2='{y + 9}' stroke='black'/>"
            f"<text x='{x(max(high, tau)) + 6}' y='{y + 13}' style='fill:var(--ink);font-weight:600'>{tau:.2f}</text>"
        )
    return "".join(out) + "</svg>"


def _frame(K: int, ticks: tuple[float, ...]) -> tuple[list[str], Any, Any]:
    x = lambda k: 40 + 380 * (k - 0.5) / K  # noqa: E731
    y = lambda v: 150 - 135 * v  # noqa: E731
    out = ["<svg viewBox='0 0 430 180' role='img'>"]
    for v in ticks:
        out.append(f"<line x1='40' x2='420' y1='{y(v)}' y2='{y(v)}' stroke='#edf0f3'/>")
        out.append(f"<text x='34' y='{y(v) + 4}' text-anchor='end'>{v:.0%}</text>")
    for k in range(1, K + 1):
        out.append(f"<text x='{x(k)}' y='168' text-anchor='middle'>{k}</text>")
    return out, x, y


def _histogram(s: dict[str, Any], base: dict[str, Any] | None) -> str:
    K = len(s["accept_histogram"])
    out, x, y = _frame(K, (0, 0.25, 0.5, 0.75, 1))
    bar = 380 / K * 0.36
    for shift, (part, fill) in enumerate(((base, "var(--base)"), (s, "var(--ours)"))):
        if part is None:
            continue
        total = max(sum(part["accept_histogram"]), 1)
        for i, n in enumerate(part["accept_histogram"]):
            at = x(i + 1) - (bar if base and not shift else 0 if base else bar / 2)
            h = 135 * n / total
            box = f"x='{at:.1f}' y='{y(0) - h:.1f}' width='{bar:.1f}' height='{h:.1f}'"
            out.append(f"<rect {box} fill='{fill}'><title>{n} cycles</title></rect>")
    return "".join(out) + "</svg>"


def _positions(s: dict[str, Any], base: dict[str, Any] | None) -> str:
    K = len(s["accept_histogram"])
    out, x, y = _frame(K - 1, (0, 0.25, 0.5, 0.75, 1))
    for part, color in ((base, "var(--base)"), (s, "var(--ours)")):
        if part is None:
            continue
        points = [(x(k), y(c)) for k, c in enumerate(part["conditional_acceptance"], 1) if c is not None]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        out.append(f"<polyline points='{line}' fill='none' stroke='{color}' stroke-width='2'/>")
        out += [f"<circle cx='{a:.1f}' cy='{b:.1f}' r='3' fill='{color}'/>" for a, b in points]
        alive = " ".join(f"{x(k):.1f},{y(v):.1f}" for k, v in enumerate(part["survival"], 1))
        out.append(f"<polyline points='{alive}' fill='none' stroke='{color}' stroke-dasharray='2 3'/>")
    return "".join(out) + "</svg>"


def _number(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.0%}"
