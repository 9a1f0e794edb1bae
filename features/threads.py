"""Work of one call shared with a few helping threads, and the checksum that lets them run at once."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor

import google_crc32c
import numpy as np

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


def _library() -> Callable[[int, int, int], int] | None:
    """`crc32c_extend(crc, address, bytes)` of the C library inside google-crc32c's wheel.

    Called directly it does not hold Python's lock, as the package's own wrapper does all the while: threads that
    check or write (19 GB/s from the cache) would wait for each other.
    """
    try:
        from google_crc32c import _crc32c

        extend = ctypes.CDLL(_crc32c.__file__).crc32c_extend
    except (ImportError, OSError, AttributeError):
        return None
    extend.argtypes, extend.restype = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint32
    return extend


_extend = _library()


def crc32c(data: np.ndarray | bytes) -> int:
    """Checksum of a contiguous array or of bytes, as Zarr's codec has it."""
    if _extend is None or isinstance(data, bytes):
        return google_crc32c.value(data)
    assert data.flags.c_contiguous
    return _extend(0, data.ctypes.data, data.nbytes)
