"""`evaluate(cfg)`: τ, speed-up, lossless check and replay of a drafter on suites of prompts, into report.json.

python -m eval --model smollm2-135m --drafter runs/demo --suites heldout limit=12 max_new_tokens=96
"""

import json
from pathlib import Path
from typing import Any

from eval.champion import register
from eval.config import EvalConfig
from eval.decode import DecodeSettings, decode, plain_decode
from eval.engines_measure import check_engine, measure_engine
from eval.engines_measure import table as engine_table
from eval.figures import all_figures, save_figures
from eval.measure import SAMPLES, SuiteMeasurement, measure, summarise
from eval.metrics import Cycles, tau_pooled
from eval.page import page
from eval.prompts import HELDOUT, LoadedSuite
from eval.replay import replay
from eval.report import (
    SCHEMA,
    cycles_table,
    finite,
    flat_metrics,
    merge,
    read_report,
    samples,
    terminal_table,
    write_report,
)
from eval.session import (
    LoadedDrafter,
    Renderer,
    checkpoint_folder,
    load_drafters,
    load_matching_target,
    load_suites,
    newest_run,
    open_store,
    store_texts,
)
from features.reader import FeatureStore
from features.target import Target
from infra.config import to_toml
from infra.progress import Progress
from infra.provenance import provenance, write_json
from infra.tracking import track

AFTER, BEFORE = "drafter", "before"


def evaluate(cfg: EvalConfig) -> dict[str, Any]:
    """Evaluate; write report.json, figures, cycles.parquet and samples.json; log to MLflow; return the report.

    Raises:
        FlashdraftError: a target, drafter, store or suite that is missing, unreadable, or does not fit the others.
    """
    folders = {AFTER: checkpoint_folder(cfg.drafter or newest_run(cfg.model))}
    if cfg.before:
        folders[BEFORE] = checkpoint_folder(cfg.before)
    out = output_folder(cfg, folders[AFTER])
    target = load_matching_target(cfg, folders)
    drafters = load_drafters(cfg, target, folders)
    if cfg.engine:
        check_engine(cfg, drafters[AFTER])
    for_device = (
        {"max_new_tokens": 128, "batch_size": 8}
        if target.device.type == "cpu"
        else {"max_new_tokens": 2048, "batch_size": 1}
    )
    cfg = cfg.model_copy(update={k: v for k, v in for_device.items() if getattr(cfg, k) is None})
    store = open_store(cfg, target) if HELDOUT in cfg.suites else None
    suites = load_suites(cfg, store)
    settings = DecodeSettings(
        max_new_tokens=cfg.max_new_tokens, temperature=cfg.temperature, verification=cfg.verification,
        verify_length=cfg.verify_length, batch_size=cfg.batch_size, seed=cfg.seed,
    )  # fmt: skip
    measured = run_suites(target, drafters, suites, settings, Renderer(target, cfg.thinking))
    report = build_report(cfg, target, drafters, measured, settings, store)
    if cfg.engine:
        for name, figures in measure_engine(cfg, target, drafters[AFTER], AFTER, measured, settings).items():
            report["suites"][name]["engine"] = figures
    report = finite(report)
    out.mkdir(parents=True, exist_ok=True)
    kept = {name: samples(m, target.tokenizer, SAMPLES) for name, m in measured.items()}
    figures = all_figures(report, kept)
    figure_paths = save_figures(figures, out / "figures")
    _write_parquet(cycles_table(measured), out / "cycles.parquet")
    latest = report
    report = merge(report, read_report(out / "report.json"))
    path = write_report(out, report)
    page_path = out / "report.html"
    page_path.write_text(page(report, _kept_samples(out, kept)))
    if cfg.track:
        _log(cfg, out, latest, kept, figure_paths, [path, page_path])
    return report


def run_suites(
    target: Target,
    drafters: dict[str, LoadedDrafter],
    suites: list[LoadedSuite],
    settings: DecodeSettings,
    renderer: Renderer,
) -> dict[str, SuiteMeasurement]:
    """Suite name -> measurement. A short unrecorded decode first: the first passes of a process are slower."""
    if suites and suites[0].prompts:
        warm = DecodeSettings(max_new_tokens=4)
        prompt = [renderer.prompt_ids(suites[0].prompts[0], 0, [])]
        plain_decode(target, prompt, warm)
        for d in drafters.values():
            decode(target, d.proposer, prompt, warm)
    total = sum(max(len(p.turns), 1) for s in suites for p in s.prompts)
    out = {}
    with Progress(total, "evaluate", "answers") as progress:
        for suite in suites:
            progress.update(0, suite=suite.name)
            out[suite.name] = measure(target, drafters, suite, settings, renderer, on_answers=progress.update)
    return out


def build_report(
    cfg: EvalConfig,
    target: Target,
    drafters: dict[str, LoadedDrafter],
    measured: dict[str, SuiteMeasurement],
    settings: DecodeSettings,
    store: FeatureStore | None,
) -> dict[str, Any]:
    record = provenance(config=cfg.model_dump(mode="json"))
    about_target = {
        "name": target.config.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        **target.source_identity(),
        "chat_template_args": Renderer(target, cfg.thinking).args,
    }
    used = cfg.model_dump(
        mode="json",
        include={
            "max_new_tokens",
            "temperature",
            "verification",
            "verify_length",
            "batch_size",
            "thinking",
            "seed",
            "limit",
        },
    )
    parts = {}
    for label, d in drafters.items():
        K = d.model.config.block_size
        suites = {}
        for name, m in measured.items():
            s = summarise(m, label, K, settings)
            if name == HELDOUT and store is not None:
                s["store_replay_tau_pooled"] = store_replay(d, store, m, settings.verify_length or K)
            suites[name] = {**s, "settings": used, "origin": m.suite.origin, "created": record["created"]}
        parts[label] = {"drafter": d.describe(), "target": about_target, "suites": suites}
    report = {"schema": SCHEMA, **parts[AFTER], "provenance": record}
    if BEFORE in parts:
        report["before"] = parts[BEFORE]
    return report


def store_replay(drafter: LoadedDrafter, store: FeatureStore, measurement: SuiteMeasurement, b: int) -> float:
    """Pooled τ on the stored texts of the same held-out prompts (longer than the live answers where those were cut)."""
    texts = store_texts(store, measurement.suite.prompts, drafter.model.config.target_layer_ids)
    together = Cycles.concat(replay(drafter.model, drafter.proposer.head, texts, verify_lengths=(b,))[b])
    return tau_pooled([int(together.emitted.sum())], [len(together)])


def output_folder(cfg: EvalConfig, checkpoint: Path) -> Path:
    """`runs/demo` for `runs/demo/drafter`, else `runs/eval-<folder>`."""
    if cfg.out:
        return Path(cfg.out)
    if checkpoint.name == "drafter":
        return checkpoint.parent
    return Path("runs") / f"eval-{checkpoint.resolve().name}"


def _kept_samples(out: Path, kept: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """samples.json with the new suites put in: the page shows those of earlier evaluations too."""
    path = out / "samples.json"
    earlier = json.loads(path.read_text()) if path.is_file() else {}
    write_json(path, {**earlier, **kept})
    return {**earlier, **kept}


def _write_parquet(table, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path)


def _log(
    cfg: EvalConfig,
    out: Path,
    report: dict[str, Any],
    kept: dict[str, list[dict[str, Any]]],
    figures: list[Path],
    files: list[Path],
) -> None:
    """The drafter's parent run gets the metrics (a column per suite in the UI), the child run everything."""
    tags = {"target": report["target"]["name"], "suites": ",".join(report["suites"])}
    with track(out.name, "eval", folder=out, config_toml=to_toml(cfg), tags=tags) as tracker:
        metrics = flat_metrics(report["suites"])
        tracker.metrics(metrics)
        tracker.metrics(metrics, on_parent=True)
        every_suite = [f"tau_pooled/{suite}" for suite in report["suites"]]
        tracker.columns(["tau_pooled/mean", "tau_macro/mean", "speedup/mean", *every_suite], "tau_pooled/mean")
        if BEFORE in report:
            before = flat_metrics(report[BEFORE]["suites"])
            tracker.metrics({f"before/{k}": v for k, v in before.items() if k.startswith(("tau", "speedup"))})
        for figure in figures:
            tracker.artifact(figure, "figures")
        for file in files:
            tracker.artifact(file)
        rows = [(suite, s) for suite, part in kept.items() for s in part]
        if rows:
            tracker.table(
                "samples.json",
                {
                    "suite": [suite for suite, _ in rows],
                    "prompt": [s["prompt"][-500:] for _, s in rows],
                    "answer": ["".join(s["tokens"]) for _, s in rows],
                    "cycles": [json.dumps([c[1] for c in s["cycles"].get(AFTER, [])]) for _, s in rows],
                },
            )
    print(register(tracker.client, report, tracker.parent_id, tracker.run_id))


def summary(report: dict[str, Any]) -> str:
    """What the command line prints at the end."""
    d, t = report["drafter"], report["target"]
    head = (
        f"{d['path']}: {d['parameters'] / 1e6:.1f} M parameters, block {d['block_size']}, for {t['name']} "
        f"({t['dtype']}, {t['device']})"
    )
    return "\n\n".join(filter(None, (head, terminal_table(report), engine_table(report))))
