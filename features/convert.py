"""A store in fewer bits from a store in more, without the target.

Legend: S tokens of a document, L taps, D hidden size.
"""

from collections.abc import Iterator
from typing import Any

import torch

from features.document import DocumentFeatures
from features.estimate import check_room, with_dtype
from features.precision import LOAD_DTYPE, decode_fp8, encode
from features.reader import FeatureStore
from features.spec import HIDDEN_BYTES, FeatureSpec, StorageDtype
from features.tables import read_plan
from features.writer import create_store
from infra.errors import ConfigError
from infra.progress import Progress


class ErrorPerTap:
    """Root of squared error over squared value, per tap, over all documents added."""

    def __init__(self, num_taps: int):
        self.error_L = torch.zeros(num_taps, dtype=torch.float64)
        self.value_L = torch.zeros(num_taps, dtype=torch.float64)

    def add(self, hidden_SLD: torch.Tensor, stored_SLD: torch.Tensor) -> None:
        x, y = hidden_SLD.float(), stored_SLD.float()
        self.error_L += (x - y).square().sum(2).double().sum(0)
        self.value_L += x.square().sum(2).double().sum(0)

    def result(self) -> list[float]:
        return (self.error_L / self.value_L.clamp(min=1e-300)).sqrt().tolist()


def stored_as(hidden_SLD: torch.Tensor, storage: StorageDtype) -> torch.Tensor:
    """What a reader gets back when `hidden_SLD` is stored so."""
    bits, scale_SL, _ = encode(hidden_SLD, storage)
    if scale_SL is None:
        return torch.from_numpy(bits.view("<i2" if storage == "bf16" else "<i4")).view(LOAD_DTYPE[storage])
    out_SLD = torch.empty(hidden_SLD.shape, dtype=torch.bfloat16)
    decode_fp8(bits, scale_SL, out_SLD)
    return out_SLD


def convert(
    source_uri: str, root_uri: str, storage: StorageDtype, *, max_bytes: int | None = None, progress: bool = False
) -> dict[str, Any]:
    """Write the store of `source_uri` again below `root_uri` with fewer bits per hidden state; repeatable after a kill.

    Returns:
        the summary of `StoreWriter.finish` and `relative_error`: tap layer id -> root-mean-square error relative to the
        source (of the shards converted by this call).
    Raises:
        ConfigError: the source has no more bits than asked for.
        ResourceError: no room.
    """
    source = FeatureStore.open(source_uri)
    spec = with_dtype(source.spec, storage)
    if HIDDEN_BYTES[storage] >= HIDDEN_BYTES[source.spec.storage_dtype]:
        raise ConfigError(
            f"store {source_uri} is in {source.spec.storage_dtype} and {storage} would not make it smaller; "
            "convert to a dtype with fewer bits, or prefill again"
        )
    plan = read_plan(source.files)
    writer = create_store(root_uri, FeatureSpec.model_validate(spec.model_dump()), plan, max_reject_share=1.0)
    ready = set(range(source.num_shards)) - set(source.missing_shards)
    todo = [s for s in writer.missing_shards() if s in ready]
    check_room(writer.uri, spec, plan, max_bytes=max_bytes, missing=todo)
    errors = ErrorPerTap(spec.num_taps)
    reasons = {r["document"]: f"{r['reason']} in the source: {r['detail']}" for r in source.rejects.to_pylist()}

    def documents(shard: int) -> Iterator[DocumentFeatures]:
        for document in writer.shard_plan(shard)["document"].to_pylist():
            if document in reasons:
                yield DocumentFeatures(document, error=reasons[document])
                continue
            f = source.read(document)
            for part_SLD in f.hidden_SLD.split(256):  # float32 of 256 tokens: 21 MB at D = 4096 with 5 taps
                errors.add(part_SLD, stored_as(part_SLD, storage))
            yield DocumentFeatures(
                document,
                f.token_ids_S,
                f.loss_mask_S,
                f.hidden_SLD,
                f.target_logprob_S,
                f.topk_ids_Sk,
                f.topk_logprobs_Sk,
            )

    with Progress(len(todo), f"convert to {storage}", "shards", enabled=progress) as bar:
        for shard in todo:
            writer.write_shard(shard, documents(shard))
            bar.update(1)
    relative = dict(zip(spec.tap_layer_ids, errors.result(), strict=True)) if todo else {}
    return writer.finish() | {"relative_error": relative}
