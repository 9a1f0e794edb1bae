"""A machine that falls silent ends the others; one that has finished, or was only slow, does not."""

import datetime
import signal
import subprocess
import sys

import psutil
import pytest
from torch.distributed import TCPStore

from infra.errors import ConfigError
from trainer.__main__ import launch
from trainer.machines import LOST

TIMEOUT_S = 6
MACHINE = """
import subprocess, sys, time
from trainer.machines import PeerWatch
watch = PeerWatch(sys.argv[1], "run", float(sys.argv[2]), sys.argv[3])
rank = subprocess.Popen(["sleep", "300"])  # what hangs in a collective
while watch.lost(time.monotonic()) or len(watch._heard) < 2: time.sleep(0.1)
print(rank.pid, flush=True)
sys.stdin.readline()
watch.leave(finished=True)
rank.kill()
"""


@pytest.fixture
def machines(root):
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=60), wait_for_workers=False)
    made = {}
    for name in ("a", "b", "c"):
        command = [sys.executable, "-c", MACHINE, f"127.0.0.1:{store.port}", str(TIMEOUT_S), name]
        made[name] = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    yield made
    for process in made.values():
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.spawn
def test_the_others_end_when_one_falls_silent(machines):
    ranks = {name: psutil.Process(int(process.stdout.readline())) for name, process in machines.items()}
    machines["c"].stdin.write("\n")
    machines["c"].stdin.flush()
    assert machines["c"].wait(timeout=20) == 0
    with pytest.raises(subprocess.TimeoutExpired):  # c has finished: its silence is no loss
        machines["a"].wait(timeout=TIMEOUT_S + 3)
    machines["b"].send_signal(signal.SIGSTOP)  # like a machine without power: no connection is closed
    try:
        assert machines["a"].wait(timeout=TIMEOUT_S + 10) == LOST
        said = machines["a"].stderr.read()
        assert f"no sign of life from b for {TIMEOUT_S} s" in said and "from the last checkpoint" in said
        assert not ranks["a"].is_running() or ranks["a"].status() == psutil.STATUS_ZOMBIE
    finally:
        machines["b"].send_signal(signal.SIGCONT)
        for rank in ranks.values():
            if rank.is_running():
                rank.kill()


def test_a_rendezvous_without_a_port_is_refused():
    with pytest.raises(ConfigError, match="'worker-1' is not HOST:PORT"):
        launch(["--model", "tiny", "--nodes", "2", "--rendezvous", "worker-1"])
