"""Recompute every checksum of a store, name what is bad, and drop it so that the next run recomputes only that.

bad = verify_store(uri)          # [] when all is well
repair(uri, bad)                 # the bad shards' commits go; `create_store` then finds those shards missing
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from features import commits as cm
from features.files import Files, LocalFiles, ObjectFiles, open_files
from features.layout import ArrayLayout, array_layouts, decode_index, object_digest
from features.plan import corpus_digest, num_shards
from features.spec import FeatureSpec, no_store, parse_spec
from features.tables import read_plan, write_manifest
from features.threads import crc32c
from features.writer import array_metadata
from infra.errors import StoreError
from infra.progress import Progress

READ_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Bad:
    """One thing that is wrong: the shard (None when it is the store's own file), its path, and how."""

    shard: int | None
    path: str
    problem: str


def verify_store(uri: str, *, progress: bool = False, threads: int = 4) -> list[Bad]:
    """Check spec, plan, array metadata, and each committed object: there, of its size, every chunk intact, and the very
    object that its commit names.

    Raises:
        StoreError: no store there, or one whose spec or plan cannot be read.
    """
    files = open_files(uri)
    spec, plan, bad = _head(files)
    layouts = array_layouts(spec)
    commits, unreadable = _commits(files)
    bad += unreadable
    for shard, commit in commits.items():
        bad += _check_plan(commit, plan, shard)
    jobs = [(commit, layout) for commit in commits.values() for layout in layouts.values()]
    total = sum(c.objects[a.name].bytes for c, a in jobs if a.name in c.objects)
    with Progress(total / 1e6, "verify", "MB", enabled=progress) as bar, ThreadPoolExecutor(threads) as pool:
        checks = pool.map(lambda job: _check_object(files, *job), jobs)
        for (commit, layout), found in zip(jobs, checks, strict=True):
            if found is not None:
                bad.append(found)
            record = commit.objects.get(layout.name)
            bar.update(record.bytes / 1e6 if record else 0, bad=len(bad))
    return sorted(bad, key=lambda b: (-1 if b.shard is None else b.shard, b.path))


def repair(uri: str, bad: list[Bad]) -> list[int]:
    """Drop the commits and objects of the bad shards and rewrite damaged array metadata and the manifest.

    Returns:
        the shards that a next run has to compute.
    Raises:
        StoreError: spec.json or plan.parquet is bad, which nothing here can restore.
    """
    files = open_files(uri)
    for b in bad:
        if b.shard is None and b.path in ("spec.json", "plan.parquet"):
            raise StoreError(
                f"{b.path} of {uri} is damaged ({b.problem}); restore it from a copy, or prefill a new store"
            )
    spec, plan, _ = _head(files)
    layouts = array_layouts(spec)
    for path, data in array_metadata(spec, num_shards(plan)).items():
        files.write(path, data)
    shards = sorted({b.shard for b in bad if b.shard is not None})
    commits, _ = _commits(files)
    # The manifest first: as long as the commit stands, a kill in between leaves the shard bad but still reported.
    kept = {s: c for s, c in commits.items() if s not in shards}
    write_manifest(files, spec, plan, kept)
    for shard in shards:
        files.remove(cm.commit_path(shard))
        if shard in commits:
            for name in layouts:
                files.remove(cm.attempt_path(shard, commits[shard].attempt, name))
        for layout in layouts.values():
            files.remove(layout.key(shard))
    return shards


def _head(files: Files) -> tuple[FeatureSpec, pa.Table, list[Bad]]:
    bad = []
    try:
        spec = parse_spec(files.read("spec.json"), files.uri)
    except FileNotFoundError:
        raise no_store(files.uri) from None
    if files.uri.rstrip("/").rsplit("/", 1)[-1] != spec.fingerprint12:
        bad.append(Bad(None, "spec.json", f"its fingerprint is {spec.fingerprint12}, not the folder's name"))
    plan = read_plan(files)
    if corpus_digest(plan) != spec.corpus_digest:
        bad.append(Bad(None, "plan.parquet", "its documents are not those of the spec's corpus_digest"))
    for path, data in array_metadata(spec, num_shards(plan)).items():
        try:
            if files.read(path) != data:
                bad.append(Bad(None, path, "it differs from what the spec prescribes"))
        except FileNotFoundError:
            bad.append(Bad(None, path, "it is gone"))
    return spec, plan, bad


def _commits(files: Files) -> tuple[dict[int, cm.Commit], list[Bad]]:
    """Every commit that can be read, with the manifest as a second copy, and the unreadable ones."""
    bad: list[Bad] = []
    commits: dict[int, cm.Commit] = {}
    try:
        commits = cm.read_manifest(files)
    except StoreError as e:
        bad.append(Bad(None, cm.MANIFEST, str(e)))
    for shard in cm.committed_shards(files):
        try:
            commit = cm.read_commit(files, shard)
        except StoreError as e:
            bad.append(Bad(shard, cm.commit_path(shard), str(e)))
            commits.pop(shard, None)
            continue
        if commit is not None:
            commits[shard] = commit
    return dict(sorted(commits.items())), bad


def _check_plan(commit: cm.Commit, plan: pa.Table, shard: int) -> Iterator[Bad]:
    path = cm.commit_path(shard)
    if shard != commit.shard or not 0 <= shard < num_shards(plan):
        yield Bad(shard, path, f"it names shard {commit.shard}")
        return
    if not commit.documents and not commit.rejected:
        return  # known from the manifest only
    shards = plan["shard"].to_numpy()
    a, b = np.searchsorted(shards, [shard, shard + 1])
    rows = plan.slice(int(a), int(b - a)).select(["document", "start", "length"]).to_pylist()
    gone = {r[0] for r in commit.rejected}
    planned = [tuple(r.values()) for r in rows if r["document"] not in gone]
    if commit.documents and planned != commit.documents:
        yield Bad(shard, path, "its documents are not those of plan.parquet")


def _check_object(files: Files, commit: cm.Commit, layout: ArrayLayout) -> Bad | None:
    final, record = layout.key(commit.shard), commit.objects.get(layout.name)
    if record is None:
        return Bad(commit.shard, cm.commit_path(commit.shard), f"it lacks the array {layout.name}")
    waiting = cm.attempt_path(
        commit.shard, commit.attempt, layout.name
    )  # committed and not yet moved: intact all the same
    for path in (final, waiting, final):
        if (size := files.size(path)) is not None:
            break
    else:
        return Bad(commit.shard, final, "the object is gone")
    if size != record.bytes:
        return Bad(commit.shard, path, f"it has {size} bytes and its commit says {record.bytes}")
    try:
        return _check_bytes(files, path, size, commit.shard, layout, record.digest)
    except FileNotFoundError:
        return Bad(commit.shard, path, "the object is gone")


def _check_bytes(files: Files, path: str, size: int, shard: int, layout: ArrayLayout, digest: str) -> Bad | None:
    tail = b"".join(_blocks(files, path, size - layout.index_bytes, size))
    try:
        index = decode_index(layout, tail, size, path)
    except StoreError as e:
        return Bad(shard, path, str(e).partition(": ")[2].partition(";")[0])
    chunks = [i for i in range(layout.num_chunks) if index[i, 0] >= 0]
    crcs = np.empty(len(chunks), "<u4")
    per_read = max(1, READ_BYTES // layout.chunk_stride)
    for g in range(0, len(chunks), per_read):
        group = chunks[g : g + per_read]
        first, last = int(index[group, 0].min()), int(index[group].sum(1).max()) + 4
        data = np.frombuffer(b"".join(_blocks(files, path, first, last)), np.uint8)
        for n, i in enumerate(group, start=g):
            at = int(index[i, 0]) - first
            crcs[n] = crc32c(data[at : at + layout.chunk_bytes])
            if crcs[n] != int.from_bytes(data[at + layout.chunk_bytes :][:4].tobytes(), "little"):
                return Bad(shard, path, f"chunk {i} does not match its checksum")
    if object_digest(crcs, tail) != digest:
        return Bad(shard, path, "it is intact but is not the object that its commit names")
    return None


def _blocks(files: Files, path: str, start: int, end: int) -> Iterator[bytes]:
    if isinstance(files, LocalFiles):
        with open(files.local(path), "rb") as f:
            f.seek(start)
            yield f.read(end - start)
    else:
        assert isinstance(files, ObjectFiles)
        yield bytes(files.read_ranges(path, [start], [end])[0])
