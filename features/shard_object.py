"""One shard object: reading rows of it, and writing it piece by piece."""

import errno
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from features.commits import Commit, attempt_path
from features.files import IOV, Files, LocalFiles, ObjectFiles
from features.layout import (
    ABSENT,
    PAGE,
    ArrayLayout,
    ObjectRecord,
    check_chunk,
    damaged,
    decode_index,
    object_digest,
)
from features.mapping import map_pieces, populate
from features.threads import Helpers, crc32c

Verify = Literal["first_touch", "always", "never"]
MAPPED_BYTES = 512 * 1024
"""rows of this size and more are mapped where they can be; below, a copy costs no more than the calls that map"""
SMALL_OBJECT_BYTES = 256 * 1024
"""remote objects up to this size come in one request (token ids of 32,768 tokens: 128 kB)"""
JOB_BYTES = 2 * 2**20
"""read at once by one thread: enough to make calls cheap, few enough to be checked in the cache"""


class ShardObject:
    """One open shard object: its chunk index, and reads of rows through it."""

    def __init__(
        self,
        files: Files,
        layout: ArrayLayout,
        commit: Commit,
        checked: dict[tuple[str, int], int],
        helpers: Helpers,
    ):
        """
        Args:
            checked: per (array, shard) the chunks found intact so far, one bit each; shared with the reader.
            helpers: threads that take a part of a large read.
        Raises:
            StoreError: the object is gone, has another size than its commit says, or a damaged index.
        """
        self.files, self.layout, self.checked, self.helpers = files, layout, checked, helpers
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

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `close` of its own: when Python ends, the module may be empty before the last object goes.
        if self.fd >= 0:
            close(self.fd)

    def read_rows(self, first: int, count: int, out: np.ndarray, verify: Verify) -> None:
        """Bytes of rows [first, first + count) into `out` (uint8, flat)."""
        c, row_bytes, size = self.layout.chunk_tokens, self.layout.row_bytes, self.layout.chunk_bytes
        unchecked = self._unchecked(first, count, verify)
        jobs, reads, checks, waiting = [], [], [], 0
        # Example, c = 16, rows [10, 40): chunk 0 rows 10-15, chunk 1 whole, chunk 2 rows 32-39.
        for i in range(first // c, -(-(first + count) // c)):
            lo, hi = max(first, i * c), min(first + count, (i + 1) * c)
            part = out[(lo - first) * row_bytes : (hi - first) * row_bytes]
            offset = self.index[i]
            if offset < 0:
                part[:] = 0
            elif i not in unchecked:
                self._append(reads, offset + (lo - i * c) * row_bytes, [part])
            else:
                whole = part if len(part) == size else np.empty(size, np.uint8)
                crc = np.empty(4, np.uint8)
                self._append(reads, offset, [whole, crc])
                checks.append((i, whole, crc, part, (lo - i * c) * row_bytes))
            waiting += len(part)
            if self.fd >= 0 and waiting >= JOB_BYTES:
                jobs.append(functools.partial(self._read_and_check, reads, checks))
                reads, checks, waiting = [], [], 0
        jobs.append(functools.partial(self._read_and_check, reads, checks))
        self.helpers.run(jobs)
        self._note(unchecked, verify)

    def map_rows(self, first: int, count: int, verify: Verify) -> np.ndarray | None:
        """The same rows as memory (uint8, flat) that is the page cache itself, every page of it present.

        Returns:
            None where they have to be read: in an object store, few rows, chunks that do not begin at pages.
        """
        c, row_bytes, size = self.layout.chunk_tokens, self.layout.row_bytes, self.layout.chunk_bytes
        begin, end = first // c, -(-(first + count) // c)
        if self.fd < 0 or count * row_bytes < MAPPED_BYTES or min(self.index[begin:end]) < 0:
            return None
        mapped = map_pieces(self.fd, self.index[begin:end], size)
        if mapped is None:
            return None
        unchecked = self._unchecked(first, count, verify)
        wanted = range((first - begin * c) * row_bytes, (first + count - begin * c) * row_bytes)

        low, high = (0, len(mapped)) if unchecked else (wanted.start, wanted.stop)
        try:
            populate(mapped[low:high])  # in one call: two threads in the kernel's page tables hinder each other
        except OSError as e:
            if e.errno == errno.EFAULT:
                raise damaged(self.where, "it ends early or cannot be read") from None
            return None  # no memory, say: not the file's fault, and reading tells

        def check(chunk: int) -> None:
            crc = os.pread(self.fd, 4, self.index[chunk] + size)
            check_chunk(mapped[(chunk - begin) * size :][:size], crc, self.where, chunk)

        self.helpers.run([functools.partial(check, chunk) for chunk in unchecked])
        self._note(unchecked, verify)
        return mapped[wanted.start : wanted.stop]

    def _unchecked(self, first: int, count: int, verify: Verify) -> set[int]:
        """The chunks of rows [first, first + count) that are to be checked now."""
        if verify == "never":
            return set()
        checked = self.checked.get(self.key, 0) if verify == "first_touch" else 0
        chunks = range(first // self.layout.chunk_tokens, -(-(first + count) // self.layout.chunk_tokens))
        return {i for i in chunks if self.index[i] >= 0 and not checked >> i & 1}

    def _note(self, intact: set[int], verify: Verify) -> None:
        if verify == "first_touch" and intact:
            self.checked[self.key] = self.checked.get(self.key, 0) | sum(1 << i for i in intact)

    def _read_and_check(self, reads: list[tuple[int, list[Any]]], checks: list[tuple[Any, ...]]) -> None:
        """`reads`: (offset in the object, buffers); `checks`: (chunk, bytes, crc, wanted part, bytes to skip)."""
        self._read(reads)
        for i, whole, crc, part, skip in checks:
            check_chunk(whole, crc, self.where, i)
            if whole is not part:
                part[:] = whole[skip : skip + len(part)]

    def _append(self, reads: list[tuple[int, list[Any]]], offset: int, buffers: list[Any]) -> None:
        """Add a read, to the last one where at most a checksum and zeros lie between: few calls for a document."""
        if reads and len(reads[-1][1]) < IOV:
            start, last = reads[-1]
            gap = offset - start - sum(map(len, last))
            if 0 <= gap < 4 + PAGE:
                last += [*([np.empty(gap, np.uint8)] if gap else []), *buffers]
                return
        reads.append((offset, buffers))

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
    """One shard object being written: its chunks in any order and from any thread, index and checksums last."""

    def __init__(self, files: Files, path: str, layout: ArrayLayout, used: int):
        """
        Args:
            used: planned rows; chunks wholly behind them are absent.
        """
        self.files, self.path, self.layout, self.used = files, path, layout, used
        count = layout.rows_to_hold(used) // layout.chunk_tokens
        self.crcs = np.zeros(count, "<u4")
        self.parts: dict[int, tuple[np.ndarray, int]] = {}  # chunk -> bytes so far, rows that are still to come
        self.lock = threading.Lock()
        self.out = files.open_parts(path, count * layout.chunk_stride + layout.index_bytes)

    def write(self, first: int, data: np.ndarray) -> None:
        """Whole chunks from number `first` on, contiguous; again where a chunk is to be replaced."""
        size, stride, flat, parts = self.layout.chunk_bytes, self.layout.chunk_stride, _bytes_of(data), []
        for i in range(len(flat) // size):
            chunk = flat[i * size : (i + 1) * size]
            self.crcs[first + i] = crc = crc32c(chunk)
            parts += [chunk, crc.to_bytes(stride - size, "little")]  # the checksum, and zeros behind it
        self.out.write(first * stride, parts)

    def put(self, row: int, data: np.ndarray) -> None:
        """Rows from `row` on that lie in one chunk, which is written when its last rows have come; each row once."""
        c, flat = self.layout.chunk_tokens, _bytes_of(data)
        chunk, at = divmod(row, c)
        with self.lock:
            buffer, left = self.parts.pop(chunk, (None, min(c, self.used - chunk * c)))
            buffer = np.zeros(self.layout.chunk_bytes, np.uint8) if buffer is None else buffer
            buffer[at * self.layout.row_bytes :][: len(flat)] = flat
            left -= len(flat) // self.layout.row_bytes
            if left:
                self.parts[chunk] = buffer, left
        if not left:
            self.write(chunk, buffer)

    def close(self) -> ObjectRecord:
        """Write the index."""
        assert not self.parts
        stride, count = self.layout.chunk_stride, len(self.crcs)
        index = np.full((self.layout.num_chunks, 2), ABSENT, "<u8")
        index[:count, 0] = np.arange(count, dtype=np.uint64) * stride
        index[:count, 1] = self.layout.chunk_bytes + 4
        tail = index.tobytes()
        tail += crc32c(tail).to_bytes(4, "little")
        self.out.write(count * stride, [tail])
        self.out.close()
        return ObjectRecord(count * stride + len(tail), object_digest(self.crcs, tail))

    def abandon(self) -> None:
        """Drop what was written."""
        self.out.abandon()
        self.files.remove(self.path)


def _bytes_of(data: np.ndarray) -> np.ndarray:
    return data.reshape(-1).view(np.uint8)
