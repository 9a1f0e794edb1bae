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
    pytest.mark.timeout(3600),  # ranks.py ends worlds that hang after 45 s, and those that never end
]
WORLDS, ZEROS = (1, 2, 4), (0, 1, 2, 3)
CHAIN = ((2, 1), (4, 3), (1, 2), (2, 0))
"""(ranks, stage) of a run that changes both after 2, 4 and 6 of 8 steps"""


def zero(stage: int, dtype: str = "", steps: int = 6) -> list[str]:
    return [f"train.steps={steps}", f"engine.zero_stage={stage}", *(["engine.dtype=bf16"] if dtype else [])]


def batches() -> list[tuple[int, list[tuple[str, list[str], tuple[str, int] | None]]]]:
    """(ranks, (run, overrides, (run, step) that it goes on from)): five worlds, which go on from what others have left.

    Per number of ranks N and stage Z: `N-zZ` undisturbed, `N-zZ-again` resumed at step 2, `M-zZ-on-N` begun by M ranks,
    `2-zZ-on-1-on-2` there and back; in bf16 `N-bf16-zZ`, its `-again`, and `2-bf16-zZ-on-1`; and `chain-0` to `-3`.
    """

    def chain(link: int) -> tuple[str, list[str], tuple[str, int] | None]:
        origin = (f"chain-{link - 1}", 2 * link) if link else None
        return f"chain-{link}", zero(CHAIN[link][1], steps=8), origin

    out = []
    for n in WORLDS:
        jobs = []
        for z in ZEROS:
            jobs += [(f"{n}-z{z}", zero(z), None), (f"{n}-z{z}-again", zero(z), (f"{n}-z{z}", 2))]
            if z:
                bf16 = f"{n}-bf16-z{z}"
                jobs += [(bf16, zero(z, "bf16"), None), (f"{bf16}-again", zero(z, "bf16"), (bf16, 2))]
            jobs += [(f"{m}-z{z}-on-{n}", zero(z), (f"{m}-z{z}", 2)) for m in WORLDS if m < n]
        whole = [("1-z1-of-8", zero(1, steps=8), None)] if n == 1 else []
        out.append((n, jobs + whole + [chain(link) for link in range(2) if CHAIN[link][0] == n]))
    jobs = [(f"{m}-z{z}-on-1", zero(z), (f"{m}-z{z}", 2)) for m in (2, 4) for z in ZEROS]
    jobs += [(f"2-bf16-z{z}-on-1", zero(z, "bf16"), (f"2-bf16-z{z}", 2)) for z in ZEROS[1:]]
    out.append((1, [*jobs, chain(2)]))
    jobs = [(f"4-z{z}-on-2", zero(z), (f"4-z{z}", 2)) for z in ZEROS]
    jobs += [(f"2-z{z}-on-1-on-2", zero(z), (f"2-z{z}-on-1", 4)) for z in ZEROS]
    return [*out, (2, [*jobs, chain(3)])]


class Matrix:
    """Makes the worlds up to the one that has the run which is asked for."""

    def __init__(self, runs: Path, store: str, capture):
        self.runs, self.store, self.capture, self.batches = runs, store, capture, batches()
        self.done: set[str] = set()
        self.failed = ""

    def __call__(self, run: str) -> list[dict]:
        while run not in self.done:
            assert not self.failed, f"{self.failed} did not end well, which an earlier test shows"
            world, jobs = self.batches.pop(0)
            self.failed = f"the world of {world} ranks that has {jobs[0][0]}"
            began = time.monotonic()
            tasks = [(str(self.runs / n), o, f and (str(self.runs / f[0]), f[1])) for n, o, f in jobs]
            assert spawn(world, train_all, self.store, tasks, busy_s=1000) == [[None] * len(jobs)] * world
            self.failed, self.done = "", self.done | {n for n, *_ in jobs}
            with self.capture.global_and_fixture_disabled():
                took = time.monotonic() - began
                print(f"\n{len(jobs)} runs on {world} rank{'s' * (world > 1)} in {took:.0f} s", end="", flush=True)
        return records(self.runs / run)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory, tiny_store, request) -> Matrix:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    return Matrix(tmp_path_factory.mktemp("elastic") / "runs", tiny_store, capture)


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize(("dtype", "z"), [*(("", z) for z in ZEROS), *(("bf16-", z) for z in ZEROS if z)])
def test_resumes_bit_for_bit_on_as_many_ranks(matrix, n, dtype, z):
    assert matrix(f"{n}-{dtype}z{z}-again") == matrix(f"{n}-{dtype}z{z}")


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("z", ZEROS)
def test_ranks_and_stages_change_nothing_but_rounding(matrix, n, z):
    assert_close(matrix(f"{n}-z{z}"), matrix("1-z1"))


@pytest.mark.parametrize("z", ZEROS)
@pytest.mark.parametrize(("m", "n"), [(m, n) for m in WORLDS for n in WORLDS if m != n])
def test_other_ranks_go_on(matrix, m, n, z):
    assert_close(matrix(f"{m}-z{z}-on-{n}"), matrix("1-z1"))


@pytest.mark.parametrize("z", ZEROS)
def test_there_and_back(matrix, z):
    assert_close(matrix(f"2-z{z}-on-1-on-2"), matrix("1-z1"))


@pytest.mark.parametrize("z", ZEROS[1:])
def test_other_ranks_go_on_in_bf16(matrix, z):
    """Gradients are rounded to bf16 before ranks add them, so the rounding is larger."""
    assert_close(matrix(f"2-bf16-z{z}-on-1"), matrix(f"1-bf16-z{z}"), rel=1e-2)


def test_ranks_and_stage_change_again_and_again(matrix):
    assert_close(matrix("chain-3"), matrix("1-z1-of-8"))


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
                    process.wait(timeout=900)
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
    deadline, cut = time.monotonic() + 600, begun == 0
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
