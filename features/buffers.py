"""Host memory for tensors that live for a moment: taken from and given back to a small reserve.

Fresh memory costs the kernel a page fault and a zeroing per page, about as much as the copy out of the page cache that
fills it. A tensor from here returns its memory when the last view of it is gone, and the next that fits takes it.
"""

import bisect
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
        self.free: list[tuple[int, int, mmap.mmap]] = []  # (bytes, id, block), ascending
        self.lock = threading.RLock()  # re-entrant: a give-back may happen wherever Python drops a reference

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous CPU tensor with arbitrary content."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes < SMALL_BYTES:
            return torch.empty(shape, dtype=dtype)
        with self.lock:
            at = bisect.bisect_left(self.free, (nbytes,))
            block = self.free.pop(at)[2] if at < len(self.free) else None
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
            bisect.insort(self.free, (len(block), id(block), block))
            while len(self.free) > 1 and sum(size for size, _, _ in self.free) > self.limit_bytes:
                self.free.pop(0)  # the smallest: a large block serves small tensors, but not the other way round
