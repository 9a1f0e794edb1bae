"""N steps + resume + N steps = 2N steps: bit for bit on as many ranks, to rounding on another number of them.

`make elastic-check` has the whole matrix of ZeRO stages and ranks, and a run that is killed five times.
"""

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

sys.path.insert(0, str(Path(__file__).parent))
from elastic import OVERRIDES, assert_close, records, train_all
from ranks import spawn

ROOT = Path(__file__).parent.parent.parent
STEPS = "train.steps=8"
pytestmark = [pytest.mark.slow, pytest.mark.spawn]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("elastic") / "runs"


@pytest.fixture(scope="module")
def alone(runs, tiny_store) -> dict[str, str | None]:
    """What one rank says to an undisturbed run (ZeRO-1), to jobs that go on from it, and to some that it refuses."""
    whole = str(runs / "whole")
    jobs = {
        "whole": ([STEPS], None),
        "again": ([STEPS], (whole, 4)),
        "finished": ([STEPS], None),
        "changed": ([STEPS, "optim.lr=5e-4"], (whole, 4)),
        "allowed": ([STEPS, "optim.lr=5e-4", "allow:optim.lr"], (whole, 6)),
        "muon": ([STEPS, "optim.matrices=muon"], None),
        "muon-again": ([STEPS, "optim.matrices=muon"], (str(runs / "muon"), 4)),
        "patient": (["train.steps=40", "train.eval_every=2", "train.patience=2", "optim.lr=1e-9"], None),
    }
    folder = {"finished": "again"}
    tasks = [(str(runs / folder.get(name, name)), what, origin) for name, (what, origin) in jobs.items()]
    (said,) = spawn(1, train_all, tiny_store, tasks)
    return dict(zip(jobs, said, strict=True))


@pytest.fixture(scope="module")
def whole(alone, runs) -> Path:
    assert alone["whole"] is None
    return runs / "whole"


def test_one_rank_resumes_bit_for_bit(alone, whole, runs):
    assert alone["again"] is None and alone["finished"] is None  # a finished run computes nothing
    assert records(runs / "again") == records(whole)
    ours, theirs = (load_file(r / "drafter" / "model.safetensors") for r in (runs / "again", whole))
    assert ours.keys() == theirs.keys() and all(ours[k].equal(theirs[k]) for k in ours)


def test_other_settings_are_refused_unless_allowed(alone):
    assert "ConfigError: run 'runs/changed' exists with other settings" in alone["changed"]
    assert "optim.lr was 0.001 and is now 0.0005" in alone["changed"] and "--allow-changed optim.lr" in alone["changed"]
    assert alone["allowed"] is None


def test_non_finite_steps_end_the_run_with_their_documents(back, runs):
    assert "3 steps in a row had a non-finite loss or gradient, the last at step 2 with documents" in back["poisoned"]
    skipped = [json.loads(x) for x in (runs / "poisoned" / "skipped.rank0.jsonl").read_text().splitlines()]
    assert [s["step"] for s in skipped] == [0, 1, 2] and all(len(s["documents"]) == 4 for s in skipped)


def test_muon_resumes_bit_for_bit_and_on_other_ranks(alone, back, two_ranks, runs, whole):
    assert alone["muon"] is None and alone["muon-again"] is None
    assert records(runs / "muon-again") == records(runs / "muon")
    assert records(runs / "muon")[-1]["loss"] != records(whole)[-1]["loss"]
    # Muon orthogonalises in bf16 (2^-9): losses differ by up to 5e-5, norms of gradients by up to 1e-3
    assert_close(records(two_ranks["muon"]), records(runs / "muon"), rel=2e-4, norm_rel=5e-3)
    assert back["muon"] is None
    assert_close(records(runs / "back-muon"), records(runs / "muon"), rel=2e-4, norm_rel=5e-3)


def test_training_ends_when_the_drafter_gets_no_better(alone, runs):
    assert alone["patient"] is None
    taus = [r["heldout_tau"] for r in records(runs / "patient")]
    assert len(taus) == 6 and [t is not None for t in taus] == [False, True] * 3  # the first is the best


def test_the_replay_while_training_says_where_the_drafter_is_weak(whole, tiny_store):
    last = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
    found = last["heldout"]
    assert found["replay_tau_pooled"] == last["heldout_tau"] == found["tau_at_b08"]
    assert [f"tau_at_b{b:02d}" in found for b in range(2, 9)] == [True] * 7
    assert 1 <= found["tau_at_b02"] <= found["tau_at_b08"] and 0 <= found["acceptance_at_01"] <= 1
    assert found["tau_source/random"] == found["tau_context/0-255"] == found["replay_tau_pooled"]


def test_mlflow_ranks_the_checkpoints_by_tau(whole, alone, tiny_store):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{Path(tiny_store).parent.parent.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("flashdraft").experiment_id
    order = [{"field_name": "metrics.heldout_replay_tau", "ascending": False}]
    models = client.search_logged_models([experiment], order_by=order)
    taus = [next(m.value for m in model.metrics if m.key == "heldout_replay_tau") for model in models]
    assert len(models) >= 5 and taus == sorted(taus, reverse=True)
    weights = {m.name: m.tags["weights"] for m in models}
    assert weights["whole-step-6"] == "runs/whole/drafter"  # the first is the best of an untrained kind
    assert weights["whole-step-8"] == "runs/whole/checkpoints/step-00000008"
    child = json.loads((whole / "mlflow.json").read_text())["runs"]["sft"]
    metrics = client.get_run(child).data.metrics
    assert {"train/loss", "train/accuracy_1", "train/lr", "train/grad_norm", "train/tokens_per_s"} <= metrics.keys()
    assert 0 <= metrics["train/data_wait_share"] < 1 and metrics["train/checkpoint_s"] > 0


ZEROS = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def two_ranks(whole, runs, tiny_store) -> dict[str, Path]:
    """Two ranks go on from one rank's checkpoint of ZeRO-1 under ZeRO 1, 2 and 3; and a whole run with Muon."""
    folders = {name: runs / f"two-{name}" for name in (*ZEROS, "muon")}
    jobs = [(str(folders[z]), [STEPS, f"engine.zero_stage={z[-1]}"], (str(whole), 2)) for z in ZEROS[:2]]
    # under ZeRO-3 one rank replays more documents than the other; and training waits for its checkpoints
    uneven = ["engine.zero_stage=3", "train.eval_documents=3", "train.save_async=false"]
    jobs.append((str(folders["zero3"]), [STEPS, *uneven], (str(whole), 2)))
    jobs.append((str(folders["muon"]), [STEPS, "optim.matrices=muon"], None))
    assert spawn(2, train_all, tiny_store, jobs) == [[None] * 4] * 2
    return folders


@pytest.fixture(scope="module")
def back(two_ranks, whole, runs, tiny_store) -> dict[str, str | None]:
    """One rank goes on from two ranks' checkpoints; and a drafter that overflows."""
    poisoned = runs / "poisoned-drafter"
    shutil.copytree(whole / "drafter-init", poisoned)
    tensors = load_file(poisoned / "model.safetensors")
    tensors["norm.weight"].fill_(3e38)  # finite, and every logit overflows
    save_file(tensors, poisoned / "model.safetensors")
    jobs = [(str(runs / f"back-{z}"), [STEPS, f"engine.zero_stage={z[-1]}"], (str(two_ranks[z]), 4)) for z in ZEROS]
    jobs.append((str(runs / "back-muon"), [STEPS, "optim.matrices=muon"], (str(two_ranks["muon"]), 4)))
    start = [STEPS, f"drafter.start_from={poisoned}", "train.max_skipped=3"]
    jobs.append((str(runs / "poisoned"), start, None))
    (said,) = spawn(1, train_all, tiny_store, jobs)
    return dict(zip((*ZEROS, "muon", "poisoned"), said, strict=True))


@pytest.mark.parametrize("zero", ZEROS)
def test_two_ranks_go_on_where_one_stopped_and_back(two_ranks, back, whole, runs, zero):
    assert_close(records(two_ranks[zero]), records(whole))
    assert back[zero] is None
    assert_close(records(runs / f"back-{zero}"), records(whole))


def test_four_ranks_go_on_where_two_stopped(two_ranks, whole, runs, tiny_store):
    jobs = [(str(runs / "four"), [STEPS, "engine.zero_stage=3"], (str(two_ranks["zero2"]), 6))]
    assert spawn(4, train_all, tiny_store, jobs) == [[None]] * 4
    assert_close(records(runs / "four"), records(whole))


def test_sigterm_finishes_the_step_and_saves(tiny_store, tmp_path):
    run = tmp_path / "runs" / "tiny-sft"
    command = [sys.executable, "-m", "trainer", "--recipe", "sft-fast", "--nproc", "1", *OVERRIDES]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [*command, f"data.store={tiny_store}", "train.steps=100000"],
            cwd=tmp_path, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
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


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_export_of_a_run(whole, tmp_path, layout):
    from trainer.drafter.checkpoint import load_drafter
    from trainer.export import main

    out = tmp_path / layout
    assert main([str(whole), "--format", layout, "--out", str(out), "--dtype", "float32"]) == 0
    exported, ours = load_drafter(out), load_drafter(whole / "drafter")
    # speculators' layout does not say how many layers the target has
    assert exported.config.model_copy(update={"num_target_layers": 6}) == ours.config
    assert all(a.equal(b) for a, b in zip(exported.parameters(), ours.parameters(), strict=True))
    card = (out / "README.md").read_text()
    assert '"num_speculative_tokens": 7' in card and "Not evaluated yet" in card and "[loss]" in card


def test_export_before_training(tmp_path):
    from infra.errors import CheckpointError
    from trainer.export import main

    with pytest.raises(CheckpointError, match="has no drafter yet; finish its training with make train"):
        main([str(tmp_path / "none")])
