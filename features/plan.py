"""Documents, their identity, and the plan that puts each into a shard before any prefill. Imports without torch.

    documents (any order)  ->  make_plan  ->  document, shard, start, length, source, split, prompt_length

Equal sets of documents give equal plans on any machine: packing looks only at (length, document id).
"""

import bisect
import hashlib
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.errors import DataError

DOCUMENT_SCHEMA = pa.schema(
    [
        ("document", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("source", pa.string()),
        ("split", pa.string()),
        ("prompt_length", pa.int32()),
    ]
)
PLAN_SCHEMA = pa.schema(
    [
        ("document", pa.string()),
        ("shard", pa.int32()),
        ("start", pa.int32()),
        ("length", pa.int32()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("prompt_length", pa.int32()),
    ]
)


def document_id(token_ids: np.ndarray | list[int], loss_mask: np.ndarray | list[int]) -> str:
    """Content hash (32 hex digits) of what the target reads and what is supervised."""
    tokens = np.ascontiguousarray(token_ids, dtype="<i4")
    mask = np.ascontiguousarray(loss_mask, dtype="u1")
    h = hashlib.sha256(len(tokens).to_bytes(8, "little"))
    h.update(tokens.data)
    h.update(mask.data)
    return h.hexdigest()[:32]


def split_of(content_key: str, heldout_share: float) -> str:
    """`"heldout"` for a share of the keys, decided by the key alone: nothing changes sides when the corpus grows.

    `content_key` should identify the conversation's prompt, so that two answers to one prompt stay together.
    """
    u = int.from_bytes(hashlib.sha256(b"split\0" + content_key.encode()).digest()[:8], "little") / 2**64
    return "heldout" if u < heldout_share else "train"


def corpus_digest(documents: pa.Table) -> str:
    """sha256 (hex) over the sorted distinct document ids: the corpus as a set, whatever its order and duplicates."""
    ids = pc.unique(documents["document"])
    ids = ids.take(pc.sort_indices(ids))
    h = hashlib.sha256()
    for start in range(0, len(ids), 65_536):
        h.update("\n".join(ids.slice(start, 65_536).to_pylist()).encode() + b"\n")
    return h.hexdigest()


def make_plan(documents: pa.Table, shard_tokens: int) -> pa.Table:
    """Assign every distinct document to a shard (PLAN_SCHEMA, sorted by shard and start).

    First-fit decreasing: each shard takes the longest document left that still fits, so only short documents remain for
    the gaps (padding is far below 1 % for mixed lengths; the last shard may be partly empty). Shards hold documents
    of similar length, which suits batched prefill, and are numbered by their smallest document id, so that a
    half-finished store is no biased sample of the corpus.

    Args:
        documents: columns document, source, split, prompt_length and either token_ids or length.
    Raises:
        DataError: no documents, a missing column, an empty document, one longer than a shard, or one id with two
            lengths.
    """
    table = _with_lengths(documents)
    if not len(table):
        raise DataError("the corpus has 0 documents after rendering; check its filters and its loss mask")
    table = table.sort_by([("document", "ascending"), ("source", "ascending"), ("split", "ascending")])
    ids = table["document"].to_pylist()
    lengths = table["length"].to_numpy()
    keep = np.ones(len(ids), dtype=bool)
    keep[1:] = [a != b for a, b in zip(ids, ids[1:], strict=False)]
    if len(lengths) and (lengths[~keep] != lengths[np.flatnonzero(~keep) - 1]).any():
        raise DataError("two documents share one id and differ in length; make ids with features.plan.document_id")
    table = table.filter(pa.array(keep))
    lengths = table["length"].to_numpy()
    if lengths.min() < 1 or lengths.max() > shard_tokens:
        worst = table.slice(int(lengths.argmin() if lengths.min() < 1 else lengths.argmax()), 1).to_pylist()[0]
        raise DataError(
            f"document {worst['document']!r} of {worst['length']} tokens does not fit a shard of {shard_tokens}; "
            "drop empty documents and cut long ones to max_length"
        )
    shard, start = _pack(lengths, shard_tokens)
    columns = {name: table[name] for name in ("document", "length", "source", "split", "prompt_length")}
    columns |= {"shard": pa.array(shard, pa.int32()), "start": pa.array(start, pa.int32())}
    plan = pa.table({name: columns[name] for name in PLAN_SCHEMA.names}).cast(PLAN_SCHEMA)
    return plan.sort_by([("shard", "ascending"), ("start", "ascending")]).combine_chunks()


def num_shards(plan: pa.Table) -> int:
    return int(pc.max(plan["shard"]).as_py()) + 1


def padding_share(plan: pa.Table, shard_tokens: int) -> float:
    """Share of planned rows that hold no token."""
    return 1 - pc.sum(plan["length"]).as_py() / (num_shards(plan) * shard_tokens)


def _pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Shard and start of each document; documents are in id order."""
    # Worked example, capacity 10, lengths [3, 6, 4, 6]: shard a takes 6 (doc 1), then 4 (doc 2); shard b takes
    # 6 (doc 3), then 3 (doc 0). Shard b holds the smallest id and becomes number 0.
    by_length: dict[int, list[int]] = defaultdict(list)
    for i in range(len(lengths) - 1, -1, -1):
        by_length[int(lengths[i])].append(i)  # so that pop() takes the smallest id first
    available = sorted(by_length)  # at most max_length distinct values
    shards: list[list[int]] = []
    while available:
        room, members = capacity, []
        while (at := bisect.bisect_right(available, room)) > 0:
            length = available[at - 1]
            members.append(by_length[length].pop())
            room -= length
            if not by_length[length]:
                available.pop(at - 1)
        shards.append(members)
    shards.sort(key=min)
    shard, start = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int32)
    for number, members in enumerate(shards):
        at = 0
        for i in members:
            shard[i], start[i] = number, at
            at += int(lengths[i])
    return shard, start


def _with_lengths(documents: pa.Table) -> pa.Table:
    need = {"document", "source", "split", "prompt_length"}
    missing = sorted(need - set(documents.column_names))
    if not {"length", "token_ids"} & set(documents.column_names):
        missing.append("token_ids")
    if missing:
        raise DataError(
            f"the documents lack the columns {', '.join(missing)}; give what features.plan.DOCUMENT_SCHEMA lists"
        )
    if "length" in documents.column_names:
        length = documents["length"]
    else:
        length = pc.list_value_length(documents["token_ids"])
    return documents.select(sorted(need)).append_column("length", length.cast(pa.int32()))
