"""The whole way from a corpus to a finished store; every step finds its finished work again.

result = build_features(resolve("smollm2-135m", "demo"))
store = FeatureStore.open(result.store_path)
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from features.estimate import check_room, estimate, show_bytes
from features.plan import corpus_digest, make_plan
from features.spec import FeatureSpec, store_path
from features.writer import StoreWriter, create_store
from infra.progress import Progress, duration
from infra.provenance import write_json
from pipeline.config import FeaturesConfig
from pipeline.documents import build_documents
from pipeline.front import TargetFront
from pipeline.pool import ray_for_this_run, run_until_done
from pipeline.prefill import Prefiller, shard_row
from pipeline.responses import load_json


@dataclass(frozen=True)
class FeaturesResult:
    """What `build_features` leaves behind.

    Attributes:
        store_path: the store's folder or address. complete: every planned shard is committed.
        counts: documents, tokens, rejects, shards, and `computed_shards` of this run.
        answers: share of truncated and repetitive answers, finish reasons (empty where the corpus's answers were kept).
        throughput: prefill tokens/s of this run over all actors; None when nothing was computed.
        tokens_by_node: Ray's node id -> tokens computed there in this run.
    """

    store_path: str
    work_folder: str
    fingerprint: str
    complete: bool
    counts: dict[str, Any]
    answers: dict[str, Any]
    bytes: int
    throughput: float | None
    seconds: float
    tokens_by_node: dict[str, int]


def build_features(cfg: FeaturesConfig) -> FeaturesResult:
    """Regenerate, render, plan, prefill; a second call computes nothing.

    Raises:
        FlashdraftError: see the steps; what is finished is kept, and the same call goes on from there.
    """
    if cfg.ray.address.startswith("ray://"):
        from pipeline.client import build_on_cluster

        return build_on_cluster(cfg)
    with ray_for_this_run():
        return _build(cfg, time.monotonic())


def _build(cfg: FeaturesConfig, began: float) -> FeaturesResult:
    front = TargetFront(cfg.target)
    documents, record = build_documents(cfg, front)
    plan = make_plan(documents, cfg.prefill.shard_tokens)
    spec = feature_spec(cfg, front, documents)
    root = cfg.store_root if "://" in cfg.store_root else str(Path(cfg.store_root).absolute())
    uri = store_path(root, cfg.target.name, spec)
    rate = (load_json(cfg.work_folder.parent / "prefill_rate.json") or {}).get("tokens_per_second")
    guess = estimate(spec, plan, rate)
    hours = duration(3600 * guess.hours) if guess.hours is not None else "unknown before the first prefill"
    say(
        f"{guess.documents:,} documents · {guess.tokens:,} tokens · {guess.shards:,} shards · "
        f"{show_bytes(guess.bytes[spec.storage_dtype])} in {spec.storage_dtype} "
        f"({show_bytes(guess.bytes['fp8_e4m3'])} in fp8) · prefill {hours} · {uri}"
    )
    if cfg.dry:
        check_room(uri, spec, plan, max_bytes=cfg.prefill.max_bytes)
        return _result(cfg, spec, uri, record, {"complete": False, "bytes": 0}, 0, None, began)
    check_room(uri, spec, plan, max_bytes=cfg.prefill.max_bytes, missing=_missing_if_there(uri))
    writer = create_store(root, spec, plan)
    computed, tokens, seconds = 0, 0, 0.0
    by_node: dict[str, int] = {}
    for receipt, elapsed in prefill(cfg, writer, documents, guess.tokens):
        seconds = elapsed
        computed += 1
        tokens += receipt["tokens"]
        by_node[receipt["node"]] = by_node.get(receipt["node"], 0) + receipt["tokens"]
    throughput = tokens / seconds if tokens else None
    if throughput:
        write_json(cfg.work_folder.parent / "prefill_rate.json", {"tokens_per_second": throughput})
    summary = writer.finish()
    result = _result(cfg, spec, writer.uri, record, summary, computed, throughput, began, by_node)
    write_json(cfg.work_folder / "features.json", asdict(result))
    return result


def prefill(
    cfg: FeaturesConfig, writer: StoreWriter, documents: pa.Table, total_tokens: int
) -> Iterator[tuple[dict[str, Any], float]]:
    """(receipt, seconds since the first task was handed out) of each missing shard as it is committed."""
    missing = writer.missing_shards()
    if not missing:
        return
    rows_of = {d: i for i, d in enumerate(documents["document"].to_pylist())}
    arguments = {
        "target": cfg.target.model_dump(mode="json"),
        "store_uri": writer.uri,
        "batch_tokens": cfg.prefill.batch_tokens,
        "top_k": cfg.prefill.top_k,
    }
    lengths = pc.sum(
        writer.plan.filter(pc.is_in(writer.plan["shard"], pa.array(missing, pa.int32())))["length"]
    ).as_py()
    done = {"documents": 0, "bytes": 0, "rejects": 0}
    with Progress(total_tokens, "prefill", "tokens", start=total_tokens - lengths) as progress:
        tasks = lambda: [shard_row(writer, s, rows_of, documents) for s in writer.missing_shards()]  # noqa: E731
        for table in run_until_done(tasks, Prefiller, arguments, cfg.ray):
            for text in table["receipt"].to_pylist():
                receipt = json.loads(text)
                done["documents"] += receipt["documents"]
                done["bytes"] += receipt["bytes"]
                done["rejects"] += receipt["rejected"]
                progress.update(
                    receipt["tokens"],
                    documents=done["documents"],
                    stored=show_bytes(done["bytes"]),
                    rejects=done["rejects"],
                )
                yield receipt, time.monotonic() - progress.began


def feature_spec(cfg: FeaturesConfig, front: TargetFront, documents: pa.Table) -> FeatureSpec:
    """The spec under which the features of these documents are stored."""
    return FeatureSpec(
        target=cfg.target.name,
        **front.source_identity(),
        chat_template_args=cfg.target.chat_template_args,
        tap_layer_ids=cfg.target.tap_layer_ids,
        hidden_size=front.hidden_size,
        storage_dtype=cfg.prefill.storage_dtype,
        max_length=cfg.target.max_length,
        corpus_digest=corpus_digest(documents),
        shard_tokens=cfg.prefill.shard_tokens,
        top_k=cfg.prefill.top_k,
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _missing_if_there(uri: str) -> list[int] | None:
    from infra.errors import StoreError

    try:
        return StoreWriter(uri).missing_shards()
    except StoreError:
        return None


def _result(
    cfg: FeaturesConfig,
    spec: FeatureSpec,
    uri: str,
    record: dict[str, Any],
    summary: dict[str, Any],
    computed: int,
    throughput: float | None,
    began: float,
    by_node: dict[str, int] | None = None,
) -> FeaturesResult:
    counts = record["counts"] | {
        "stored_documents": summary.get("documents", 0),
        "stored_tokens": summary.get("tokens", 0),
        "store_rejects": summary.get("rejected", 0),
        "shards": summary.get("shards", 0),
        "computed_shards": computed,
    }
    return FeaturesResult(
        uri,
        str(cfg.work_folder),
        spec.fingerprint,
        summary["complete"],
        counts,
        record["answers"],
        summary["bytes"],
        throughput,
        time.monotonic() - began,
        by_node or {},
    )
