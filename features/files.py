"""The few file operations a store needs, on a local folder and on an object store (`s3:// gs:// az://`).

Paths are relative to the store with `/` between parts. Every write is whole or invisible:
`write` replaces, `create` is put-if-absent, and `open_parts` goes to names that no reader looks at before a commit.
"""

import contextlib
import ctypes
import errno
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from infra.errors import ResourceError, StoreError

PART_BYTES = 16 * 2**20  # of an upload
IOV = 512  # buffers per writev; the kernel's limit is 1024


class Files(Protocol):
    """What LocalFiles and ObjectFiles share."""

    uri: str

    def read(self, path: str) -> bytes: ...  # FileNotFoundError when absent
    def write(self, path: str, data: bytes) -> None: ...
    def create(self, path: str, data: bytes) -> bool: ...  # False when the path exists already
    def open_parts(self, path: str, nbytes: int) -> "Parts": ...  # of `nbytes` in the end
    def list(self, prefix: str) -> list[str]: ...  # every path below the folder, sorted
    def size(self, path: str) -> int | None: ...
    def move(self, source: str, destination: str) -> None: ...  # replaces; FileNotFoundError when absent
    def remove(self, path: str) -> None: ...  # absent is fine


class Parts(Protocol):
    """An object that is written piece by piece, in any order, from any thread."""

    def write(self, offset: int, parts: Sequence[Any]) -> None: ...  # buffers, one after another from `offset` on
    def close(self) -> None: ...
    def abandon(self) -> None: ...


def open_files(uri: str, *, fsync: bool = False) -> "Files":
    """`fsync` applies to local folders."""
    return ObjectFiles(uri) if is_remote(uri) else LocalFiles(uri, fsync=fsync)


def is_remote(uri: str) -> bool:
    """
    Raises:
        StoreError: a scheme that is none of ours.
    """
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)://", uri)
    if not scheme or scheme[1] == "file":
        return False
    if scheme[1] not in ("s3", "gs", "az"):
        raise StoreError(f"store address {uri!r} has the scheme {scheme[1]!r}; use a folder, s3://, gs:// or az://")
    return True


class LocalFiles:
    """A folder. With `fsync`, data reach the disk before the commit that names them; kills never need that."""

    def __init__(self, uri: str, *, fsync: bool = False):
        self.uri, self.fsync = uri, fsync
        self.root = Path(uri.removeprefix("file://")).absolute()

    def local(self, path: str) -> Path:
        return self.root / path

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        aside = self._aside(path, data)
        os.replace(aside, self.root / path)

    def create(self, path: str, data: bytes) -> bool:
        aside = self._aside(path, data)
        try:
            os.link(aside, self.root / path)  # fails when the name exists: put-if-absent, atomically
        except FileExistsError:
            return False
        finally:
            aside.unlink(missing_ok=True)
        if self.fsync:
            _fsync_folder((self.root / path).parent)
        return True

    def open_parts(self, path: str, nbytes: int) -> "LocalParts":
        full = self.root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        return LocalParts(full, nbytes, self.fsync)

    def list(self, prefix: str) -> list[str]:
        def unless_gone(error: OSError) -> None:  # another process may be moving an attempt's objects just now
            if not isinstance(error, FileNotFoundError):
                raise error

        found = []
        for folder, _, names in os.walk(self.root / prefix, onerror=unless_gone):
            below = Path(folder).relative_to(self.root).as_posix()
            found += [f"{below}/{name}".removeprefix("./") for name in names if not name.startswith(".")]
        return sorted(found)

    def size(self, path: str) -> int | None:
        try:
            return (self.root / path).stat().st_size
        except FileNotFoundError:
            return None

    def move(self, source: str, destination: str) -> None:
        full = self.root / destination
        full.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.root / source, full)

    def remove(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)

    def _aside(self, path: str, data: bytes) -> Path:
        full = self.root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        aside = full.with_name(f".{full.name}.{uuid.uuid4().hex[:8]}")
        with open(aside, "wb") as f:
            f.write(data)
            if self.fsync:
                f.flush()
                os.fsync(f.fileno())
        return aside


_obstore_process: dict[str, int] = {}


class ObjectFiles:
    """A prefix of a bucket, through obstore; credentials and endpoint come from the usual environment variables."""

    def __init__(self, uri: str):
        import obstore.store

        # obstore's threads do not live on in a forked child, where its first request would wait for ever.
        if (owner := _obstore_process.setdefault("pid", os.getpid())) != os.getpid():
            raise StoreError(
                f"store {uri} cannot be used in process {os.getpid()}, forked from process {owner} after that one had "
                "used an object store; start such workers with the 'spawn' method"
            )
        self.uri = uri.rstrip("/")
        with self._explained():
            self.store = obstore.store.from_url(self.uri)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Around what touches a store first, where a wrong address or missing credentials show."""
        from obstore.exceptions import BaseError

        try:
            yield
        except BaseError as e:
            reason = " ".join(str(e).split())[:300]
            raise StoreError(
                f"store {self.uri} cannot be reached ({reason}); check the address, the credentials and the endpoint "
                "(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ... as your provider says)"
            ) from None

    def read(self, path: str) -> bytes:
        import obstore

        with self._explained():
            return bytes(obstore.get(self.store, path).bytes())

    def read_ranges(self, path: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Any]:
        import obstore

        return obstore.get_ranges(self.store, path, starts=starts, ends=ends)

    def read_suffix(self, path: str, nbytes: int) -> tuple[bytes, int]:
        """The last bytes of an object and its size, in one request."""
        import obstore

        found = obstore.get(self.store, path, options={"range": {"suffix": nbytes}})
        return bytes(found.bytes()), found.meta["size"]

    def write(self, path: str, data: bytes) -> None:
        import obstore

        obstore.put(self.store, path, data)

    def create(self, path: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._explained():
            try:
                obstore.put(self.store, path, data, mode="create", use_multipart=False)  # If-None-Match: *
            except AlreadyExistsError:
                return False
        return True

    def open_parts(self, path: str, nbytes: int) -> "ObjectParts":
        return ObjectParts(self, path, nbytes)

    def list(self, prefix: str) -> list[str]:
        import obstore

        pages = obstore.list(self.store, prefix.rstrip("/") + "/")
        return sorted(meta["path"] for page in pages for meta in page)

    def size(self, path: str) -> int | None:
        import obstore

        try:
            return obstore.head(self.store, path)["size"]
        except FileNotFoundError:
            return None

    def move(self, source: str, destination: str) -> None:
        import obstore

        obstore.copy(self.store, source, destination)
        obstore.delete(self.store, source)

    def remove(self, path: str) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self.store, path)


class LocalParts:
    """A new file; a reader that finds it before `close` finds a part of it."""

    def __init__(self, path: Path, nbytes: int, fsync: bool):
        self.fsync = fsync
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _reserve(self.fd, nbytes, path)
        except ResourceError:
            path.unlink()
            raise

    def write(self, offset: int, parts: Sequence[Any]) -> None:
        views = [memoryview(p).cast("B") for p in parts]
        for i in range(0, len(views), IOV):
            group = views[i : i + IOV]
            while group:
                written = os.pwritev(self.fd, group, offset)
                offset += written
                while group and written >= group[0].nbytes:
                    written -= group.pop(0).nbytes
                if written:
                    group[0] = group[0][written:]

    def close(self) -> None:
        if self.fsync:
            os.fsync(self.fd)
        self.abandon()

    def abandon(self, close: Callable[[int], None] = os.close) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close(fd)

    __del__ = abandon


class ObjectParts:
    """Held in memory until `close` sends it: one PUT when it is small, otherwise parts of it at once."""

    def __init__(self, files: ObjectFiles, path: str, nbytes: int):
        self.files, self.path, self.data = files, path, np.zeros(nbytes, np.uint8)

    def write(self, offset: int, parts: Sequence[Any]) -> None:
        for part in parts:
            flat = np.frombuffer(part, np.uint8)
            self.data[offset : offset + len(flat)] = flat
            offset += len(flat)

    def close(self) -> None:
        import obstore

        obstore.put(self.files.store, self.path, memoryview(self.data), chunk_size=PART_BYTES)

    def abandon(self) -> None:
        self.data = np.empty(0, np.uint8)


def _libc_fallocate() -> Callable[[int, int, int, int], int] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError, TypeError):  # no Linux
        return None
    call.argtypes, call.restype = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64], ctypes.c_int
    return call


_fallocate = _libc_fallocate()


def _reserve(fd: int, nbytes: int, path: Path) -> None:
    """Room on the disk for all of a file at once, where the file system can (ext4, xfs, btrfs, tmpfs): writes then
    need not look for it page by page, which saves a quarter of their time on ext4, and a full disk shows here.

    Not `os.posix_fallocate`: on the other file systems that one writes zeros.

    Raises:
        ResourceError: no room on the disk or in the quota.
    """
    if nbytes and _fallocate is not None and _fallocate(fd, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ResourceError(
                f"no room for the {nbytes / 1e6:,.0f} MB of {path} ({os.strerror(code)}); make room there, choose "
                "another store_root, or store fewer bits (storage_dtype = 'fp8_e4m3')"
            )


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
