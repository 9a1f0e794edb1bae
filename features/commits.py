"""Commits: the only thing that makes a shard visible.

A writer's attempt at shard 7 goes through these steps, and may be killed before, in, or after any of them:

    1. attempts/00000007-<attempt>-<array>   every array's object, under a name of its own
    2. commits/00000007.json                 put-if-absent, names the attempt and its objects' checksums: the winner
    3. <array>/c/7/...                       the winner's objects move to their Zarr names (`promote`)

Of two writers at once one wins step 2; the other drops its attempt, so no object of it ever stands under a Zarr name.
A winner killed in step 3 is completed by the next writer's `finish`; readers meanwhile find the object under step 1's
name.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from features.files import Files
from features.layout import ArrayLayout, ObjectRecord
from infra.errors import StoreError
from infra.provenance import canonical_json

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Commit:
    """Shard, attempt, objects by array, and the planned documents that were rejected: (id, reason, detail)."""

    shard: int
    attempt: str
    objects: dict[str, ObjectRecord]
    rejected: list[tuple[str, str, str]]
    documents: list[tuple[str, int, int]] = field(default_factory=list)
    """(id, start, length) of each stored document; left out in the manifest, where the plan says it"""
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""

    def to_json(self) -> bytes:
        return canonical_json(asdict(self)).encode()

    @property
    def bytes(self) -> int:
        return sum(o.bytes for o in self.objects.values())


def commit_path(shard: int) -> str:
    return f"commits/{shard:08d}.json"


def attempt_path(shard: int, attempt: str, array: str) -> str:
    return f"attempts/{shard:08d}-{attempt}-{array}"


def read_commit(files: Files, shard: int) -> Commit | None:
    try:
        return _parse(json.loads(files.read(commit_path(shard))))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as e:
        raise StoreError(
            f"commit {commit_path(shard)} of {files.uri} is not readable ({e}); delete that file and prefill again "
            "(only that shard is recomputed)"
        ) from None


def read_commits(files: Files) -> dict[int, Commit]:
    """Shard -> commit: the manifest's, and those written since."""
    commits = read_manifest(files)
    new = [shard for shard in committed_shards(files) if shard not in commits]
    with ThreadPoolExecutor(16) as pool:
        for shard, commit in zip(new, pool.map(lambda s: read_commit(files, s), new), strict=True):
            if commit is not None:
                commits[shard] = commit
    return dict(sorted(commits.items()))


def read_manifest(files: Files) -> dict[int, Commit]:
    """The commits in manifest.json, without their documents; empty when there is no manifest yet."""
    try:
        manifest = json.loads(files.read(MANIFEST))
        return {int(shard): _parse(data | {"shard": int(shard)}) for shard, data in manifest["commits"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as e:
        raise StoreError(
            f"{MANIFEST} of {files.uri} is not readable ({e}); delete it and run `python -m features "
            f"merge-manifest STORE`"
        ) from None


def committed_shards(files: Files) -> list[int]:
    names = (path.rsplit("/", 1)[1] for path in files.list("commits"))
    return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]


def promote(files: Files, layouts: dict[str, ArrayLayout], commit: Commit) -> None:
    """Give the committed attempt's objects their Zarr names. Repeatable; two at once do no harm."""
    for name, layout in layouts.items():
        source, final = attempt_path(commit.shard, commit.attempt, name), layout.key(commit.shard)
        try:
            files.move(source, final)
        except FileNotFoundError:
            continue  # moved before, or lost: readers and `verify` say which


def sweep_attempts(files: Files, layouts: dict[str, ArrayLayout], commits: dict[int, Commit]) -> None:
    """Promote what killed winners left, and delete the losers' attempts at committed shards.

    Attempts at shards without a commit stay: their writers may be alive.
    """
    left: dict[tuple[int, str], list[str]] = {}
    for path in files.list("attempts"):
        shard, attempt, _ = path.removeprefix("attempts/").split("-")
        left.setdefault((int(shard), attempt), []).append(path)
    for (shard, attempt), paths in left.items():
        commit = commits.get(shard)
        if commit is None:
            continue
        if commit.attempt == attempt:
            promote(files, layouts, commit)
        else:
            for path in paths:
                files.remove(path)


def manifest_of(commits: dict[int, Commit], num_shards: int, **summary: Any) -> bytes:
    def compact(c: Commit) -> dict[str, Any]:
        return {
            "attempt": c.attempt,
            "rejected": c.rejected,
            "objects": {n: [o.bytes, o.digest] for n, o in c.objects.items()},
        }

    data = {"shards": num_shards, **summary, "commits": {str(s): compact(c) for s, c in commits.items()}}
    return json.dumps(data, sort_keys=True).encode()


def _parse(data: dict[str, Any]) -> Commit:
    objects = {
        name: ObjectRecord(*o) if isinstance(o, list) else ObjectRecord(o["bytes"], o["digest"])
        for name, o in data["objects"].items()
    }
    return Commit(
        shard=data["shard"],
        attempt=data["attempt"],
        objects=objects,
        rejected=[tuple(r) for r in data["rejected"]],
        documents=[tuple(d) for d in data.get("documents", [])],
        versions=data.get("versions", {}),
        created=data.get("created", ""),
    )
