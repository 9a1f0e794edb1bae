"""From token ids to features: the target over length-sorted batches, one shard at a time.

Legend: B documents of a batch, S tokens, L taps, D hidden size, V vocabulary, k candidates.
"""

import json
import queue
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from features.document import DocumentFeatures
from features.target import Target, load_target
from features.target_config import TargetConfig
from features.teacher import compact_teacher
from features.writer import StoreWriter
from pipeline.pool import Work

GPU_BATCH_TOKENS, CPU_BATCH_TOKENS = 8_192, 1_024


@dataclass(frozen=True)
class Document:
    """One planned document: token_ids_S int32, loss_mask_S uint8."""

    document: str
    token_ids_S: np.ndarray
    loss_mask_S: np.ndarray


def batches(documents: list[Document], batch_tokens: int) -> Iterator[list[Document]]:
    """Longest first, each batch as many documents as fit `batch_tokens` with padding; a longer one goes alone.

    A batch that holds a quarter of `batch_tokens` takes none that would be padded by a third or more of its length.
    The composition depends on the documents alone, so a shard computed again has the same bits.
    """
    waiting = sorted(documents, key=lambda d: (-len(d.token_ids_S), d.document))
    while waiting:
        width = len(waiting[0].token_ids_S)
        # Example, 1,024 tokens, lengths 200, 190, 180, 140, 90: the fourth would be padded by 60 of its 140 tokens.
        n, most = 1, min(batch_tokens // width, len(waiting))
        while n < most and (4 * n * width < batch_tokens or 4 * len(waiting[n].token_ids_S) > 3 * width):
            n += 1
        yield waiting[:n]
        waiting = waiting[n:]


def features_of(
    target: Target, documents: list[Document], batch_tokens: int | None = None, top_k: int = 0
) -> Iterator[DocumentFeatures]:
    """Features of every document, in the order of `batches`; hidden states in the target's dtype, on its device.

    On a CPU as many batches are computed at once as torch has threads, each by one thread. One batch by all threads
    leaves them waiting for each other at each of some 20 operations per layer, most of them too small to share. So
    the bits do not depend on the number of threads, and at most that many batches and one more are held.

    When memory runs out a batch is halved and tried again; a single document that does not fit is handed over with its
    error.

    Args:
        batch_tokens: None takes `default_batch_tokens`.
    """
    todo = list(batches(documents, batch_tokens or default_batch_tokens(target)))
    threads = min(torch.get_num_threads(), len(todo)) if _on_one_cpu(target) else 1
    if threads == 1:
        for batch in todo:
            yield from _halving_features(target, batch, top_k)
        return
    free: queue.SimpleQueue[Target] = queue.SimpleQueue()
    for replica in (target, *(target.replica() for _ in range(threads - 1))):
        free.put(replica)

    def compute(batch: list[Document]) -> list[DocumentFeatures]:
        torch.set_num_threads(1)
        replica = free.get()
        try:
            return list(_halving_features(replica, batch, top_k))
        finally:
            free.put(replica)

    before, waiting = torch.get_num_threads(), deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefill")
    try:
        for batch in todo:
            waiting.append(pool.submit(compute, batch))
            if len(waiting) > threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def default_batch_tokens(target: Target) -> int:
    """What `prefill.batch_tokens = None` means: enough to fill a GPU. On a CPU a matrix product of 256 rows is as fast
    as any, and the operations between the products (SmolLM2: 7 % of the time at 288 tokens, 16 % at 8,192) find
    small batches in the cache."""
    return CPU_BATCH_TOKENS if target.device.type == "cpu" else GPU_BATCH_TOKENS


def _on_one_cpu(target: Target) -> bool:
    """All weights in this machine's memory, and none that come and go with a device map's hooks."""
    return target.device.type == "cpu" and not hasattr(target.model, "hf_device_map")


def _halving_features(target: Target, batch: list[Document], top_k: int) -> Iterator[DocumentFeatures]:
    stack = [batch]
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
    teacher = compact_teacher(
        out.last_hidden_BSD, target.logits, [d.token_ids_S for d in batch], [d.loss_mask_S for d in batch], top_k
    )
    return [
        DocumentFeatures(d.document, d.token_ids_S, d.loss_mask_S, hidden_SLD[: len(d.token_ids_S)], *told)
        for d, hidden_SLD, told in zip(batch, out.hidden_BSLD, teacher, strict=True)
    ]


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

    def __init__(
        self,
        target: dict[str, Any],
        store_uri: str,
        batch_tokens: int | None,
        top_k: int,
        threads: int,
        cwd: str,
    ):
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
