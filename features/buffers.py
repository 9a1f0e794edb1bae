"""Host memory for tensors that live for a moment: taken from and given back to a small reserve.

Fresh memory costs the kernel a page fault and a zeroing per page, about as much as the copy out of the page cache that
fills it. A tensor from here returns its memory when the last view of it is gone, and the next tensor takes what came
back last, which may still be in the processor's cache, of what is large enough.
"""

import ctypes
import mmap
import threading
import weakref

import numpy as np
import torch

SMALL_BYTES = 256 * 1024
"""below this the C allocator reuses memory by itself"""


class Buffers:
    """Reserve of at most `limit_bytes` of unused memory, or one block; what is in use is not limited."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.free: list[mmap.mmap] = []  # in the order in which they came back
        self.lock = threading.RLock()  # re-entrant: a give-back may happen wherever Python drops a reference

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous CPU tensor with arbitrary content."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes < SMALL_BYTES:
            return torch.empty(shape, dtype=dtype)
        with self.lock:
            fits = (at for at in reversed(range(len(self.free))) if len(self.free[at]) >= nbytes)
            at = next(fits, None)
            block = None if at is None else self.free.pop(at)
        if block is None:
            # Up to a quarter larger, so that the block serves the next document of about this size too; pages that no
            # tensor has reached yet take no memory.
            unit = 1 << max(nbytes.bit_length() - 3, 12)
            block = mmap.mmap(-1, -(-nbytes // unit) * unit, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
        lease = (ctypes.c_char * nbytes).from_buffer(block)  # what the tensor keeps alive
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.from_numpy(np.frombuffer(lease, np.uint8)).view(dtype).view(shape)

    def _give_back(self, block: mmap.mmap) -> None:
        with self.lock:
            self.free.append(block)
            while len(self.free) > 1 and sum(map(len, self.free)) > self.limit_bytes:
                self.free.remove(min(self.free, key=len))  # a large block serves small tensors too
