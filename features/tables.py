"""The store's tables: the plan it was made with, and what its commits add up to (manifest.json, rejects.parquet)."""

import io
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from features import commits as cm
from features.files import Files
from features.plan import PLAN_SCHEMA, num_shards
from features.spec import FeatureSpec
from infra.errors import StoreError

REJECTS_SCHEMA = pa.schema([("document", pa.string()), ("reason", pa.string()), ("detail", pa.string())])


def read_plan(files: Files) -> pa.Table:
    try:
        return (
            pq.read_table(io.BytesIO(files.read("plan.parquet")), page_checksum_verification=True)
            .cast(PLAN_SCHEMA)
            .combine_chunks()
        )
    except FileNotFoundError:
        raise StoreError(f"{files.uri} has no plan.parquet; restore it or prefill the store again") from None
    except (pa.ArrowException, OSError) as e:
        raise StoreError(
            f"plan.parquet of {files.uri} is not readable ({e}); restore it or prefill the store again"
        ) from None


def write_manifest(files: Files, spec: FeatureSpec, plan: pa.Table, commits: dict[int, cm.Commit]) -> dict[str, Any]:
    """Write manifest.json and rejects.parquet from the commits; returns the summary."""
    rejects = rejects_table(commits)
    committed = plan.filter(pc.is_in(plan["shard"], pa.array(list(commits), pa.int32())))
    stored = committed.filter(pc.invert(pc.is_in(committed["document"], rejects["document"].combine_chunks())))
    reasons = {r["values"]: r["counts"] for r in pc.value_counts(rejects["reason"].combine_chunks()).to_pylist()}
    summary = {
        "fingerprint": spec.fingerprint,
        "complete": len(commits) == num_shards(plan),
        "shards": num_shards(plan),
        "missing": num_shards(plan) - len(commits),
        "documents": len(stored),
        "tokens": pc.sum(stored["length"]).as_py() or 0,
        "rejected": len(rejects),
        "reasons": reasons,
        "bytes": sum(c.bytes for c in commits.values()),
    }
    files.write("rejects.parquet", to_parquet(rejects))
    files.write(
        cm.MANIFEST, cm.manifest_of(commits, num_shards(plan), **{k: v for k, v in summary.items() if k != "shards"})
    )
    return summary


def rejects_table(commits: dict[int, cm.Commit]) -> pa.Table:
    """document, reason, detail of every rejected document."""
    rows = [dict(zip(REJECTS_SCHEMA.names, r, strict=True)) for c in commits.values() for r in c.rejected]
    return pa.Table.from_pylist(rows, schema=REJECTS_SCHEMA)


def to_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()
