"""The helper that spawns ranks ends worlds that hang or die, and says where."""

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import run_ranks

pytestmark = pytest.mark.spawn


def wait_for_ever(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(10**6)


def compute_for_ever(rank: int, world: int) -> None:
    while True:
        pass


def die(rank: int, world: int) -> None:
    os._exit(rank * 7)


@pytest.mark.parametrize(
    ("body", "limits", "said"),
    [
        (wait_for_ever, (60, 5), r"(?s)the ranks hang: none has computed anything for 5 s.*rank 1.*in wait_for_ever"),
        (compute_for_ever, (2, 60), r"have not ended within 2 s of processor time"),
        (die, (60, 60), r"ranks \[0, 1\] died with \[0, 7\]"),
    ],
)
def test_no_world_outlives_its_limits(body, limits, said):
    before = set(os.listdir("/proc"))
    with pytest.raises(AssertionError, match=said):
        run_ranks(2, body, (), *limits)
    mine = [p for p in set(os.listdir("/proc")) - before if p.isdigit() and _parent(p) == os.getpid()]
    assert [p for p in mine if b"multiprocessing.spawn" in _command(p)] == []


def _parent(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
