"""What a store will cost, before the first prefill. Imports without torch.

print(estimate(spec, plan, tokens_per_second=8000).text())
check_room(store_path(root, spec.target, spec), spec, plan, max_bytes=2 * 10**12)
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from features.files import is_remote
from features.layout import array_layouts
from features.plan import num_shards, padding_share
from features.spec import FeatureSpec
from infra.errors import ResourceError
from infra.progress import duration

DTYPES = ("bf16", "fp8_e4m3")


@dataclass(frozen=True)
class Estimate:
    """Sizes of a store in bytes per storage dtype, and hours of prefill where a rate is known."""

    documents: int
    tokens: int
    shards: int
    padding: float
    """share of planned rows without a token"""
    bytes: dict[str, int]
    """storage dtype -> bytes of the whole store"""
    hours: float | None

    def text(self) -> str:
        """A few lines for people."""
        sizes = "\n".join(f"{dtype:<12}{show_bytes(n)}" for dtype, n in self.bytes.items())
        if self.hours is None:
            hours = "unknown; give --tokens-per-second"
        else:
            hours = f"{self.hours:.1f} ({duration(3600 * self.hours)})"
        return (
            f"documents   {self.documents:,}\ntokens      {self.tokens:,}\n"
            f"shards      {self.shards:,} ({self.padding:.2%} padding)\n{sizes}\nhours       {hours}"
        )


def estimate(spec: FeatureSpec, plan: pa.Table, tokens_per_second: float | None = None) -> Estimate:
    """Exact sizes of the store that `spec` and `plan` will give, in its own dtype and in the usual two.

    Args:
        tokens_per_second: prefill rate over all workers.
    """
    tokens = int(plan["length"].to_numpy().sum())
    used = shard_rows(plan)
    dtypes = dict.fromkeys((*DTYPES, spec.storage_dtype))
    return Estimate(
        documents=len(plan),
        tokens=tokens,
        shards=num_shards(plan),
        padding=padding_share(plan, spec.shard_tokens),
        bytes={d: int(shard_bytes(with_dtype(spec, d), used).sum()) for d in dtypes},
        hours=tokens / tokens_per_second / 3600 if tokens_per_second else None,
    )


def estimate_tokens(spec: FeatureSpec, tokens: int, documents: int, tokens_per_second: float | None = None) -> Estimate:
    """The same from a count of tokens alone, with full shards."""
    sizes = {d: tokens * spec.bytes_per_token(d) for d in dict.fromkeys((*DTYPES, spec.storage_dtype))}
    hours = tokens / tokens_per_second / 3600 if tokens_per_second else None
    return Estimate(documents, tokens, -(-tokens // spec.shard_tokens), 0.0, sizes, hours)


def check_room(
    uri: str, spec: FeatureSpec, plan: pa.Table, *, max_bytes: int | None = None, missing: Iterable[int] | None = None
) -> None:
    """Stop before the first prefill when the store cannot fit.

    Args:
        uri: the store's folder, which need not exist yet, or its address.
        max_bytes: upper bound of the whole store.
        missing: shards still to be written (`StoreWriter.missing_shards()`); None is all. Free space must hold these.
    Raises:
        ResourceError: the store exceeds `max_bytes`, or the disk's free space (local folders); the sentence gives both
            numbers and the size in fp8.
    """
    sizes = shard_bytes(spec, shard_rows(plan))
    need = int(sizes.sum())
    small = int(shard_bytes(with_dtype(spec, "fp8_e4m3"), shard_rows(plan)).sum())
    fp8 = f"storage_dtype = 'fp8_e4m3' needs {show_bytes(small)}" if small < need else "it is in fp8 already"
    if max_bytes is not None and need > max_bytes:
        raise ResourceError(
            f"the store {uri} would take {show_bytes(need)} in {spec.storage_dtype}, more than max_bytes = "
            f"{show_bytes(max_bytes)}; raise max_bytes, take fewer documents, or note that {fp8}"
        )
    if is_remote(uri):
        return
    left = need if missing is None else int(sizes[list(missing)].sum())
    free = free_bytes(uri)
    if left > free:
        raise ResourceError(
            f"the store {uri} needs {show_bytes(left)} more in {spec.storage_dtype} and its disk has "
            f"{show_bytes(free)} "
            f"free; free space, take fewer documents, or note that {fp8}"
        )


def shard_rows(plan: pa.Table) -> np.ndarray:
    """Rows in use per shard (int64)."""
    shard, ends = plan["shard"].to_numpy(), plan["start"].to_numpy().astype(np.int64) + plan["length"].to_numpy()
    used = np.zeros(num_shards(plan), np.int64)
    np.maximum.at(used, shard, ends)
    return used


def shard_bytes(spec: FeatureSpec, used: np.ndarray) -> np.ndarray:
    """Bytes of all objects of shards with `used` rows each: data, checksums, indices."""
    total = np.zeros(len(used), np.int64)
    for layout in array_layouts(spec).values():
        chunks = -(-used // layout.chunk_tokens)
        total += chunks * layout.chunk_stride + layout.index_bytes
    return total


def with_dtype(spec: FeatureSpec, storage_dtype: str) -> FeatureSpec:
    return spec.model_copy(update={"storage_dtype": storage_dtype})


def free_bytes(uri: str) -> int:
    """Free space of the disk that holds, or will hold, a local folder."""
    folder = Path(uri.removeprefix("file://")).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def show_bytes(n: float) -> str:
    """`40_960` -> `'41.0 kB'`; decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError
