"""The rollout store: one feature store per part of a round, its cycles beside it, and a commit that is written last.

    <run>/rollouts/round-0003/drafter/          the drafter that decoded
    <run>/rollouts/round-0003/part-0001.json    the commit, put-if-absent: names the attempt's files and their digests
    <run>/rollouts/round-0003/part-0001-<attempt>/<target>/<fingerprint12>/   texts and features, as any feature store
    <run>/rollouts/round-0003/part-0001-<attempt>/cycles.parquet              anchors, drafts, accepted lengths, top-k

Of two writers of one part (Ray repeats a task whose actor died) one commits; nobody reads the other's files.
"""

import dataclasses
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from features.files import LocalFiles
from features.plan import DOCUMENT_SCHEMA, corpus_digest, make_plan
from features.reader import FeatureStore
from features.spec import DEFAULT_SHARD_TOKENS, FeatureSpec
from features.target import Target
from features.writer import create_store
from infra.errors import DataError, StoreError
from infra.provenance import canonical_json, sha256_file
from trainer.onpolicy.record import Rollout

CYCLES_SCHEMA = pa.schema(
    [
        ("document", pa.string()),
        ("start", pa.int32()),  # position of the anchor
        ("accepted", pa.int32()),
        ("drafts", pa.list_(pa.int32())),  # b - 1
        ("topk_ids", pa.list_(pa.int32())),  # (b - 1) · T, row by row
        ("topk_logprobs", pa.list_(pa.float32())),
    ]
)


@dataclasses.dataclass
class Part:
    """A committed part: its store, and its cycles by document and start."""

    store: FeatureStore
    cycles: dict[tuple[str, int], dict[str, Any]]
    tau: float
    """tokens per cycle, uncut by the ends of answers"""

    def starts(self, document: str) -> np.ndarray | None:
        return self._starts.get(document)

    def __post_init__(self) -> None:
        found: dict[str, list[int]] = {}
        for document, start in self.cycles:
            found.setdefault(document, []).append(start)
        self._starts = {d: np.array(sorted(s)) for d, s in found.items()}


def commit_path(folder: Path, part: int) -> Path:
    return folder / f"part-{part:04d}.json"


def write_part(
    folder: Path, part: int, rollouts: list[Rollout], target: Target, drafter_digest: str, storage_dtype: str
) -> dict[str, Any]:
    """Write and commit a part; returns the commit that stands, this one or another writer's.

    Raises:
        DataError: nothing was decoded.
    """
    if not rollouts:
        raise DataError(f"part {part} of {folder} decoded no answer of two tokens; check the prompts and stop tokens")
    attempt = folder / f"part-{part:04d}-{uuid.uuid4().hex[:8]}"
    documents = pa.Table.from_pylist(
        [
            {
                "document": r.features.document,
                "token_ids": r.token_ids_S.tolist(),
                "loss_mask": r.loss_mask_S.tolist(),
                "source": "rollout",
                "split": "train",
                "prompt_length": r.prompt_length,
            }
            for r in rollouts
        ],
        schema=DOCUMENT_SCHEMA,
    )
    longest = max(target.config.max_length, *(len(r.token_ids_S) for r in rollouts))
    spec = FeatureSpec(
        target=target.config.name,
        **target.source_identity(),
        chat_template_args=target.config.chat_template_args,
        tap_layer_ids=target.config.tap_layer_ids,
        hidden_size=target.hidden_size,
        storage_dtype=storage_dtype,  # type: ignore[arg-type]
        max_length=longest,
        shard_tokens=max(DEFAULT_SHARD_TOKENS, longest),
        corpus_digest=corpus_digest(documents),
    )
    writer = create_store(str(attempt), spec, make_plan(documents, spec.shard_tokens))
    by_id = {r.features.document: r.features for r in rollouts}
    for shard in writer.missing_shards():
        writer.write_shard(shard, [by_id[d] for d in writer.shard_plan(shard)["document"].to_pylist()])
    writer.finish()
    pq.write_table(_cycles_table(rollouts), attempt / "cycles.parquet")
    accepted = [a for r in rollouts for a in r.accepted]
    commit = {
        "part": part,
        "attempt": attempt.name,
        "store": str(Path(writer.uri).relative_to(attempt)),
        "fingerprint": spec.fingerprint,
        "cycles": sha256_file(attempt / "cycles.parquet"),
        "drafter": drafter_digest,
        "documents": len(rollouts),
        "tau": 1 + float(np.mean(accepted)),
    }
    if not LocalFiles(str(folder)).create(commit_path(folder, part).name, canonical_json(commit).encode()):
        shutil.rmtree(attempt)
    return read_commit(folder, part)


def read_commit(folder: Path, part: int) -> dict[str, Any]:
    return json.loads(commit_path(folder, part).read_text())


def open_part(folder: Path, part: int) -> Part:
    """
    Raises:
        StoreError: the part's files are not what its commit says.
    """
    commit = read_commit(folder, part)
    attempt = folder / commit["attempt"]
    if not (attempt / "cycles.parquet").is_file() or sha256_file(attempt / "cycles.parquet") != commit["cycles"]:
        raise StoreError(
            f"{attempt}/cycles.parquet is not what {commit_path(folder, part)} committed; delete that file to decode "
            "the part again"
        )
    rows = pq.read_table(attempt / "cycles.parquet").to_pylist()
    cycles = {(r["document"], r["start"]): r for r in rows}
    return Part(FeatureStore.open(str(attempt / commit["store"])), cycles, commit["tau"])


def _cycles_table(rollouts: list[Rollout]) -> pa.Table:
    rows = [
        {
            "document": r.features.document,
            "start": c.start,
            "accepted": accepted,
            "drafts": c.drafts,
            "topk_ids": c.topk_ids.flatten().tolist(),
            "topk_logprobs": c.topk_logprobs.astype(np.float32).flatten().tolist(),
        }
        for r in rollouts
        for c, accepted in zip(r.cycles, r.accepted, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=CYCLES_SCHEMA)
