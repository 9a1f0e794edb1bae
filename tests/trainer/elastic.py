"""Work of spawned ranks: whole trainings of the tiny target, several in one world (starting ranks costs most)."""

import json
import os
import shutil
from pathlib import Path

import pytest

OVERRIDES = (
    "model=tiny", "data.anchors_per_document=6", "data.global_batch=4", "data.documents_per_micro_batch=1",
    "drafter.num_hidden_layers=1", "drafter.init=random", "train.save_every=2", "train.eval_every=6",
    "train.eval_documents=4", "train.log_every=2", "train.keep=9", "optim.clip=0.5",
)  # fmt: skip


def train_all(world, store: str, jobs: list[tuple[str, list[str], tuple[str, int] | None]]) -> list[str | None]:
    """`jobs`: (run folder, overrides, origin); each trains to its end, or goes on from what the folder holds.

    With an origin (run folder, step) the folder first becomes that run as it was after that checkpoint.

    Returns the sentence of each job that was refused or gave up, None for the others.
    """
    from infra.config import load_config
    from infra.errors import FlashdraftError
    from trainer.config import RECIPES, SftConfig
    from trainer.sft import train

    said: list[str | None] = []
    for folder, overrides, origin in jobs:
        run = Path(folder)
        if origin and world.is_main:
            copy_at(Path(origin[0]), run, origin[1])
        world.barrier()
        os.makedirs(run.parent.parent, exist_ok=True)
        os.chdir(run.parent.parent)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{Path(store).parent.parent.parent}/mlflow.db"
        where = [f"data.store={store}", f"name={run.name}"]
        changes = [o for o in overrides if "=" in o]
        cfg = load_config(SftConfig, RECIPES / "sft-fast.toml", [*OVERRIDES, *where, *changes])
        try:
            train(cfg, world, allow_changed=[o.removeprefix("allow:") for o in overrides])
            said.append(None)
        except FlashdraftError as e:
            said.append(f"{type(e).__name__}: {e}")
    return said


def copy_at(run: Path, target: Path, step: int) -> Path:
    """The run as it was right after the checkpoint of `step`."""
    shutil.copytree(run, target, dirs_exist_ok=True)
    (target / "checkpoints" / "latest").write_text(f"step-{step:08d}\n")
    for later in (target / "checkpoints").glob("step-*"):
        if int(later.name.split("-")[1]) > step:
            shutil.rmtree(later)
    shutil.rmtree(target / "drafter", ignore_errors=True)
    return target


def records(run: Path) -> list[dict]:
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: r.get(k) for k in ("step", "loss", "lr", "grad_norm", "documents", "heldout_tau")} for r in lines]


def assert_close(ours: list[dict], theirs: list[dict], rel: float = 2e-5, norm_rel: float | None = None) -> None:
    """Equal to rounding: other ranks and ZeRO stages add in another order. `norm_rel`: of gradient norms."""
    assert [(r["step"], r["lr"], r["documents"]) for r in ours] == [
        (r["step"], r["lr"], r["documents"]) for r in theirs
    ]
    for key, tolerance in (("loss", rel), ("grad_norm", norm_rel or rel)):
        assert [r[key] for r in ours] == pytest.approx([r[key] for r in theirs], rel=tolerance), key
