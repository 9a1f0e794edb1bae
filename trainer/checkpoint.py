"""Training checkpoints: written aside and renamed, `latest` last, resumable on any number of ranks and ZeRO stage.

    <run>/checkpoints/step-00000200/rank-00000-of-00002.safetensors    what rank 0 held of the state (`trainer.state`)
    <run>/checkpoints/step-00000200/meta.json
    <run>/checkpoints/latest                                           name of the newest complete one

Every rank writes its own part, 12 bytes per parameter over all of them; no pickles. A key of these files is
`<parameter>/<kind>/<first element>`, so a rank that resumes reads the ranges that it needs, whoever wrote them.
"""

import json
import os
import shutil
import struct
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infra.errors import CheckpointError, ResourceError
from infra.provenance import write_json
from trainer import state
from trainer.engine import World

FORMAT = 2
"""1 had DeepSpeed's own files"""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


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


class Saver:
    """Saves a run's checkpoints, one at a time; every rank calls every method at the same steps.

    In the background a save costs training only the copy of the rank's part of the state into host memory, 12 bytes per
    parameter over all ranks, held until it is on disk. The checkpoint counts, as `latest`, from the `poll` or `wait`
    that finds all ranks done; until then the one before does.
    """

    def __init__(self, run_folder: Path, world: World, keep: int, *, background: bool):
        """
        Args:
            keep: newest checkpoints that stay.
        """
        self.root, self.world, self.keep, self.background = run_folder / "checkpoints", world, keep, background
        self._meta: dict[str, Any] | None = None
        """of the checkpoint that is being written"""
        self._thread = threading.Thread()
        self._error: Exception | None = None

    def save(self, engine: Any, meta: dict[str, Any]) -> Path:
        """Begin to save the engine's state, after the save before is done; returns where it will be.

        Args:
            meta: `step`, `samples_seen`, ...; world size, ZeRO stage and format are added.

        Raises:
            ResourceError: the disk has no room, or could not be written to; the checkpoint before stays the latest.
        """
        self.wait()
        name = f"step-{meta['step']:08d}"
        aside = self.root / f".{name}.part"
        if self.world.is_main:
            for part in self.root.glob(".*.part"):  # of a process that was killed
                shutil.rmtree(part, ignore_errors=True)
            aside.mkdir(parents=True)
        parts = [(f"{n}/{kind}/{at}", t) for n, kind, at, t in state.parts(engine, self.world.rank, self.world.size)]
        mine = sum(t.numel() * t.element_size() for _, t in parts)
        size = float(self.world.sum(torch.tensor([float(mine)]))[0])  # and from here on all ranks see the folder
        full = self.world.is_main and shutil.disk_usage(self.root).free < size
        if self.world.any(full):  # before a byte is written, and on every rank: nobody waits for one that gave up
            raise ResourceError(
                f"the disk of {self.root} has no room for a checkpoint of {size / 1e9:.2f} GB; free space and run the "
                "same command again: the run goes on from the checkpoint before"
            )
        ranks = {"world_size": self.world.size, "zero_stage": engine.zero_optimization_stage()}
        self._meta, self._error = meta | ranks | {"format": FORMAT}, None
        path = aside / f"rank-{self.world.rank:05d}-of-{self.world.size:05d}.safetensors"
        if self.background:
            copies = [(key, _host_copy(t)) for key, t in parts]
            self._thread = threading.Thread(target=self._write, args=(path, copies), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(path, parts)
            self.wait()
        return self.root / name

    def poll(self) -> None:
        """Make the checkpoint count that is being written, if all ranks are done; called at every step.

        Raises:
            ResourceError: a rank could not write its part.
        """
        if self._meta is not None:
            done = self.world.sum(torch.tensor([float(not self._thread.is_alive())]))[0]
            if done == self.world.size:
                self.wait()

    def wait(self) -> None:
        """The same, after all ranks have ended writing."""
        if self._meta is None:
            return
        if self._thread.ident is not None:
            self._thread.join()
        meta, self._meta = self._meta, None
        name = f"step-{meta['step']:08d}"
        if self.world.any(self._error is not None):
            why = self._error or "another rank says why"
            kind = ResourceError if isinstance(self._error, OSError | None) else RuntimeError
            raise kind(
                f"checkpoint {self.root / name} could not be written ({why}); mend the disk and run the same command "
                "again: the run goes on from the checkpoint before"
            ) from self._error
        if self.world.is_main:
            aside = self.root / f".{name}.part"
            write_json(aside / "meta.json", meta)
            shutil.rmtree(self.root / name, ignore_errors=True)
            aside.rename(self.root / name)
            _write_pointer(self.root / "latest", name)
            _forget(self.root, self.keep)
        self.world.barrier()

    def _write(self, path: Path, parts: list[tuple[str, Tensor]]) -> None:
        try:
            write_tensors(path, parts)
        except Exception as e:  # kept, whatever it is: `wait` raises it on every rank; a thread would only print it
            self._error = e


def write_tensors(path: Path, tensors: list[tuple[str, Tensor]]) -> None:
    """Flat tensors as a safetensors file, one after the other: `save_file` would hold a second copy of all of them."""
    header, at = {}, 0
    for key, tensor in tensors:
        end = at + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": [tensor.numel()], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in tensors:
            f.write(tensor.cpu().view(torch.uint8).numpy())
        f.flush()
        os.fsync(f.fileno())


class Parts:
    """The files of a checkpoint as one map from ranges of parameters to values.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, checkpoint: Path):
        self.checkpoint = checkpoint
        self.ranges: dict[tuple[str, str], list[tuple[int, int, Any, str]]] = defaultdict(list)
        """(parameter, kind) -> (first element, end, file, key), in order"""
        for rank in range(ranks := read_meta(checkpoint)["world_size"]):
            path = checkpoint / f"rank-{rank:05d}-of-{ranks:05d}.safetensors"
            try:
                file = safe_open(path, "pt")
            except (OSError, SafetensorError) as e:
                raise CheckpointError(
                    f"{path} cannot be read ({e}); write the name of another checkpoint of {checkpoint.parent} into "
                    "`latest` there, or delete `latest` to begin anew"
                ) from None
            for key in file.keys():  # noqa: SIM118 - it is no dictionary
                name, kind, start = key.rsplit("/", 2)
                length = file.get_slice(key).get_shape()[0]
                self.ranges[name, kind].append((int(start), int(start) + length, file, key))
        for ranges in self.ranges.values():
            ranges.sort(key=lambda r: r[:2])

    def sizes(self) -> dict[str, int]:
        """Parameter -> elements."""
        return {name: ranges[-1][1] for (name, kind), ranges in self.ranges.items() if kind == state.MASTER}

    def kinds(self, parameter: str) -> set[str]:
        return {kind for name, kind in self.ranges if name == parameter}

    def read(self, parameter: str, kind: str, start: int, length: int) -> Tensor:
        """Elements [start, start + length), flat, on the CPU."""
        out, at = [], start
        for begin, end, file, key in self.ranges[parameter, kind]:
            if begin <= at < min(end, start + length):
                upto = min(end, start + length)
                out.append(file.get_slice(key)[at - begin : upto - begin])
                at = upto
        if at != start + length:
            raise CheckpointError(
                f"checkpoint {self.checkpoint} lacks elements {at} to {start + length} of {kind} of {parameter!r}; go "
                "on from another one: write its name into `latest` beside it"
            )
        return torch.cat(out) if len(out) != 1 else out[0]


def load(engine: Any, checkpoint: Path, world: World) -> dict[str, Any]:
    """Put the checkpoint's state into `engine`, whatever ranks and ZeRO stage saved it; returns its meta.

    Raises:
        CheckpointError: damaged, of another drafter, or of a version that kept DeepSpeed's own files.
    """
    failure = None
    try:
        meta = read_meta(checkpoint)
        if meta.get("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {checkpoint} has format {meta.get('format', 1)}, and this version reads format {FORMAT}; "
                "finish the run with the version that began it, or begin another one from its drafter (INIT=)"
            )
        saved = Parts(checkpoint)
        if (theirs := saved.sizes()) != (ours := state.sizes(engine)):
            name = min(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
            raise CheckpointError(
                f"checkpoint {checkpoint} has {theirs.get(name, 0)} elements of {name!r}, and the drafter "
                f"{ours.get(name, 0)}; resume with the recipe that saved it"
            )
        state.fill(engine, saved.kinds, saved.read)
    except CheckpointError as e:
        failure = e
    if world.any(failure is not None):  # on every rank: nobody waits for one that gave up
        raise failure or CheckpointError(f"checkpoint {checkpoint} could not be read on every rank; another says why")
    state.publish(engine)
    return meta


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:  # pinned memory is several times faster, and kept for the next checkpoint
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.clone()


def _write_pointer(path: Path, name: str) -> None:
    aside = path.with_name(".latest.tmp")
    with open(aside, "w") as f:
        f.write(name + "\n")
        f.flush()
        os.fsync(f.fileno())
    aside.replace(path)


def _forget(root: Path, keep: int) -> None:
    for old in sorted(root.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
