"""`make elastic-check`: every ZeRO stage on 1, 2 and 4 ranks, each resumed by each; and a run killed five times."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from elastic import OVERRIDES, assert_close, records, train_all
from ranks import spawn

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.skipif(not os.environ.get("FLASHDRAFT_ELASTIC"), reason="takes minutes: make elastic-check"),
    pytest.mark.timeout(1200),
]
WORLDS, ZEROS = (1, 2, 4), (0, 1, 2, 3)
STEPS = "train.steps=6"


def zero(stage: int) -> list[str]:
    return [STEPS, f"engine.zero_stage={stage}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("elastic") / "runs"


@pytest.fixture(scope="module")
def matrix(runs, tiny_store) -> Path:
    """Per number of ranks and stage: `N-zZ` undisturbed, `N-zZ-again` resumed at step 2, `M-zZ-on-N` by other ranks,
    `2-zZ-on-1-on-2` there and back, `N-bf16-zZ` and its `-again` in bf16."""

    def go(world: int, jobs: list[tuple[str, list[str], tuple[str, int] | None]]) -> None:
        tasks = [(str(runs / n), o, f and (str(runs / f[0]), f[1])) for n, o, f in jobs]
        said = spawn(world, train_all, tiny_store, tasks, busy_s=500)
        assert said == [[None] * len(jobs)] * world

    for n in WORLDS:
        jobs = []
        for z in ZEROS:
            jobs += [(f"{n}-z{z}", zero(z), None), (f"{n}-z{z}-again", zero(z), (f"{n}-z{z}", 2))]
            bf16 = [*zero(z), "engine.dtype=bf16"]
            if z:
                jobs += [(f"{n}-bf16-z{z}", bf16, None), (f"{n}-bf16-z{z}-again", bf16, (f"{n}-bf16-z{z}", 2))]
            jobs += [(f"{m}-z{z}-on-{n}", zero(z), (f"{m}-z{z}", 2)) for m in WORLDS if m < n and z < 3]
        go(n, jobs)
    go(1, [(f"{m}-z{z}-on-1", zero(z), (f"{m}-z{z}", 2)) for m in (2, 4) for z in ZEROS[:3]])
    back = [(f"2-z{z}-on-1-on-2", zero(z), (f"2-z{z}-on-1", 4)) for z in ZEROS[:3]]
    # the stage may change too: 1 -> 2 -> 1
    stages = [("2-z1-on-z2", zero(2), ("2-z1", 2)), ("2-z1-on-z2-on-z1", zero(1), ("2-z1-on-z2", 4))]
    go(2, [*back, *[(f"4-z{z}-on-2", zero(z), (f"4-z{z}", 2)) for z in ZEROS[:3]], *stages])
    return runs


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize(("dtype", "z"), [*(("", z) for z in ZEROS), *(("bf16-", z) for z in ZEROS if z)])
def test_resumes_bit_for_bit_on_as_many_ranks(matrix, n, dtype, z):
    assert records(matrix / f"{n}-{dtype}z{z}-again") == records(matrix / f"{n}-{dtype}z{z}")


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("z", ZEROS)
def test_ranks_and_stages_change_nothing_but_rounding(matrix, n, z):
    assert_close(records(matrix / f"{n}-z{z}"), records(matrix / "1-z1"))


@pytest.mark.parametrize("z", ZEROS[:3])
@pytest.mark.parametrize("m", WORLDS)
@pytest.mark.parametrize("n", WORLDS)
def test_other_ranks_go_on(matrix, m, n, z):
    if m == n:
        pytest.skip("the same number of ranks is bit for bit")
    assert_close(records(matrix / f"{m}-z{z}-on-{n}"), records(matrix / "1-z1"))


@pytest.mark.parametrize("run", [*(f"2-z{z}-on-1-on-2" for z in ZEROS[:3]), "2-z1-on-z2", "2-z1-on-z2-on-z1"])
def test_there_and_back(matrix, run):
    assert_close(records(matrix / run), records(matrix / "1-z1"))


def test_five_kills_change_nothing(tiny_store, tmp_path):
    """SIGKILL at random moments, all processes at once, resumed alternately on 2 and 1 ranks."""
    seed = int(os.environ.get("SEED", time.time()))
    rng, steps = random.Random(seed), 120
    print(f"seed {seed}")
    overrides = [f"train.steps={steps}", "train.save_every=5", "train.eval_every=20"]
    whole = tmp_path / "a" / "runs" / "run"
    assert spawn(2, train_all, tiny_store, [(str(whole), overrides, None)], busy_s=500) == [[None]] * 2
    cwd = tmp_path / "b"
    cwd.mkdir()
    run, kills = cwd / "runs" / "run", 0
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{cwd}/mlflow.db"}
    while True:
        command = [sys.executable, "-m", "trainer", "--recipe", "sft-fast", "--nproc", str(2 - kills % 2), *OVERRIDES]
        command += [f"data.store={tiny_store}", "name=run", *overrides]
        with open(cwd / f"log{kills}", "w") as log:
            process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=log)
            try:
                if kills < 5:
                    begun = _resumed_at(run)
                    _wait_for_step(process, run, begun, rng.randint(begun + 1, begun + 20), cwd / f"log{kills}")
                    time.sleep(rng.uniform(0, 0.3))
                else:
                    process.wait(timeout=240)
                ended = process.poll()
            finally:
                _kill(process)
        if kills == 5:
            assert ended == 0, (cwd / f"log{kills}").read_text()
            break
        assert ended is None, f"ended before it was killed: {(cwd / f'log{kills}').read_text()}"
        print(f"kill {kills + 1} on {2 - kills % 2} ranks at step {len(records(run))}, checkpoint {_resumed_at(run)}")
        kills += 1
    assert len(records(run)) == steps
    assert_close(records(run), records(whole), rel=1e-4)
    shutil.rmtree(cwd)


def _resumed_at(run: Path) -> int:
    latest = run / "checkpoints" / "latest"
    return int(latest.read_text().strip().split("-")[1]) if latest.is_file() else 0


def _wait_for_step(process, run: Path, begun: int, step: int, log: Path) -> None:
    """Until the resumed run, which first cuts its record to `begun` lines, has written `step`."""
    deadline, cut = time.monotonic() + 180, begun == 0
    while time.monotonic() < deadline and process.poll() is None:
        text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").is_file() else ""
        lines = text.count("\n")
        cut = cut or "resuming at step" in log.read_text()
        if cut and lines >= step:
            return
        time.sleep(0.02)


def _kill(process: subprocess.Popen) -> None:
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(timeout=30)
