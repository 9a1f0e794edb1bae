"""From token ids to features: the target over length-sorted batches, one shard at a time.

Legend: B documents of a batch, S tokens, L taps, D hidden size, V vocabulary, k candidates.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from features.target import Target, load_target
from features.target_config import TargetConfig
from features.teacher import compact_teacher
from features.writer import DocumentFeatures, StoreWriter
from pipeline.pool import Work


@dataclass(frozen=True)
class Document:
    """One planned document: token_ids_S int32, loss_mask_S uint8."""

    document: str
    token_ids_S: np.ndarray
    loss_mask_S: np.ndarray


def batches(documents: list[Document], batch_tokens: int) -> Iterator[list[Document]]:
    """Longest first, each batch as many documents as fit `batch_tokens` with padding; a longer one goes alone.

    The composition depends on the documents alone, so a shard computed again has the same bits.
    """
    waiting = sorted(documents, key=lambda d: (-len(d.token_ids_S), d.document))
    while waiting:
        n = max(batch_tokens // len(waiting[0].token_ids_S), 1)
        yield waiting[:n]
        waiting = waiting[n:]


def features_of(
    target: Target, documents: list[Document], batch_tokens: int, top_k: int = 0
) -> Iterator[DocumentFeatures]:
    """Features of every document, in the order of `batches`.

    When memory runs out the batch is halved and tried again; a single document that does not fit is handed over with
    its error. Hidden states are in the target's dtype, on its device.
    """
    stack = list(batches(documents, batch_tokens))[::-1]
    while stack:
        batch = stack.pop()
        try:
            yield from _batch_features(target, batch, top_k)
            continue
        except (torch.OutOfMemoryError, RuntimeError) as e:
            if not out_of_memory(e):
                raise
        # outside the handler: its traceback would hold the tensors
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(batch) == 1:
            n = len(batch[0].token_ids_S)
            yield DocumentFeatures(batch[0].document, error=f"out of memory for one document of {n} tokens")
        else:
            half = (len(batch) + 1) // 2
            stack += [batch[half:], batch[:half]]


def _batch_features(target: Target, batch: list[Document], top_k: int) -> list[DocumentFeatures]:
    width = max(len(d.token_ids_S) for d in batch)
    ids_BS = torch.zeros(len(batch), width, dtype=torch.long)
    mask_BS = torch.zeros(len(batch), width, dtype=torch.long)
    for row, d in enumerate(batch):
        ids_BS[row, : len(d.token_ids_S)] = torch.from_numpy(d.token_ids_S.astype(np.int64))
        mask_BS[row, : len(d.token_ids_S)] = 1
    ids_BS, mask_BS = ids_BS.to(target.device), mask_BS.to(target.device)
    # Padding is on the right, so causal attention never sees it: without a mask the fast kernels apply.
    out = target.forward(ids_BS, logits="none", taps=True)
    features = []
    for row, d in enumerate(batch):
        n = len(d.token_ids_S)
        logprob_S, topk_ids_Sk, topk_logprobs_Sk = compact_teacher(
            out.last_hidden_BSD[row, :n], target.logits, d.token_ids_S, top_k
        )
        features.append(
            DocumentFeatures(
                d.document,
                d.token_ids_S,
                d.loss_mask_S,
                out.hidden_BSLD[row, :n],
                logprob_S,
                topk_ids_Sk,
                topk_logprobs_Sk,
            )
        )
    return features


def out_of_memory(e: BaseException) -> bool:
    """CUDA's own type, or what torch's CPU allocator says."""
    return isinstance(e, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(e)


def shard_row(writer: StoreWriter, shard: int, rows_of: dict[str, int], documents: pa.Table) -> pa.Table:
    """The task of one shard: its number and its documents, a table of one row.

    Args:
        rows_of: document id -> row of `documents`.
    """
    ids = writer.shard_plan(shard)["document"].to_pylist()
    part = documents.take(pa.array([rows_of[d] for d in ids]))
    return pa.table(
        {
            "shard": pa.array([shard], pa.int32()),
            "document": pa.array([part["document"].to_pylist()], pa.list_(pa.string())),
            "token_ids": _nested(part["token_ids"], pa.int32()),
            "loss_mask": _nested(part["loss_mask"], pa.uint8()),
        }
    )


def _nested(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """A column of lists as one list of lists."""
    lists = column.combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    lists = pa.ListArray.from_arrays(
        pa.array(lists.offsets.to_numpy() - lists.offsets[0].as_py(), pa.int32()), lists.flatten()
    )
    return pa.ListArray.from_arrays(pa.array([0, len(lists)], pa.int32()), lists.cast(pa.list_(kind)))


def documents_of(row: pa.Table) -> list[Document]:
    """The inverse of `shard_row`; copies, since torch wants arrays that it may write to."""
    ids = row["document"][0].as_py()
    tokens, masks = row["token_ids"][0].values, row["loss_mask"][0].values
    return [Document(d, np.array(tokens[i].values), np.array(masks[i].values)) for i, d in enumerate(ids)]


class Prefiller(Work):
    """The actor: holds the target once; one call computes, writes and commits one shard and returns its receipt."""

    def __init__(self, target: dict[str, Any], store_uri: str, batch_tokens: int, top_k: int, threads: int, cwd: str):
        super().__init__(threads, cwd)
        self.target = load_target(TargetConfig.model_validate(target), device=actor_device())
        self.writer = StoreWriter(store_uri)
        self.batch_tokens, self.top_k = batch_tokens, top_k

    def run(self, row: pa.Table) -> pa.Table:
        import ray

        receipt = self.shard(row) | {"node": ray.get_runtime_context().get_node_id()}
        return pa.table({"receipt": [json.dumps(receipt)]})

    def shard(self, row: pa.Table) -> dict[str, Any]:
        """Compute, write, commit; the receipt."""
        features = features_of(self.target, documents_of(row), self.batch_tokens, self.top_k)
        return self.writer.write_shard(row["shard"][0].as_py(), features)


def actor_device() -> str:
    """Of an actor's target: its GPU, or all of its GPUs when `ray.gpus_per_actor` gives it several."""
    if not torch.cuda.is_available():
        return "cpu"
    return "auto" if torch.cuda.device_count() > 1 else "cuda"
