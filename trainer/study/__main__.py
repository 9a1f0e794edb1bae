"""`make rl-study`: which second stage lengthens what is accepted, at equal steps on equal data, and how sure that is.

One SFT drafter; from it every row of `ROWS` is trained with each seed; each run's best drafter (chosen on the selection
texts) is replayed on the other held-out texts, greedy ones and ones drawn at temperature 1. Whatever is finished stays:
the same command goes on where it was interrupted.

    python -m trainer.study [seeds=[0] steps=200 rows=["sft-decay","rl-visited"] rl.rl-visited.floor=0.2 ...]
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eval.replay import replay
from eval.session import checkpoint_folder
from features.reader import FeatureStore
from features.target import FrozenHead, load_frozen_head, load_target
from features.target_config import load_target_config
from infra.cli import main
from infra.config import load_config, save_toml, to_toml, validate
from infra.errors import ConfigError
from infra.provenance import provenance, write_json
from infra.tracking import track
from trainer.config import LossConfig, SftConfig, TrainConfig
from trainer.drafter.checkpoint import load_drafter
from trainer.engine import World, init_world
from trainer.heldout import heldout_rows, store_text
from trainer.rl_config import GroupConfig, RlConfig, RlSection
from trainer.run_folder import RUNS
from trainer.study import corpus, report
from trainer.study.config import ROWS, SETTINGS, StudyConfig


def run(cfg: StudyConfig) -> dict[str, Any]:
    """The whole study; returns what study.json holds.

    Raises:
        ConfigError: an unknown row, or a store without enough held-out texts.
    """
    unknown = sorted(set(cfg.rows) - set(ROWS))
    if unknown or cfg.rows[:1] != ROWS[:1]:
        raise ConfigError(f"rows {list(cfg.rows)} must begin with {ROWS[0]!r} and be among {', '.join(ROWS)}")
    folder = RUNS / cfg.name
    folder.mkdir(parents=True, exist_ok=True)
    save_toml(cfg, folder / "study.toml")
    model = cfg.model or str(corpus.target_file(folder))
    target = load_target_config(model)
    world = init_world()
    stores = open_stores(cfg, model, folder)
    head = load_frozen_head(target, world.device, None)
    if cfg.start_from:
        sft = checkpoint_folder(cfg.start_from)
    else:
        sft = train_sft(cfg, model, stores["greedy"], world)
    texts = report_texts(cfg, stores)
    rows = {"start": {"0": measured(folder / "results" / "start.json", sft, texts, head)}}
    for name in cfg.rows:
        rows[name] = {}
        for seed in cfg.seeds:
            began = time.monotonic()
            at, record = train_row(cfg, name, seed, model, stores["greedy"], sft, world), folder / "results"
            rows[name][str(seed)] = measured(record / f"{name}-{seed}.json", at, texts, head)
            spent = time.monotonic() - began
            tau = np.sum(rows[name][str(seed)]["greedy"], 0)
            print(f"{name}, seed {seed}: τ {tau[0] / tau[1]:.3f} ({spent:.0f} s)", file=sys.stderr, flush=True)
    result = report.summarise(rows, cfg, target.name, stores, provenance())
    write_json(folder / "study.json", result)
    figures = report.figures(result)
    (folder / "report.html").write_text(report.page(result, figures))
    with track(cfg.name, "rl-study", folder=folder, config_toml=to_toml(cfg), tags={"target": target.name}) as t:
        t.metrics(report.metrics(result))
        t.artifact(folder / "study.json")
        t.artifact(folder / "report.html")
        for name, figure in figures.items():
            t.figure(name, figure)
    print(report.text(result))
    print(f"\n{folder / 'report.html'}, {folder / 'study.json'}")
    return result


def open_stores(cfg: StudyConfig, model: str, folder: Path) -> dict[str, FeatureStore]:
    """`greedy` (training and held-out) and, where there is one, `sampled`."""
    if cfg.store:
        named = {"greedy": cfg.store, "sampled": cfg.sampled_store}
        return {k: FeatureStore.open(v) for k, v in named.items() if v}
    target = load_target(load_target_config(model))
    root = folder / "store"
    return {
        "greedy": corpus.make_store(target, root, train=cfg.stories, heldout=cfg.heldout, sampled=False, seed=1),
        "sampled": corpus.make_store(target, root, train=0, heldout=cfg.heldout, sampled=True, seed=2),
    }


def report_texts(cfg: StudyConfig, stores: dict[str, FeatureStore]) -> dict[str, tuple[FeatureStore, list[int]]]:
    """Held-out rows of each store that no run was chosen by."""
    chosen = set(heldout_rows(stores["greedy"], cfg.selection_documents))
    every = {name: heldout_rows(store, 10**9) for name, store in stores.items()}
    every["greedy"] = [r for r in every["greedy"] if r not in chosen]
    if len(every["greedy"]) < 2:
        raise ConfigError(
            f"store {stores['greedy'].uri} has {len(chosen)} held-out texts, all of which choose drafters; lower "
            "selection_documents, or hold out more"
        )
    return {name: (stores[name], rows) for name, rows in every.items()}


def train_sft(cfg: StudyConfig, model: str, store: FeatureStore, world: World) -> Path:
    """The drafter that all rows start from."""
    from trainer.sft import train

    every = max(cfg.sft_steps // 5, 1)
    return whole(
        train,
        SftConfig(
            model=model, name=f"{cfg.name}/sft", data=cfg.data.model_copy(update={"store": str(store.uri)}),
            drafter=cfg.drafter, optim=cfg.optim, engine=cfg.engine,
            train=train_section(cfg, cfg.sft_steps, every, seed=0),
        ),
        world,
    )  # fmt: skip


def train_row(cfg: StudyConfig, name: str, seed: int, model: str, store: FeatureStore, sft: Path, world: World) -> Path:
    """The best drafter of one second stage."""
    shared: dict[str, Any] = {
        "model": model,
        "name": f"{cfg.name}/{name}-{seed}",
        "data": cfg.data.model_copy(update={"store": str(store.uri)}),
        "drafter": cfg.drafter.model_copy(update={"start_from": str(sft)}),
        "optim": cfg.optim.model_copy(update={"lr": cfg.optim.lr * cfg.lr_share}),
        "engine": cfg.engine,
        "train": train_section(cfg, cfg.steps, max(cfg.steps // 5, 1), seed=1000 + seed),
    }
    if name.startswith("sft"):
        from trainer.sft import train

        loss = LossConfig(weighting="dpace" if name == "sft-dpace" else "decay")
        return whole(train, SftConfig(loss=loss, **shared), world)
    changes: dict[str, Any] = {}
    if name in ("rl-uniform", "rl-followed"):
        changes = {"visited_share": 0.0, "follow_share": 0.5 if name == "rl-followed" else 0.0}
    if name == "rl-group":
        changes |= {"estimator": "group", "group": GroupConfig().model_dump()}
    rl = validate(RlSection, changes | cfg.rl.get("all", {}) | cfg.rl.get(name, {}), f"rl.{name}")
    if name == "rl-onpolicy":
        from trainer.onpolicy.stage import for_study
        from trainer.onpolicy.stage import train as train_onpolicy

        return whole(train_onpolicy, for_study(shared, rl), world)
    from trainer.rl import train as train_rl

    return whole(train_rl, RlConfig(rl=rl, **shared), world)


def whole(train: Callable[..., Path], cfg: SftConfig, world: World) -> Path:
    """`train(cfg, world)`; ends the study where a signal has ended the run early (it has saved)."""
    folder = train(cfg, world)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    last = (folder.parent / "metrics.jsonl").read_text().splitlines()[-1]
    if json.loads(last)["step"] + 1 < (cfg.train.steps or 0):
        sys.exit(0)
    return folder


def train_section(cfg: StudyConfig, steps: int, every: int, seed: int) -> TrainConfig:
    return TrainConfig(
        steps=steps, seed=seed, log_every=10, eval_every=every, eval_documents=cfg.selection_documents,
        save_every=max(steps // 2, 1), keep=1,
    )  # fmt: skip


def measured(
    record: Path, drafter_folder: Path, texts: dict[str, tuple[FeatureStore, list[int]]], head: FrozenHead
) -> dict[str, Any]:
    """Tokens and cycles per text [texts, 2] by kind of text, and seconds per step; from `record` if it is there."""
    if record.is_file():
        return json.loads(record.read_text())
    drafter = load_drafter(drafter_folder, device=head.head_VD.device).eval()
    out: dict[str, Any] = {}
    for kind, (store, rows) in texts.items():
        cycles = replay(drafter, head, (store_text(store, row) for row in rows))[drafter.config.block_size]
        out[kind] = [[int(c.emitted.sum()), len(c)] for c in cycles]
    lines = [json.loads(x) for x in (drafter_folder.parent / "metrics.jsonl").read_text().splitlines()]
    seconds = [x["step_s"] for x in lines[1:]]  # the first one warms up
    out["step_ms"] = 1e3 * float(np.median(seconds))
    out["refresh_ms"] = 1e3 * sum(x.get("refresh_s", 0.0) for x in lines) / len(lines)
    out["selection"] = [[x["step"] + 1, x["heldout_tau"]] for x in lines if "heldout_tau" in x]
    record.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, out)
    return out


def _main(argv: list[str]) -> None:
    if argv[:1] == ["--help"]:
        print(__doc__)
        return
    run(load_config(StudyConfig, SETTINGS, argv))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # matrices of 64 columns: a second thread costs more than it brings
    sys.path.insert(0, str(Path.cwd()))
    main(lambda: _main(sys.argv[1:]))
