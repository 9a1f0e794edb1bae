"""Work of one call shared with a few helping threads, and the checksum that lets them run at once."""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
from crc32c import crc32c as _crc32c

MAX_HELPERS = 3
"""one core copies 5-6 GB/s out of the page cache; four saturate most memories"""


class Helpers:
    """Threads that take over parts of a call; they start with the first use and end with the last reference."""

    def __init__(self, name: str):
        count = min(MAX_HELPERS, len(os.sched_getaffinity(0)) - 1)
        self.count = count
        self.pool = ThreadPoolExecutor(count, thread_name_prefix=name) if count else None

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run every task once, here and in the helpers, each taking the next one when it is free.

        Raises:
            whatever a task raised, after all have ended: they write into memory of the caller.
        """
        with self.backlog() as backlog:
            backlog.add(tasks[1:])
            for task in tasks[:1]:
                task()

    def backlog(self) -> "Backlog":
        """Tasks for the helpers that become known little by little."""
        return Backlog(self)


class Backlog:
    """Tasks that the helpers work on from `add` on, and the caller in `help`; none is left behind `with`."""

    def __init__(self, helpers: Helpers):
        self.helpers = helpers
        self.tasks: deque[Callable[[], None]] = deque()
        self.futures: list[Future[None]] = []

    def add(self, tasks: Sequence[Callable[[], None]]) -> None:
        """
        Raises:
            whatever a task raised in a helper so far.
        """
        ended = [f for f in self.futures if f.done()]
        self.futures = [f for f in self.futures if f not in ended]
        for future in ended:
            future.result()
        self.tasks.extend(tasks)
        if (pool := self.helpers.pool) is not None:
            more = min(self.helpers.count - len(self.futures), len(self.tasks))
            self.futures += [pool.submit(self.help) for _ in range(more)]

    def help(self, leave: int = 0) -> None:
        """Run tasks here until at most `leave` wait."""
        while len(self.tasks) > leave:
            try:
                task = self.tasks.popleft()
            except IndexError:  # somebody else was faster
                return
            task()

    def __enter__(self) -> "Backlog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """
        Raises:
            whatever a task raised, after all have ended.
        """
        if kind is not None:
            self.tasks.clear()
        errors = []
        try:
            self.help()
        finally:
            self.tasks.clear()  # left over where one failed
            for future in self.futures:
                future.cancel()  # one that has not begun finds nothing left to do
                with contextlib.suppress(CancelledError):
                    errors.append(future.exception())
        for error in errors:
            if error is not None and kind is None:
                raise error


def crc32c(data: np.ndarray | bytes) -> int:
    """Checksum of a contiguous array or of bytes, as Zarr's codec has it.

    The package's C code takes 14 GB/s from memory on one core and leaves Python's lock alone from 32 kB on, so threads
    that check or write do not wait for each other.
    """
    return _crc32c(data if isinstance(data, bytes) else memoryview(data.reshape(-1).view(np.uint8)))
