"""Checkpoints: in the background or not, killed while written, damaged, of another drafter."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infra.errors import CheckpointError, ResourceError
from trainer import checkpoint
from trainer.checkpoint import Saver, latest, load
from trainer.config import SftConfig
from trainer.engine import build_engine, init_world

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def world():
    return init_world()


def build(world, width: int = 8):
    """Two matrices and a bias under ZeRO-1, in bf16 with fp32 masters; building takes a second or two."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 3, bias=False))
    cfg = SftConfig.model_validate({"data": {"global_batch": 1}, "engine": {"zero_stage": 1, "dtype": "bf16"}})
    return build_engine(model, cfg, world)


@pytest.fixture(scope="module")
def engine(world):
    return build(world)


def step(engine, seed: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()
    engine.backward(engine(x).square().sum())
    engine.step()


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


class Gate:
    """Stands before the writing of files, and holds the thread that writes until it is opened."""

    def __init__(self, monkeypatch):
        self.reached, self.open = threading.Event(), threading.Event()
        write = checkpoint.write_tensors

        def gated(path, tensors):
            self.reached.set()
            assert self.open.wait(60)
            write(path, tensors)

        monkeypatch.setattr(checkpoint, "write_tensors", gated)


def test_the_background_writes_what_was_there_when_it_was_told(engine, world, tmp_path, monkeypatch):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    step(engine, 0)
    Saver(theirs, world, 2, background=False).save(engine, {"step": 1})
    gate = Gate(monkeypatch)
    saver = Saver(ours, world, 2, background=True)
    folder = saver.save(engine, {"step": 1})
    assert gate.reached.wait(60)
    step(engine, 1)  # training goes on
    saver.poll()
    assert latest(ours) is None and not folder.exists()
    gate.open.set()
    saver._thread.join()
    assert latest(ours) is None  # on disk, and not yet agreed upon by all ranks
    saver.poll()
    assert latest(ours) == folder and files(folder) == files(latest(theirs))
    assert [p.name for p in folder.parent.iterdir() if p.name.startswith(".")] == []
    there = [p.detach().clone() for p in engine.module.parameters()]
    assert load(engine, folder, world)["step"] == 1
    assert not any(torch.equal(a, b) for a, b in zip(there, engine.module.parameters(), strict=True))
    step(engine, 1)
    assert all(torch.equal(a, b) for a, b in zip(there, engine.module.parameters(), strict=True))


def test_the_next_save_waits_for_the_one_before(engine, world, tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    saver = Saver(tmp_path, world, 1, background=True)
    saver.save(engine, {"step": 1})
    threading.Timer(0.3, gate.open.set).start()
    saver.save(engine, {"step": 2})
    assert gate.open.is_set() and latest(tmp_path).name == "step-00000001"
    saver.wait()
    assert latest(tmp_path).name == "step-00000002"
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]  # one is kept


def test_a_disk_that_fills_up_while_writing_is_said_in_a_sentence(engine, world, tmp_path, monkeypatch):
    saver = Saver(tmp_path, world, 2, background=True)
    saver.save(engine, {"step": 1})
    saver.wait()
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(checkpoint.os, "fsync", lambda fd: (_ for _ in ()).throw(full))
    saver.save(engine, {"step": 2})
    with pytest.raises(ResourceError, match=r"step-00000002 could not be written \(.*No space left on device\); mend"):
        saver.wait()
    monkeypatch.undo()
    assert latest(tmp_path).name == "step-00000001"
    saver.save(engine, {"step": 3})
    saver.wait()
    assert latest(tmp_path).name == "step-00000003"


# A rank without DeepSpeed, which takes longest to start: fp32 without ZeRO has our own optimiser, and its engine is
# three attributes. The second checkpoint is on its way to the disk when the process is killed.
KILLED = """
import os, sys, time, torch
from pathlib import Path
from types import SimpleNamespace
from trainer import checkpoint
from trainer.engine import GuardedAdamW, World
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(3, 2)
optimizer = GuardedAdamW([{"params": list(model.parameters())}], clip=1.0)
engine = SimpleNamespace(module=model, optimizer=optimizer, zero_optimization_stage=lambda: 0)
saver = checkpoint.Saver(Path(sys.argv[1]), World(0, 1, torch.device("cpu")), 2, background=True)
saver.save(engine, {"step": 1})
saver.wait()
os.fsync = lambda fd: (print("writing", flush=True), time.sleep(600))
saver.save(engine, {"step": 2})
time.sleep(600)
"""


def test_a_kill_while_the_background_writes_leaves_the_checkpoint_before(engine, world, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == [".step-00000002.part", "latest", "step-00000001"]
    saved = checkpoint.Parts(latest(tmp_path))
    assert saved.sizes() == {"weight": 6, "bias": 2}
    saver = Saver(tmp_path, world, 2, background=True)
    saver.save(engine, {"step": 2})
    saver.wait()
    assert latest(tmp_path).name == "step-00000002" and not (tmp_path / "checkpoints" / ".step-00000002.part").exists()


@pytest.fixture(scope="module")
def saved(engine, world, tmp_path_factory) -> Path:
    """After one step, or several."""
    step(engine, 0)
    return Saver(tmp_path_factory.mktemp("saved"), world, 2, background=False).save(engine, {"step": 1})


def damage(kind: str, folder: Path) -> None:
    (part,) = folder.glob("rank-*")
    meta = json.loads((folder / "meta.json").read_text())
    if kind == "truncated":
        part.write_bytes(part.read_bytes()[:-8])
    elif kind == "missing":
        part.unlink()
    elif kind == "of two ranks, one":
        tensors = checkpoint.Parts(folder)
        named = {f"{n}/{k}/0": tensors.read(n, k, 0, 1) for n, k in tensors.ranges}
        named["0.weight/master/16"] = tensors.read("0.weight", "master", 16, 24)
        named["1.weight/master/0"] = tensors.read("1.weight", "master", 0, 24)
        named["0.bias/master/0"] = tensors.read("0.bias", "master", 0, 8)
        checkpoint.write_tensors(folder / "new", list(named.items()))  # beside it: these tensors are views of the old
        (folder / "new").replace(part)
    elif kind == "old":
        (folder / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k != "format"}))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("truncated", r"safetensors cannot be read \(.*\); write the name of another checkpoint"),
        ("missing", r"rank-00000-of-00001.safetensors cannot be read"),
        ("of two ranks, one", r"lacks elements 1 to 40 of master of '0.weight'"),
        ("old", r"has format 1, and this version reads format 2; finish the run with the version that began it"),
        ("other drafter", r"has 8 elements of '0.bias', and the drafter 9"),
    ],
)
def test_what_cannot_be_read_is_refused(engine, world, saved, tmp_path, kind, said):
    shutil.copytree(saved, tmp_path / "c")
    damage(kind, tmp_path / "c")
    with pytest.raises(CheckpointError, match=said):
        load(build(world, width=9) if kind == "other drafter" else engine, tmp_path / "c", world)


def test_another_rank_says_why(engine, world, saved):
    """A rank that read everything ends with the others."""
    others = SimpleNamespace(**world.__dict__, any=lambda flag: True)
    with pytest.raises(CheckpointError, match="could not be read on every rank"):
        load(engine, saved, others)


def test_the_files_are_safetensors(saved):
    from safetensors.torch import load_file

    tensors = load_file(next(saved.glob("rank-*")))
    kinds = ("master", "exp_avg", "exp_avg_sq", "step")
    assert sorted(tensors) == sorted(f"{n}/{k}/0" for n in ("0.weight", "0.bias", "1.weight") for k in kinds)
    assert tensors["0.weight/master/0"].dtype == torch.float32 and len(tensors["0.weight/master/0"]) == 40
    assert tensors["1.weight/step/0"] >= 1
