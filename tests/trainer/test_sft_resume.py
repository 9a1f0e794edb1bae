"""N steps + resume + N steps = 2N steps: bit for bit on as many ranks, to rounding on another number of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent.parent
RECIPE = [
    "data.anchors_per_document=6",
    "data.global_batch=4",
    "data.documents_per_micro_batch=2",
    "drafter.num_hidden_layers=1",
    "drafter.init=random",
    "train.steps=8",
    "train.save_every=4",
    "train.eval_every=8",
    "train.eval_documents=4",
    "train.log_every=4",
]
pytestmark = [pytest.mark.slow, pytest.mark.spawn]


def command(store: str, *overrides: str, nproc: int = 1) -> list[str]:
    head = [sys.executable, "-m", "trainer", "--model", "tiny", "--recipe", "sft-fast", "--nproc", str(nproc)]
    return [*head, *RECIPE, f"data.store={store}", *overrides]


def environment(cwd: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "MLFLOW_TRACKING_URI": f"sqlite:///{cwd}/mlflow.db",
        "OMP_NUM_THREADS": "1",
    }


def train(cwd: Path, store: str, *overrides: str, nproc: int = 1) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(store, *overrides, nproc=nproc),
        cwd=cwd,
        env=environment(cwd),
        capture_output=True,
        text=True,
        timeout=180,
    )


def records(run: Path) -> list[dict]:
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: r[k] for k in ("step", "loss", "lr", "grad_norm")} for r in lines]


def from_step_4(undisturbed: Path, cwd: Path) -> Path:
    """The undisturbed run as it was after step 4."""
    run = cwd / "runs" / "tiny-sft"
    shutil.copytree(undisturbed, run)
    (run / "checkpoints" / "latest").write_text("step-00000004\n")
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    shutil.rmtree(run / "drafter")
    return run


@pytest.fixture(scope="module")
def undisturbed(tiny_store, tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("undisturbed")
    done = train(cwd, tiny_store)
    assert done.returncode == 0, done.stderr
    return cwd / "runs" / "tiny-sft"


def test_one_rank_resumes_bit_for_bit(undisturbed, tiny_store, tmp_path):
    run = from_step_4(undisturbed, tmp_path)
    done = train(tmp_path, tiny_store)
    assert done.returncode == 0, done.stderr
    assert "resuming at step 4 of 8" in done.stdout
    assert records(run) == records(undisturbed)
    ours, theirs = (load_file(r / "drafter" / "model.safetensors") for r in (run, undisturbed))
    assert ours.keys() == theirs.keys() and all(ours[k].equal(theirs[k]) for k in ours)
    again = train(tmp_path, tiny_store)  # a finished run computes nothing and says where the drafter is
    assert again.returncode == 0 and records(run) == records(undisturbed)


def test_two_ranks_resume_one_and_back(undisturbed, tiny_store, tmp_path):
    run = from_step_4(undisturbed, tmp_path)
    done = train(tmp_path, tiny_store, "train.save_every=2", nproc=2)
    assert done.returncode == 0, done.stderr
    assert close(records(run), records(undisturbed))
    (run / "checkpoints" / "latest").write_text("step-00000006\n")
    shutil.rmtree(run / "drafter")
    done = train(tmp_path, tiny_store, "train.save_every=2", nproc=1)
    assert done.returncode == 0, done.stderr
    assert "resuming at step 6 of 8" in done.stdout
    assert close(records(run), records(undisturbed))


def close(ours: list[dict], theirs: list[dict]) -> bool:
    assert [r["step"] for r in ours] == [r["step"] for r in theirs]
    return all(
        r["loss"] == pytest.approx(s["loss"], rel=1e-5) and r["grad_norm"] == pytest.approx(s["grad_norm"], rel=1e-4)
        for r, s in zip(ours, theirs, strict=True)
    )


def test_other_settings_are_refused(undisturbed, tiny_store, tmp_path):
    from_step_4(undisturbed, tmp_path)
    done = train(tmp_path, tiny_store, "optim.lr=5e-4")
    assert done.returncode == 2
    assert "optim.lr was 0.001 and is now 0.0005" in done.stderr and "--allow-changed" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_finishes_the_step_and_saves(tiny_store, tmp_path):
    run = tmp_path / "runs" / "tiny-sft"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command(tiny_store, "train.steps=100000"), cwd=tmp_path, env=environment(tmp_path), stdout=log, stderr=log
        )
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").is_file() and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    text = (tmp_path / "log").read_text()
    assert code == 0, text
    done = len(records(run))
    assert 0 < done < 100000 and f"stopped at step {done} of 100000, saved" in text
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{done:08d}"


def test_non_finite_steps_end_the_run_with_their_documents(undisturbed, tiny_store, tmp_path):
    poisoned = tmp_path / "poisoned"
    shutil.copytree(undisturbed / "drafter-init", poisoned)
    tensors = load_file(poisoned / "model.safetensors")
    tensors["norm.weight"].fill_(3e38)  # finite, and every logit overflows
    save_file(tensors, poisoned / "model.safetensors")
    done = train(tmp_path, tiny_store, f"drafter.start_from={poisoned}", "train.max_skipped=3")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "3 steps in a row had a non-finite loss or gradient, the last at step 2 with documents" in done.stderr
    skipped = [json.loads(x) for x in (tmp_path / "runs/tiny-sft/skipped.rank0.jsonl").read_text().splitlines()]
    assert [s["step"] for s in skipped] == [0, 1, 2] and all(len(s["documents"]) == 4 for s in skipped)


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_export_of_a_run(undisturbed, tmp_path, layout):
    out = tmp_path / layout
    command = [sys.executable, "-m", "trainer", "export", str(undisturbed), "--format", layout, "--out", str(out)]
    done = subprocess.run(
        [*command, "--dtype", "float32"], env=environment(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    from trainer.drafter.checkpoint import load_drafter

    exported, ours = load_drafter(out), load_drafter(undisturbed / "drafter")
    # speculators' layout does not say how many layers the target has
    assert exported.config.model_copy(update={"num_target_layers": 6}) == ours.config
    assert all(a.equal(b) for a, b in zip(exported.parameters(), ours.parameters(), strict=True))
    card = (out / "README.md").read_text()
    assert '"num_speculative_tokens": 7' in card and "Not evaluated yet" in card and "[loss]" in card


def test_export_before_training(tmp_path):
    command = [sys.executable, "-m", "trainer", "export", str(tmp_path / "none")]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "has no drafter yet; finish its training with make train" in done.stderr
