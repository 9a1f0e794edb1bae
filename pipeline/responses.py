"""The answers written so far: a folder of Parquet parts, keyed by the digest of the turns before the answer.

    data/<target>/responses-<digest12>/
      identity.json        what decided the answers: weights, template, sampling
      part-<digest>.parquet  key, text, token_ids, finish_reason, repetition; written aside, then renamed

Corpora share the folder, so a larger corpus asks only for what the smaller one had not asked.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import DataError
from infra.provenance import canonical_json, sha256_hex, write_json

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("repetition", pa.float32()),
    ]
)
REPETITIVE = 0.5  # share of repeated 4-grams above which an answer counts as repetitive


class Responses:
    """All parts in memory as Arrow tables (about 5 bytes a token), with an index by key."""

    def __init__(self, parent: Path, identity: dict[str, Any]):
        self.folder = parent / f"responses-{sha256_hex(canonical_json(identity))[:12]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "identity.json", identity)
        self._tables: list[pa.Table] = []
        self._where: dict[str, tuple[int, int]] = {}
        for path in sorted(self.folder.glob("part-*.parquet")):
            try:
                self._index(pq.read_table(path, schema=SCHEMA))
            except (pa.ArrowException, OSError) as e:
                raise DataError(
                    f"{path} is not readable ({e}); delete it, and its answers are asked for again"
                ) from None

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def __getitem__(self, key: str) -> dict[str, Any]:
        table, row = self._where[key]
        return self._tables[table].slice(row, 1).to_pylist()[0]

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Keep these answers: after return they survive any kill."""
        table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
        if not len(table):
            return
        name = sha256_hex(canonical_json(sorted(table["key"].to_pylist())))[:16]
        aside = self.folder / f".{name}.{os.getpid()}"
        pq.write_table(table, aside, compression="zstd")
        aside.replace(self.folder / f"part-{name}.parquet")
        self._index(table)

    def _index(self, table: pa.Table) -> None:
        for row, key in enumerate(table["key"].to_pylist()):
            self._where.setdefault(key, (len(self._tables), row))
        self._tables.append(table.combine_chunks())


def repetition(token_ids: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the answer: 0 for a text without repeats, near 1 for a loop."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def statistics(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts by finish reason, and the shares of truncated and of repetitive answers."""
    reasons: dict[str, int] = {}
    total = repetitive = tokens = 0
    for r in rows:
        reasons[r["finish_reason"]] = reasons.get(r["finish_reason"], 0) + 1
        repetitive += r["repetition"] > REPETITIVE
        tokens += len(r["token_ids"] or ())
        total += 1
    return {
        "answers": total,
        "tokens": tokens,
        "finish_reasons": dict(sorted(reasons.items())),
        "truncated_share": reasons.get("length", 0) / total if total else 0.0,
        "repetitive_share": repetitive / total if total else 0.0,
    }


def load_json(path: Path) -> Any:
    """The content, or None where there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
