"""Work of one call shared with a few helping threads, and the checksum that lets them run at once."""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor

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
        left = iter(tasks)

        def work() -> None:
            for task in left:
                task()

        helpers = min(self.count, len(tasks) - 1)
        futures = [self.pool.submit(work) for _ in range(helpers)] if self.pool and helpers > 0 else []
        try:
            work()
        finally:
            errors = []
            for future in futures:
                future.cancel()  # one that has not begun finds nothing left to do
                with contextlib.suppress(CancelledError):
                    errors.append(future.exception())
        for error in errors:
            if error is not None:
                raise error


def crc32c(data: np.ndarray | bytes) -> int:
    """Checksum of a contiguous array or of bytes, as Zarr's codec has it.

    The package's C code takes 14 GB/s from memory on one core and leaves Python's lock alone from 32 kB on, so threads
    that check or write do not wait for each other.
    """
    return _crc32c(data if isinstance(data, bytes) else memoryview(data.reshape(-1).view(np.uint8)))
