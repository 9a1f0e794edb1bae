"""Training checkpoints: written aside and renamed, `latest` last, resumable on any number of ranks.

    <run>/checkpoints/step-00000200/    DeepSpeed's files and meta.json
    <run>/checkpoints/latest            name of the newest complete one

DeepSpeed shards the optimiser over the ranks of the run that saved. Another number of ranks (or another ZeRO stage)
reads the same checkpoint through DeepSpeed's universal format, which is made from it once, beside it, by rank 0.
"""

import argparse
import json
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from infra.errors import CheckpointError, ResourceError
from infra.provenance import write_json
from trainer.engine import World


def latest(run_folder: Path) -> Path | None:
    """The newest complete checkpoint of a run.

    Raises:
        CheckpointError: `latest` names a folder that is gone.
    """
    pointer = run_folder / "checkpoints" / "latest"
    if not pointer.is_file():
        return None
    folder = pointer.parent / pointer.read_text().strip()
    if not (folder / "meta.json").is_file():
        raise CheckpointError(
            f"{pointer} names {folder.name!r}, which is not complete; write the name of another checkpoint of that "
            "folder into it, or delete it to begin anew"
        )
    return folder


def read_meta(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "meta.json").read_text())


def save(engine: Any, run_folder: Path, meta: dict[str, Any], world: World, keep: int) -> Path:
    """Save the engine's state; every rank calls it. Until the last line the previous checkpoint is the latest.

    Args:
        meta: `step`, `samples_seen`, ...; world size and ZeRO stage are added.
        keep: newest checkpoints that stay.

    Raises:
        ResourceError: the disk has less room than parameters, masters and moments take (16 bytes per parameter).
    """
    root = run_folder / "checkpoints"
    name = f"step-{meta['step']:08d}"
    aside = root / f".{name}.part"
    if world.is_main:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
    size = 16 * sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    full = world.is_main and shutil.disk_usage(root).free < size
    if world.any(full):  # before a byte is written, and on every rank: nobody waits for one that gave up
        raise ResourceError(
            f"the disk of {root} has no room for a checkpoint of {size / 1e9:.2f} GB; free space and run the same "
            "command again: the run goes on from the checkpoint before"
        )
    engine.save_checkpoint(str(aside), tag="state", save_latest=False, exclude_frozen_parameters=True)
    world.barrier()
    if world.is_main:
        write_json(
            aside / "meta.json", meta | {"world_size": world.size, "zero_stage": engine.zero_optimization_stage()}
        )
        shutil.rmtree(root / name, ignore_errors=True)
        aside.rename(root / name)
        _write_pointer(root / "latest", name)
        _forget(root, keep)
    world.barrier()
    return root / name


def load(engine: Any, checkpoint: Path, world: World) -> dict[str, Any]:
    """Put the checkpoint's state into `engine`, whatever number of ranks saved it; returns its meta.

    Raises:
        CheckpointError: DeepSpeed finds nothing to load, or cannot convert (Muon's momentum never).
    """
    meta = read_meta(checkpoint)
    if needs_universal(checkpoint, engine.zero_optimization_stage(), world.size):
        if any(group.get("use_muon") for group in engine.optimizer.param_groups):
            raise CheckpointError(
                f"checkpoint {checkpoint} has Muon's momentum, which DeepSpeed cannot convert; resume it on "
                f"{meta['world_size']} ranks with engine.zero_stage={meta['zero_stage']}"
            )
        universal = checkpoint / "universal"
        failure = None
        if world.is_main and not (universal / "done").is_file():
            try:
                _convert(checkpoint, universal)
            except CheckpointError as e:
                failure = e
        if world.any(failure is not None):  # on every rank: nobody waits for one that gave up
            raise failure or CheckpointError(f"checkpoint {checkpoint} could not be converted; rank 0 says why")
        loaded, _ = engine.load_checkpoint(str(checkpoint), tag="universal", load_module_strict=False)
    else:
        loaded, _ = engine.load_checkpoint(str(checkpoint), tag="state", load_module_strict=False)
    if loaded is None:
        raise CheckpointError(f"checkpoint {checkpoint} could not be loaded; delete it to go on from the one before")
    return meta


def needs_universal(checkpoint: Path | None, zero_stage: int, world_size: int) -> bool:
    """Whether the optimiser's shards of the checkpoint are laid out for other ranks or another stage.

    Raises:
        CheckpointError: saved under a stage whose files this one cannot read (only 1 and 2 are alike), or under ZeRO-3
            by another number of ranks.
    """
    if checkpoint is None:
        return False
    meta = read_meta(checkpoint)
    if meta["zero_stage"] != zero_stage and not {meta["zero_stage"], zero_stage} <= {1, 2}:
        raise CheckpointError(
            f"checkpoint {checkpoint} was saved under ZeRO-{meta['zero_stage']}, which ZeRO-{zero_stage} cannot read; "
            f"resume with engine.zero_stage={meta['zero_stage']}, or begin another run from its drafter (INIT=)"
        )
    if zero_stage == 3 and meta["world_size"] != world_size:
        raise CheckpointError(
            f"checkpoint {checkpoint} was saved under ZeRO-3 by {meta['world_size']} ranks, and its losses do not "
            f"continue on {world_size}; resume it on {meta['world_size']}, or begin anew from its drafter (INIT=)"
        )
    saved = (meta["world_size"], meta["zero_stage"])
    return saved != (world_size, zero_stage) and max(meta["zero_stage"], zero_stage) > 0


def _convert(checkpoint: Path, universal: Path) -> None:
    """In this process: DeepSpeed's command line would import torch again for each of its workers."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(universal, ignore_errors=True)
    arguments = argparse.Namespace(
        input_folder=str(checkpoint / "state"), output_folder=str(universal), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            ds_to_universal.main(arguments)
    except Exception as e:  # it raises whatever it meets
        raise CheckpointError(
            f"checkpoint {checkpoint} could not be converted for another number of ranks or ZeRO stage ({e}); resume "
            "with those that saved it (meta.json there)"
        ) from e
    (universal / "done").write_text("")


def _write_pointer(path: Path, name: str) -> None:
    aside = path.with_name(".latest.tmp")
    aside.write_text(name + "\n")
    aside.replace(path)


def _forget(root: Path, keep: int) -> None:
    for old in sorted(root.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    for part in root.glob(".*.part"):
        shutil.rmtree(part, ignore_errors=True)
