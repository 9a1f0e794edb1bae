"""Work shared among threads, and the checksum."""

import threading
import time

import google_crc32c
import numpy as np
import pytest

from features import threads
from features.threads import Helpers, crc32c


@pytest.mark.parametrize("n", [0, 1, 7, 4096, 100_003])
def test_crc32c_is_that_of_zarrs_codec(n):
    data = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
    assert crc32c(data) == crc32c(data.tobytes()) == google_crc32c.value(data.tobytes())
    assert n < 8 or crc32c(data[: n // 4 * 4].view("<u4")) == google_crc32c.value(data[: n // 4 * 4].tobytes())


def helpers(count):
    made = Helpers("test")
    made.count, made.pool = count, threads.ThreadPoolExecutor(count) if count else None
    return made


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_task_runs_once(count):
    done = []
    helpers(count).run([lambda i=i: done.append(i) for i in range(50)])
    assert sorted(done) == list(range(50))
    helpers(count).run([])


def test_tasks_run_at_once():
    meet = threading.Barrier(3, timeout=30)
    helpers(2).run([meet.wait] * 3)


@pytest.mark.parametrize("count", [0, 2])
def test_an_error_comes_after_all_have_ended(count):
    running = []

    def slow():
        running.append(1)
        time.sleep(0.05)
        running.pop()

    def bad():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        helpers(count).run([slow, bad, slow, slow])
    assert not running


def test_busy_helpers_are_not_waited_for():
    shared, free = helpers(1), threading.Event()
    blocker = shared.pool.submit(free.wait, 30)
    done = []
    shared.run([lambda: done.append(1)] * 2)
    assert len(done) == 2 and not blocker.done()
    free.set()


@pytest.mark.parametrize("count", [0, 2])
def test_a_backlog_takes_tasks_little_by_little_and_leaves_none(count):
    done = []
    with helpers(count).backlog() as backlog:
        for i in range(20):
            backlog.add([lambda i=i, j=j: done.append((i, j)) for j in range(i % 4)])
            backlog.help(leave=3)
            assert len(backlog.tasks) <= 3
    assert sorted(done) == [(i, j) for i in range(20) for j in range(i % 4)]


def test_a_backlog_works_while_the_caller_is_away():
    done = threading.Event()
    with helpers(1).backlog() as backlog:
        backlog.add([done.set])
        assert done.wait(30)


@pytest.mark.parametrize("count", [0, 2])
def test_an_error_in_a_backlog_ends_it_when_nothing_runs_any_more(count):
    running, begun = [], []

    def slow():
        begun.append(1)
        running.append(1)
        time.sleep(0.05)
        running.pop()

    def bad():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), helpers(count).backlog() as backlog:
        for _ in range(50):
            backlog.add([slow, bad])
            backlog.help(leave=1)
            time.sleep(0.01)
    assert not running and len(begun) < 50


def test_what_waits_in_a_backlog_is_dropped_when_its_caller_fails():
    done = []
    with pytest.raises(KeyError), helpers(0).backlog() as backlog:
        backlog.add([lambda: done.append(1)])
        raise KeyError
    assert done == []
