"""The loop of every stage: build, resume, step (evaluate, save), keep the best drafter. Run by torchrun.

A stage says what it minimises, on which blocks, and when to give up (`Stage`); all else is the same for all.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from features.reader import FeatureStore
from features.stream import AnchorBatch, AnchorStream, StreamConfig, Visited
from features.target import FrozenHead, load_frozen_head
from features.target_config import load_target_config
from infra.config import load_config, to_toml
from infra.errors import FlashdraftError, TrainingError
from infra.progress import Progress
from infra.tracking import track
from kernels.decay_ce import BlockLoss
from trainer import checkpoint
from trainer.build import build_drafter, check_store, find_store
from trainer.config import SftConfig
from trainer.drafter.checkpoint import save_drafter
from trainer.drafter.model import Drafter
from trainer.engine import (
    World,
    accumulation_steps,
    build_engine,
    deepspeed_config,
    gradient_norm,
    init_world,
    save_module,
    set_lr,
)
from trainer.hardware import gpu_metrics
from trainer.heldout import heldout_rows, replay_heldout
from trainer.meter import Meter
from trainer.run_folder import RunFolder
from trainer.signals import StopRequest


class StepObjective(Protocol):
    """What a stage minimises."""

    def begin(self, step: int, total: int) -> None:
        """Called before each optimiser step: where schedules move."""

    def denominator(self, batch: AnchorBatch) -> float:
        """Of the whole optimiser step of the batch, equal on every rank."""

    def __call__(self, model: torch.nn.Module, batch: AnchorBatch, head: FrozenHead) -> BlockLoss:
        """Forward pass of one micro-batch; `numerator` is to be divided by `denominator(batch)`."""

    def metrics(self) -> dict[str, float]:
        """What the log shows besides loss and accuracy; may be empty."""


class Refreshed(Protocol):
    """What a stage makes anew from the current drafter at fixed steps (`trainer.visits`)."""

    def restore(self, step: int) -> None:
        """As it was in the run that saved its checkpoint at `step`."""

    def refresh(self, engine, step: int, stream: AnchorStream) -> bool:
        """Before `step`; True where the stream's block starts have changed."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """What distinguishes the steps of one stage from another's."""

    objective: StepObjective
    refreshed: tuple[Refreshed, ...] = ()
    visited: Visited | None = None
    """block starts to prefer"""
    visited_share: float = 0.0
    """share of a document's anchors taken from them"""
    lookahead: int = 0
    """tokens behind each block that batches carry"""
    stream: Callable[[int], Any] | None = None
    """batches from a step on, in place of the store's; what it iterates over and counts is `AnchorStream`'s"""
    patience: int = 0
    """replays without a better τ after which the stage ends; 0: never"""


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the loop has built when it asks for the stage."""

    run: RunFolder
    store: FeatureStore
    head: FrozenHead
    drafter: Drafter
    world: World


def fit(
    cfg: SftConfig, world: World, stage_of: Callable[[Parts], Stage], *, allow_changed: Collection[str] = ()
) -> Path:
    """Train and return the folder of the best drafter.

    Raises:
        ConfigError, StoreError, SpecMismatch, TargetError: before the first step, when the parts do not fit together.
        TrainingError: too many non-finite steps in a row.
    """
    # --- build
    target_cfg = load_target_config(cfg.model)
    run = RunFolder(cfg, allow_changed)
    store = FeatureStore.open(find_store(cfg, target_cfg))
    check_store(store, cfg, target_cfg)
    run.check_store(store.spec.fingerprint, allow_changed)
    accumulation = accumulation_steps(cfg, world.size)
    dtype = torch.bfloat16 if cfg.engine.dtype == "bf16" else torch.float32
    head = load_frozen_head(target_cfg, world.device, dtype)
    drafter = build_drafter(cfg, target_cfg, store, seed=cfg.train.seed)
    if world.is_main:
        run.begin(cfg, deepspeed_config(cfg, world.size), store_fingerprint=store.spec.fingerprint)
        if not (run.path / "drafter-init" / "config.json").is_file():
            save_drafter(drafter, run.path / "drafter-init")
    engine = build_engine(drafter, cfg, world)
    stage = stage_of(Parts(run, store, head, drafter, world))
    objective = stage.objective

    # --- resume
    step, best_tau, best_step, over = 0, -math.inf, 0, False
    if (found := checkpoint.latest(run.path)) is not None:
        meta = checkpoint.read_meta(found)
        step, best_tau = meta["step"], meta["best_tau"]
        best_step, over = meta.get("best_step", 0), meta.get("over", False)
        for part in stage.refreshed:
            part.restore(step)
    blocks = stream_config(cfg, drafter.config.block_size, stage.visited_share, stage.lookahead)
    stream = stage.stream(step) if stage.stream else AnchorStream(
        store, blocks, world.rank, world.size, samples_seen=step * cfg.data.global_batch, visited=stage.visited
    )  # fmt: skip
    total = cfg.train.steps or max(round(cfg.train.epochs * stream.steps_per_epoch), 1)
    if world.is_main:
        run.truncate_metrics(step)
        _say_beginning(cfg, store, drafter, step, total, world)
    if (over or step >= total) and (run.path / "drafter" / "config.json").is_file():
        return run.path / "drafter"
    if found is not None:
        checkpoint.load(engine, found, world)

    # --- loop
    stop, meter, skipped_in_row, tau = StopRequest(), Meter(drafter.config.block_size), 0, best_tau
    stopping = 0.0
    heldout = heldout_rows(store, cfg.train.eval_documents)
    saver = checkpoint.Saver(run.path, world, cfg.train.keep, background=cfg.train.save_async)
    tracked = track(
        cfg.run_name, cfg.stage, folder=run.path, config_toml=to_toml(cfg), resume=step > 0, enabled=world.is_main,
        tags={"target": target_cfg.name, "store": store.spec.fingerprint12},
    )  # fmt: skip
    with tracked as tracker, Progress(total, cfg.stage, "steps", start=step, enabled=world.is_main) as progress:
        tracker.watch_machine()
        tracker.dataset(
            target_cfg.name, store.spec.fingerprint, str(store.uri), {"documents": store.documents.num_rows}
        )
        if heldout and cfg.drafter.start_from and step == 0:  # what the stage must beat
            before = replay_heldout(engine, store, heldout, head, world)
            tau = best_tau = before.tau
            tracker.metrics({f"heldout/{k}": v for k, v in before.metrics.items()}, 0)
            save_module(engine, world, lambda module: save_drafter(module, run.path / "drafter"))
        batches, loop_began = iter(stream), time.monotonic()
        while step < total:
            refreshing = time.monotonic()
            if any([part.refresh(engine, step, stream) for part in stage.refreshed]):
                batches.close()  # what was read ahead has the block starts of before
                batches = iter(stream)
            objective.begin(step, total)
            lr = set_lr(engine, cfg.optim, step, total)
            began, numerator, tokens, documents = time.monotonic(), 0.0, 0, []
            for _ in range(accumulation):
                batch = next(batches).to(world.device)
                terms = objective(engine, batch, head)
                denominator = objective.denominator(batch)
                # DeepSpeed averages over micro-batches and ranks; the loss is a sum over both
                engine.backward(terms.numerator * (accumulation * world.size / denominator))
                engine.step()
                meter.add(terms)
                numerator += float(terms.numerator.detach()) / denominator
                tokens += int((batch.document_S >= 0).sum())
                documents += batch.documents
            mine = [numerator, tokens, _checksum(documents), float(stop.requested)]
            loss, tokens, checksum, stopping = world.sum(torch.tensor(mine, dtype=torch.float64)).tolist()
            seconds = time.monotonic() - began
            saver.poll()
            meter.add_step(tokens, cfg.data.global_batch, seconds)
            if not engine.was_step_applied():
                skipped_in_row += 1
                _record_skipped(run.path, world.rank, step, documents)
                if skipped_in_row >= cfg.train.max_skipped:
                    saver.wait()
                    raise TrainingError(
                        f"{skipped_in_row} steps in a row had a non-finite loss or gradient, the last at step {step} "
                        f"with documents {', '.join(documents[:4])}; see {run.path}/skipped.rank*.jsonl, lower "
                        f"optim.lr, or verify the store with python -m features verify {store.uri}"
                    )
            else:
                skipped_in_row = 0
            step += 1
            record = {"step": step - 1, "loss": loss, "lr": lr, "grad_norm": gradient_norm(engine)}
            record |= {"tokens_per_s": tokens / seconds, "step_s": seconds, "documents": int(checksum)}
            if stage.refreshed:
                record["refresh_s"] = began - refreshing

            # --- log, evaluate, save
            if step % cfg.train.log_every == 0 or step == total:
                summary = (
                    meter.reduce(world)
                    | objective.metrics()
                    | {"data_wait_share": stream.data_wait_s / (time.monotonic() - loop_began)}
                    | gpu_metrics(drafter.config, world, **meter.work)
                )
                record |= summary
                tracker.metrics({f"train/{k}": v for k, v in record.items() if k not in ("step", "documents")}, step)
            if heldout and (step % cfg.train.eval_every == 0 or step == total):
                evaluating = time.monotonic()
                replayed = replay_heldout(engine, store, heldout, head, world)
                tau = replayed.tau
                record |= {"heldout_tau": tau, "heldout": replayed.metrics, "eval_s": time.monotonic() - evaluating}
                tracker.metrics({f"heldout/{k}": v for k, v in replayed.metrics.items()}, step)
            if world.is_main:
                run.append(record)
            shown = {"loss": loss, "accuracy": meter.short(), "τ": tau if tau > -math.inf else ""}
            progress.update(**{k: v for k, v in shown.items() if v != ""}, tokens_per_s=record["tokens_per_s"])
            better = "heldout_tau" in record and tau > best_tau
            if better:
                best_tau, best_step = tau, step
                save_module(engine, world, lambda module: save_drafter(module, run.path / "drafter"))
            over = 0 < stage.patience * cfg.train.eval_every <= step - best_step
            saved = step % cfg.train.save_every == 0 or step == total or stopping or over
            if saved:
                state = {"step": step, "samples_seen": step * cfg.data.global_batch, "best_tau": best_tau}
                state |= {"best_step": best_step, "over": over}
                saving = time.monotonic()
                kept = saver.save(engine, state)
                tracker.metrics({"train/checkpoint_s": time.monotonic() - saving}, step)
            if "heldout_tau" in record:
                folder = run.path / "drafter" if better else kept if saved else "not kept"
                tracker.model(f"{cfg.run_name}-step-{step}", {"heldout_replay_tau": tau}, step, weights=folder)
            if stopping or over:
                break
        saver.wait()
        if stopping and world.is_main:
            print(f"stopped at step {step} of {total}, saved; the same command goes on", file=sys.stderr)
        if not heldout:
            save_module(engine, world, lambda module: save_drafter(module, run.path / "drafter"))
        if best_tau > -math.inf:
            tracker.metrics({"heldout_replay_tau": best_tau}, on_parent=True)
    if world.is_main and (over or step >= total):
        print(f"drafter in {run.path / 'drafter'}" + (f", held-out replay τ {best_tau:.3f}" if heldout else ""))
    return run.path / "drafter"


def stream_config(cfg: SftConfig, block_size: int, visited_share: float = 0.0, lookahead: int = 0) -> StreamConfig:
    return StreamConfig(
        seed=cfg.train.seed,
        block_size=block_size,
        anchors_per_document=cfg.data.anchors_per_document,
        documents_per_micro_batch=cfg.data.documents_per_micro_batch,
        global_batch=cfg.data.global_batch,
        shape=cfg.data.shape,
        anchors=cfg.data.anchors,
        visited_share=visited_share,
        lookahead=lookahead,
        prefetch=cfg.data.prefetch,
    )


def _say_beginning(
    cfg: SftConfig, store: FeatureStore, drafter: torch.nn.Module, step: int, total: int, world: World
) -> None:
    parameters = sum(p.numel() for p in drafter.parameters())
    begin = f"resuming at step {step} of {total}" if step else f"{total} steps"
    print(
        f"{cfg.run_name}: {begin} of {cfg.data.global_batch} documents, {parameters / 1e6:.1f} M parameters, "
        f"{world.size} rank{'s' * (world.size > 1)}, ZeRO-{cfg.engine.zero_stage}, {cfg.engine.dtype}, "
        f"store {store.uri}",
        flush=True,
    )


def _checksum(documents: list[str]) -> int:
    """Of a set of documents, whatever their order and ranks: the sum of their ids' first 40 bits (exact in float64)."""
    return sum(int(d[:10], 16) for d in documents)


def _record_skipped(run: Path, rank: int, step: int, documents: list[str]) -> None:
    with open(run / f"skipped.rank{rank}.jsonl", "a") as f:
        f.write(json.dumps({"step": step, "documents": documents}) + "\n")


def run_stage(config: type[SftConfig], train: Callable[..., Path], argv: list[str]) -> None:
    """The command line of a rank: `torchrun -m trainer.<stage> recipe.toml [--allow-changed KEYS]`."""
    p = argparse.ArgumentParser(prog="torchrun -m trainer.<stage>")
    p.add_argument("config", help="a recipe TOML")
    p.add_argument("--allow-changed", default="")
    args = p.parse_args(argv)
    cfg = load_config(config, args.config)
    world = init_world()
    try:
        train(cfg, world, allow_changed=tuple(args.allow_changed.split(",")))
    except FlashdraftError as e:
        if not world.is_main:  # every rank finds the same; one says it
            sys.exit(e.exit_code)
        raise
