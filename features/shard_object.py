"""One shard object: reading rows of it, and writing it while its rows still arrive."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal

import google_crc32c
import numpy as np

from features.commits import Commit, attempt_path
from features.files import IOV, Files, LocalFiles, ObjectFiles, Parts
from features.layout import ABSENT, ArrayLayout, ObjectRecord, check_chunk, damaged, decode_index, object_digest

Verify = Literal["first_touch", "always", "never"]
SMALL_OBJECT_BYTES = 256 * 1024
"""remote objects up to this size come in one request (token ids of 32,768 tokens: 128 kB)"""
CHECK_BYTES = 2 * 2**20
"""checked by another thread while the next ones are read: few hand-overs, and still in the cache"""
GROUP_BYTES = 4 * 2**20
"""bytes handed to the kernel at once: enough to make a call cheap, few enough to be still in the cache"""


class ShardObject:
    """One open shard object: its chunk index, and reads of rows through it."""

    def __init__(
        self,
        files: Files,
        layout: ArrayLayout,
        commit: Commit,
        checked: dict[tuple[str, int], int],
        checker: ThreadPoolExecutor,
    ):
        """
        Args:
            checked: per (array, shard) the chunks found intact so far, one bit each; shared with the reader.
            checker: thread that verifies chunks while this one reads on.
        Raises:
            StoreError: the object is gone, has another size than its commit says, or a damaged index.
        """
        self.files, self.layout, self.checked, self.checker = files, layout, checked, checker
        self.key = (layout.name, commit.shard)
        self.path = layout.key(commit.shard)
        self.fd = -1
        self.whole: np.ndarray | None = None  # the bytes of a small remote object
        record = commit.objects[layout.name]
        tail, size = self._open(commit.attempt, record.bytes)
        self.where = f"{files.uri}/{self.path}"
        if size != record.bytes:
            raise damaged(self.where, f"it has {size} bytes and its commit says {record.bytes}")
        self.index: list[int] = decode_index(self.layout, tail, size, self.where)[:, 0].tolist()

    def _open(self, attempt: str, nbytes: int) -> tuple[bytes, int]:
        """Find the object; its index and its size."""
        index_bytes, (name, shard) = self.layout.index_bytes, self.key
        waiting = attempt_path(shard, attempt, name)  # committed, not yet under its Zarr name
        for path in (self.path, waiting, self.path):
            try:
                if isinstance(self.files, LocalFiles):
                    self.fd = os.open(self.files.local(path), os.O_RDONLY)
                    size = os.fstat(self.fd).st_size
                    tail = os.pread(self.fd, index_bytes, max(0, size - index_bytes))
                else:
                    small = nbytes <= SMALL_OBJECT_BYTES  # one request brings all of it
                    tail, size = self.files.read_suffix(path, nbytes if small else index_bytes)
                    self.whole = np.frombuffer(tail, np.uint8) if small else None
                    tail = tail[-index_bytes:]
            except FileNotFoundError:
                continue
            self.path = path
            return tail, size
        raise damaged(f"{self.files.uri}/{self.path}", "it is committed but the object is gone")

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def read_rows(self, first: int, count: int, out: np.ndarray, verify: Verify) -> None:
        """Bytes of rows [first, first + count) into `out` (uint8, flat)."""
        c, row_bytes, size = self.layout.chunk_tokens, self.layout.row_bytes, self.layout.chunk_bytes
        checked = self.checked.get(self.key, 0) if verify == "first_touch" else 0
        reads: list[tuple[int, list[Any]]] = []  # (offset in the object, buffers)
        checks: list[tuple[int, np.ndarray, np.ndarray, np.ndarray, int]] = []
        behind: list[Future[None]] = []
        try:
            # Example, c = 16, rows [10, 40): chunk 0 rows 10-15, chunk 1 whole, chunk 2 rows 32-39.
            for i in range(first // c, -(-(first + count) // c)):
                lo, hi = max(first, i * c), min(first + count, (i + 1) * c)
                part = out[(lo - first) * row_bytes : (hi - first) * row_bytes]
                offset = self.index[i]
                if offset < 0:
                    part[:] = 0
                elif verify == "never" or checked >> i & 1:
                    self._append(reads, offset + (lo - i * c) * row_bytes, [part])
                else:
                    whole = part if len(part) == size else np.empty(size, np.uint8)
                    crc = np.empty(4, np.uint8)
                    self._append(reads, offset, [whole, crc])
                    checks.append((i, whole, crc, part, (lo - i * c) * row_bytes))
                    if self.fd >= 0 and len(checks) * size >= CHECK_BYTES:  # checked while it is in the cache
                        self._read(reads)
                        behind.append(self.checker.submit(self._check, checks))
                        reads, checks = [], []
                    checked |= 1 << i
            self._read(reads)
            self._check(checks)
        finally:
            wait(behind)  # after an error too: they write into `out`
        for future in behind:
            future.result()
        if verify == "first_touch":
            self.checked[self.key] = self.checked.get(self.key, 0) | checked

    def _append(self, reads: list[tuple[int, list[Any]]], offset: int, buffers: list[Any]) -> None:
        """Add a read, to the last one where at most a checksum lies between: few calls for a whole document."""
        if reads and len(reads[-1][1]) < IOV:
            start, last = reads[-1]
            gap = offset - start - sum(map(len, last))
            if gap in (0, 4):
                last += [*([bytearray(4)] if gap else []), *buffers]
                return
        reads.append((offset, buffers))

    def _check(self, checks: list[tuple[int, np.ndarray, np.ndarray, np.ndarray, int]]) -> None:
        for i, whole, crc, part, skip in checks:
            check_chunk(whole, crc, self.where, i)
            if whole is not part:
                part[:] = whole[skip : skip + len(part)]

    def _read(self, reads: list[tuple[int, list[Any]]]) -> None:
        """Fill the buffers of each read with the object's bytes from its offset on."""
        if not reads:
            return
        if self.fd >= 0:
            for offset, buffers in reads:
                want = sum(map(len, buffers))
                if os.preadv(self.fd, buffers, offset) != want:
                    raise damaged(self.where, f"it ends before byte {offset + want}")
            return
        starts = [offset for offset, _ in reads]
        ends = [offset + sum(map(len, buffers)) for offset, buffers in reads]
        if self.whole is not None:
            found: Sequence[Any] = [self.whole[a:b] for a, b in zip(starts, ends, strict=True)]
        else:
            assert isinstance(self.files, ObjectFiles)
            found = self.files.read_ranges(self.path, starts, ends)
        for (_, buffers), data in zip(reads, found, strict=True):
            raw, at = np.frombuffer(data, np.uint8), 0
            for b in buffers:
                b[:] = raw[at : at + len(b)]
                at += len(b)


class ShardObjectWriter:
    """Writes chunks, checksums and index in order, behind the copy of the next rows: in `pool`, of one thread."""

    def __init__(self, files: Files, path: str, layout: ArrayLayout, pool: ThreadPoolExecutor):
        self.files, self.path, self.layout, self.pool = files, path, layout, pool
        self.sent = 0  # chunks handed to the pool
        self.crcs: list[int] = []
        self.waiting: list[Future[None]] = []
        self.out: Parts | None = None

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
