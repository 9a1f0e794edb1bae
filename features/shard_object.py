"""Writing one shard object while its rows still arrive: checksums and I/O run behind the copy of the next rows."""

from concurrent.futures import Future, ThreadPoolExecutor

import google_crc32c
import numpy as np

from features.files import Files
from features.layout import ABSENT, ArrayLayout, ObjectRecord, object_digest

GROUP_BYTES = 4 * 2**20
"""bytes handed to the kernel at once: enough to make a call cheap, few enough to be still in the cache"""


class ShardObjectWriter:
    """Chunks, checksums and index of one object, in order; the work is done in `pool` (one thread keeps the order)."""

    def __init__(self, files: Files, path: str, layout: ArrayLayout, pool: ThreadPoolExecutor):
        self.files, self.path, self.layout, self.pool = files, path, layout, pool
        self.sent = 0  # chunks handed to the pool
        self.crcs: list[int] = []
        self.waiting: list[Future[None]] = []
        self.out = None

    def ready(self, rows: np.ndarray, until: int) -> None:
        """Rows [0, until) of the shard's buffer will not change any more."""
        chunks = until // self.layout.chunk_tokens
        if (chunks - self.sent) * self.layout.chunk_bytes >= GROUP_BYTES:
            self._send(rows, chunks)

    def close(self, rows: np.ndarray, used: int) -> ObjectRecord:
        """Write what is left of `used` rows (zeros up to the end of the last chunk) and the index."""
        held = self.layout.rows_to_hold(used)
        rows[used:held] = 0
        self._send(rows, held // self.layout.chunk_tokens)
        for future in self.waiting:
            future.result()
        size, count = self.layout.chunk_bytes + 4, self.sent
        index = np.full((self.layout.num_chunks, 2), ABSENT, "<u8")
        index[:count, 0] = np.arange(count, dtype=np.uint64) * size
        index[:count, 1] = size
        tail = index.tobytes()
        tail += google_crc32c.value(tail).to_bytes(4, "little")
        self.out.write([tail])
        self.out.close()
        return ObjectRecord(count * size + len(tail), object_digest(np.array(self.crcs, "<u4"), tail))

    def abandon(self) -> None:
        """Drop what was written."""
        for future in self.waiting:
            future.cancel()
        self.pool.submit(lambda: None).result()  # the last group in flight has ended
        if self.out is not None:
            self.out.abandon()
            self.files.remove(self.path)

    def _send(self, rows: np.ndarray, chunks: int) -> None:
        flat, per_group = rows.reshape(-1).view(np.uint8), max(1, GROUP_BYTES // self.layout.chunk_bytes)
        for a in range(self.sent, chunks, per_group):
            self.waiting.append(self.pool.submit(self._write, flat, a, min(a + per_group, chunks)))
        self.sent = chunks

    def _write(self, flat: np.ndarray, first: int, last: int) -> None:
        if self.out is None:
            self.out = self.files.open_parts(self.path)
        size, parts = self.layout.chunk_bytes, []
        for i in range(first, last):
            chunk = flat[i * size : (i + 1) * size]
            self.crcs.append(google_crc32c.value(chunk))
            parts += [chunk, self.crcs[-1].to_bytes(4, "little")]
        self.out.write(parts)
