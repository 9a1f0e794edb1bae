"""The arrays of a store as Zarr v3: their metadata, and the bytes of one shard object.

A shard object without a compressor is plain (Zarr v3 specification, `sharding_indexed` codec with `bytes` and
`crc32c`):

    chunk 0 | crc32c | 0s | chunk 1 | crc32c | 0s | ... | index | crc32c of the index

The index has (offset u64, nbytes u64) per chunk. The zeros let every large chunk begin at a page (0.6 % of its bytes),
so that readers can map a document's chunks to one piece of memory (features/mapping.py), and every small one at a
multiple of 64 bytes: the kernel copies from and to such addresses a fifth faster than where the four bytes of each
checksum add up. A chunk that was never written has offset = nbytes = 2^64 - 1 and reads as zeros. Writers here leave
out chunks that lie wholly behind the last planned document. Readers go by the index and assume neither an order nor an
alignment.

Legend: N tokens of the whole store, S tokens of a shard, c tokens of a chunk, L taps, D hidden size, k teacher
candidates.
"""

import functools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from features.spec import FeatureSpec
from features.threads import crc32c
from infra.errors import StoreError
from infra.provenance import sha256_hex

CHUNK_BYTES = 1024 * 1024
"""upper bound of an inner chunk of the wide arrays: small enough for the cache (a chunk is checked where it was just
read) and for prefix reads over S3, large enough that Python's work per chunk (~10 us) disappears"""
ALIGNMENT = 64
"""bytes; a cache line. Where chunks begin"""
PAGE = 4096
"""bytes; where chunks of PAGED_BYTES and more begin"""
PAGED_BYTES = 256 * 1024
"""hidden states have such chunks; candidates (2 kB at D = 4096) would take three times their space"""
ABSENT = 2**64 - 1
HIDDEN_BITS = {"bf16": "<u2", "fp8_e4m3": "|u1", "fp32": "<u4"}
LOGICAL = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp32": "float32"}
_ZARR_TYPES = {"<u2": "uint16", "|u1": "uint8", "<u4": "uint32", "<i4": "int32", "<f4": "float32", "<f2": "float16"}
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


@dataclass(frozen=True)
class ArrayLayout:
    """One array: (N, *trailing) of `dtype`, chunks of `chunk_tokens` rows inside shards of `shard_tokens` rows."""

    name: str
    dtype: str
    trailing: tuple[int, ...]
    shard_tokens: int
    chunk_tokens: int
    meaning: str
    logical: str = ""

    @functools.cached_property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * int(np.prod(self.trailing, dtype=np.int64))

    @functools.cached_property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.row_bytes

    @functools.cached_property
    def chunk_stride(self) -> int:
        """Bytes from one chunk of a written object to the next: the chunk, its checksum, and zeros."""
        unit = PAGE if self.chunk_bytes >= PAGED_BYTES else ALIGNMENT
        return -(-(self.chunk_bytes + 4) // unit) * unit

    @property
    def num_chunks(self) -> int:
        return self.shard_tokens // self.chunk_tokens

    @property
    def index_bytes(self) -> int:
        return 16 * self.num_chunks + 4

    def key(self, shard: int) -> str:
        """Path of the shard object inside the store."""
        return f"{self.name}/c/{shard}" + "/0" * len(self.trailing)

    def rows_to_hold(self, used: int) -> int:
        """`used` rows rounded up to whole chunks."""
        return -(-used // self.chunk_tokens) * self.chunk_tokens

    def metadata(self, num_shards: int, attributes: dict[str, Any]) -> bytes:
        """The array's zarr.json."""
        attributes = attributes | {"meaning": self.meaning} | ({"logical_dtype": self.logical} if self.logical else {})
        names = (
            ("token", "tap", "hidden") if self.name == "hidden" else ("token", "tap" if self.name == "scale" else "k")
        )
        meta = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [num_shards * self.shard_tokens, *self.trailing],
            "data_type": _ZARR_TYPES[self.dtype],
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [self.shard_tokens, *self.trailing]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0.0 if self.dtype.startswith("<f") else 0,
            "codecs": self.codecs(),
            "dimension_names": list(names[: 1 + len(self.trailing)]),
            "attributes": attributes,
        }
        return json.dumps(meta, indent=2).encode()

    def codecs(self) -> list[dict[str, Any]]:
        configuration = {
            "chunk_shape": [self.chunk_tokens, *self.trailing],
            "codecs": _CODECS,
            "index_codecs": _CODECS,
            "index_location": "end",
        }
        return [{"name": "sharding_indexed", "configuration": configuration}]


def array_layouts(spec: FeatureSpec) -> dict[str, ArrayLayout]:
    """Name -> layout, `hidden` first."""
    S, L, D, k = spec.shard_tokens, spec.num_taps, spec.hidden_size, spec.top_k
    wide = _chunk_tokens(S, L * D * np.dtype(HIDDEN_BITS[spec.storage_dtype]).itemsize)
    arrays = [
        ArrayLayout(
            *("hidden", HIDDEN_BITS[spec.storage_dtype], (L, D), S, wide),
            "bits of the outputs of the tapped decoder layers, before the final norm",
            LOGICAL[spec.storage_dtype],
        )
    ]
    if spec.storage_dtype == "fp8_e4m3":
        arrays.append(ArrayLayout("scale", "<f4", (L,), S, wide, "hidden state = scale * float8 value; powers of two"))
    arrays += [
        ArrayLayout("token_ids", "<i4", (), S, S, "what the target read"),
        ArrayLayout("loss_mask", "|u1", (), S, S, "1 where the token is supervised"),
        ArrayLayout("target_logprob", "<f4", (), S, S, "log p(token_t | tokens before t) where supervised"),
    ]
    if k:
        arrays += [
            ArrayLayout("topk_ids", "<i4", (k,), S, wide, "candidates of the target for token t, most likely first"),
            ArrayLayout("topk_logprobs", "<f2", (k,), S, wide, "log p of the candidates given the tokens before t"),
        ]
    return {a.name: a for a in arrays}


def _chunk_tokens(shard_tokens: int, row_bytes: int) -> int:
    """The largest power of two that divides the shard and keeps a chunk within CHUNK_BYTES.

    D = 4096, 5 taps, bf16: 40,960 B per row -> 16 rows (655 KB); D = 1024: 64 rows.
    """
    c = 1
    while shard_tokens % (2 * c) == 0 and 2 * c * row_bytes <= CHUNK_BYTES:
        c *= 2
    return c


@dataclass(frozen=True)
class ObjectRecord:
    """What a commit keeps of one shard object: its size in bytes and the digest of its chunk checksums and index."""

    bytes: int
    digest: str


def object_digest(crcs: np.ndarray, tail: bytes) -> str:
    """Digest of an object from its chunk checksums and its index: as strong as they are, and free of a second pass."""
    return sha256_hex(np.ascontiguousarray(crcs, "<u4").tobytes() + tail)[:32]


def decode_index(layout: ArrayLayout, tail: bytes, object_bytes: int, where: str) -> np.ndarray:
    """(chunks, 2) int64 of offset and nbytes without the checksum's four; (-1, -1) for an absent chunk.

    Raises:
        StoreError: the index is damaged or points outside the object.
    """
    stored = int.from_bytes(tail[-4:], "little")
    if len(tail) != layout.index_bytes or crc32c(tail[:-4]) != stored:
        raise damaged(where, "its chunk index does not match its checksum")
    raw = np.frombuffer(tail, "<u8", count=2 * layout.num_chunks).reshape(-1, 2)
    absent = raw[:, 0] == ABSENT
    index = np.where(absent[:, None], 0, raw).astype(np.int64)
    ends = index[:, 0] + index[:, 1]
    if (index[~absent, 1] != layout.chunk_bytes + 4).any() or (ends > object_bytes - layout.index_bytes).any():
        raise damaged(where, "its chunk index points outside the object")
    index[:, 1] -= 4
    index[absent] = -1
    return index


def damaged(where: str, how: str) -> StoreError:
    return StoreError(
        f"shard object {where} is damaged: {how}; run `python -m features verify STORE --repair` and prefill again "
        "(only that shard is recomputed)"
    )


def check_chunk(chunk: np.ndarray, crc: bytes, where: str, number: int) -> None:
    """
    Raises:
        StoreError: the chunk's bytes do not match their crc32c.
    """
    if crc32c(chunk) != int.from_bytes(crc, "little"):
        raise damaged(where, f"chunk {number} does not match its checksum")
