"""Stage `sft`: build, resume, loop (evaluate, save), keep the best drafter. Run by torchrun (`python -m trainer`).

Legend: A blocks, K block size.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch

from eval.replay import replay_store
from features.store import FeatureStore
from features.stream import AnchorStream, StreamConfig
from features.target import FrozenHead, load_frozen_head
from features.target_config import TargetConfig, load_target_config
from infra.cli import main
from infra.config import load_config, to_toml
from infra.errors import TrainingError
from infra.progress import Progress
from infra.tracking import track
from trainer import checkpoint
from trainer.build import build_drafter, check_store, find_store
from trainer.config import SftConfig
from trainer.drafter.checkpoint import save_drafter
from trainer.drafter.model import Drafter
from trainer.engine import World, accumulation_steps, build_engine, deepspeed_config, init_world, set_lr
from trainer.meter import Meter
from trainer.objective import Objective
from trainer.run_folder import RunFolder
from trainer.signals import StopRequest


def train(cfg: SftConfig, world: World, *, allow_changed: bool = False) -> Path:
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
    accumulation = accumulation_steps(cfg, world.size)
    dtype = torch.bfloat16 if cfg.engine.dtype == "bf16" else torch.float32
    head = load_frozen_head(target_cfg, world.device, dtype)
    drafter = build_drafter(cfg, target_cfg, store, seed=cfg.train.seed)
    if world.is_main:
        run.begin(cfg, deepspeed_config(cfg, world.size), store_fingerprint=store.spec.fingerprint)
        if not (run.path / "drafter-init" / "config.json").is_file():
            save_drafter(drafter, run.path / "drafter-init")
    engine = build_engine(drafter, cfg, world)
    objective = Objective(cfg.loss, drafter.config)

    # --- resume
    step, best_tau, samples_seen = 0, -math.inf, 0
    found = checkpoint.latest(run.path)
    if found is not None:
        meta = checkpoint.load(engine, found, world)
        step, best_tau, samples_seen = meta["step"], meta["best_tau"], meta["samples_seen"]
    stream = AnchorStream(store, stream_config(cfg, drafter), world.rank, world.size, samples_seen=samples_seen)
    total = cfg.train.steps or max(round(cfg.train.epochs * stream.steps_per_epoch), 1)
    if world.is_main:
        run.truncate_metrics(step)
        _say_beginning(cfg, store, drafter, step, total, world)
    if step >= total and (run.path / "drafter" / "config.json").is_file():
        return run.path / "drafter"

    # --- loop
    stop, meter, skipped_in_row, tau, last_saved = StopRequest(), Meter(drafter.config.block_size), 0, best_tau, step
    heldout = _heldout(store, cfg.train.eval_documents)
    tracked = track(
        cfg.run_name, "sft", folder=run.path, config_toml=to_toml(cfg), resume=step > 0, enabled=world.is_main,
        tags={"target": target_cfg.name, "store": store.spec.fingerprint12},
    )  # fmt: skip
    with tracked as tracker, Progress(total, "sft", "steps", start=step, enabled=world.is_main) as progress:
        tracker.dataset(target_cfg.name, store.spec.fingerprint, str(store.uri), {"documents": store.documents.num_rows})
        batches = iter(stream)
        while step < total:
            lr = cfg.optim.lr_at(step, total)
            set_lr(engine, lr)
            began, numerator, tokens, documents = time.monotonic(), 0.0, 0, []
            for _ in range(accumulation):
                batch = next(batches).to(world.device)
                terms = objective(engine, batch, head)
                denominator = objective.denominator(batch)
                # DeepSpeed averages over micro-batches and ranks; the loss is a sum over both
                engine.backward(terms.numerator * (accumulation * world.size / denominator))
                engine.step()
                meter.add(terms, batch)
                numerator += float(terms.numerator) / denominator
                tokens += int((batch.document_S >= 0).sum())
                documents += batch.documents
            loss, tokens, stopping = world.sum(torch.tensor([numerator, tokens, float(stop.requested)])).tolist()
            seconds = time.monotonic() - began
            if not engine.was_step_applied():
                skipped_in_row += 1
                _record_skipped(run.path, world.rank, step, documents)
                if skipped_in_row >= cfg.train.max_skipped:
                    raise TrainingError(
                        f"{skipped_in_row} steps in a row had a non-finite loss or gradient, the last at step {step} with "
                        f"documents {', '.join(documents[:4])}; see {run.path}/skipped.rank*.jsonl, lower optim.lr, or "
                        f"verify the store with python -m features verify {store.uri}"
                    )
            else:
                skipped_in_row = 0
            step += 1
            samples_seen = stream.samples_seen_at(step) if hasattr(stream, "samples_seen_at") else step * cfg.data.global_batch
            record = {"step": step - 1, "loss": loss, "lr": lr, "grad_norm": _norm(engine), "tokens_per_s": tokens / seconds}

            # --- log, evaluate, save
            if step % cfg.train.log_every == 0 or step == total:
                summary = meter.reduce(world) | {"data_wait_share": stream.data_wait_share()}
                record |= summary
                tracker.metrics({f"train/{k}": v for k, v in record.items() if k != "step"}, step)
            if heldout and (step % cfg.train.eval_every == 0 or step == total):
                tau = replay_heldout(engine, store, heldout, head, world)
                record["heldout_tau"] = tau
                tracker.metrics({"heldout/replay_tau_pooled": tau}, step)
            if world.is_main:
                run.append(record)
            progress.update(loss=loss, acc1=meter.last.get("accuracy_1", math.nan), tau=tau, tokens_per_s=record["tokens_per_s"])
            if heldout and "heldout_tau" in record and tau > best_tau:
                best_tau = tau
                _save_drafter(engine, run.path / "drafter", world)
            if step % cfg.train.save_every == 0 or step == total or stopping:
                state = {"step": step, "samples_seen": samples_seen, "best_tau": best_tau}
                checkpoint.save(engine, run.path, state, world, cfg.train.keep)
                last_saved = step
            if stopping:
                if world.is_main:
                    print(f"stopped at step {step} of {total}, saved; the same command goes on", file=sys.stderr)
                break
        assert last_saved == step
        if not heldout:
            _save_drafter(engine, run.path / "drafter", world)
        if best_tau > -math.inf:
            tracker.metrics({"heldout_replay_tau": best_tau}, on_parent=True)
    if world.is_main and step >= total:
        print(f"drafter in {run.path / 'drafter'}" + (f", held-out replay τ {best_tau:.3f}" if heldout else ""))
    return run.path / "drafter"
