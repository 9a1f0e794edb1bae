"""Spawns a gloo world of real DeepSpeed ranks, and ends it when it hangs.

A rank that waits for another sleeps and uses no processor, however slow the machine is; one that the machine keeps from
working is runnable, or waits for a disk. A world whose ranks all sleep for `quiet_s` seconds hangs, and the message
says where each of them stood. Work that never ends is bounded in processor time too, so that a busy machine ends no
world that goes on.
"""

import faulthandler
import multiprocessing
import os
import queue
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

QUIET_S = 45.0  # with the second in which it is noticed and the ten of ending, below a minute


def spawn(world: int, work: Callable[..., Any], *args: Any, busy_s: float = 240) -> list[Any]:
    """`work(world_object, *args)` on every rank; returns the ranks' results in order.

    Raises:
        AssertionError: a rank raised (its trace is the message), died, hung, or used more than `busy_s` of a processor.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return run_ranks(world, _rank, (port, work, args), busy_s)


def run_ranks(world: int, body: Callable[..., Any], args: tuple, busy_s: float, quiet_s: float = QUIET_S) -> list[Any]:
    """`body(rank, world, *args)` in `world` new processes; what `spawn` says of `work` holds for it."""
    context = multiprocessing.get_context("spawn")
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as stacks:
        answers = context.Queue()
        ranks = [context.Process(target=_run, args=(r, world, answers, stacks, body, args)) for r in range(world)]
        for p in ranks:
            p.start()
        try:
            watch = _Watch(ranks, busy_s, quiet_s)
            while len(results) < world:
                try:
                    rank, result, error = answers.get(timeout=1)
                except queue.Empty:
                    if why := watch.gave_up(done=results):
                        raise AssertionError(f"{why}\n{_where(ranks, Path(stacks))}") from None
                    continue
                assert error is None, f"rank {rank}: {error}"
                results[rank] = result
        finally:
            for p in ranks:
                p.join(timeout=10 if len(results) == world else 0)
                if p.is_alive():
                    p.kill()
                    p.join()
    return [results[r] for r in range(world)]


class _Watch:
    """Notices that ranks died, hang, or take too long."""

    def __init__(self, ranks: Sequence[BaseProcess], busy_s: float, quiet_s: float):
        self.ranks, self.busy_s, self.quiet_s, self.moved_at = ranks, busy_s, quiet_s, time.monotonic()
        self.used, self.total = [0.0] * len(ranks), 0.0
        self.dead, self.awake = set[int](), set[int]()

    def gave_up(self, done: dict[int, Any]) -> str | None:
        """Why the world is to be ended; asked about once a second."""
        now = time.monotonic()
        dead = {r for r, p in enumerate(self.ranks) if p.exitcode is not None and r not in done}
        if dead & self.dead:  # since a second ago at least: its answer would be here
            return f"ranks {sorted(dead)} died with {[self.ranks[r].exitcode for r in sorted(dead)]}"
        self.dead = dead
        self.used = [
            max(u, _processor_s(p)) for u, p in zip(self.used, self.ranks, strict=True)
        ]  # the ended keep theirs
        awake = {r for r, p in enumerate(self.ranks) if _awake(p)}
        # seen awake once it may have been a short look at the time; twice in a row is work
        if sum(self.used) - self.total >= 1.0 or awake & self.awake:
            self.total, self.moved_at = sum(self.used), now
        self.awake = awake
        if now - self.moved_at > self.quiet_s:
            return f"the ranks hang: none has computed anything for {self.quiet_s:.0f} s"
        if max(self.used) > self.busy_s:
            return f"the ranks have not ended within {self.busy_s:.0f} s of processor time"
        return None


def _processor_s(process: BaseProcess) -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def _awake(process: BaseProcess) -> bool:
    """Whether its main thread runs, would run if a processor were free, or waits for a disk."""
    try:
        return psutil.Process(process.pid).status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    except psutil.NoSuchProcess:
        return False


def _where(ranks: Sequence[BaseProcess], stacks: Path) -> str:
    """Where each rank is in its code."""
    for p in ranks:
        if p.is_alive() and (stacks / str(p.pid)).is_file():
            os.kill(p.pid, signal.SIGUSR1)
    time.sleep(0.5)
    return "\n".join(
        f"rank {r}:\n{path.read_text()}" for r, p in enumerate(ranks) if (path := stacks / str(p.pid)).is_file()
    )


def _run(rank: int, world: int, answers: Any, stacks: str, body: Callable[..., Any], args: tuple) -> None:
    with open(Path(stacks) / str(os.getpid()), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            answers.put((rank, body(rank, world, *args), None))
        except BaseException:
            answers.put((rank, None, traceback.format_exc()))


def _rank(rank: int, world: int, port: int, work: Callable[..., Any], args: tuple) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    from trainer.engine import init_world

    return work(init_world(timeout_s=60), *args)
