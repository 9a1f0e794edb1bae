"""What a drafter is: the shapes and ids of a published DFlash checkpoint, plus the ablation switches. No torch.

Two JSON layouts carry it: z-lab's `config.json` (read and written here) and speculators' (`trainer.drafter.export`).
"""

from typing import Any, Literal

import pydantic
from pydantic import Field

from infra.config import Config, validate
from infra.errors import CheckpointError, ConfigError

LayerType = Literal["full_attention", "sliding_attention"]

# Fields of a target that a drafter may share. Everything else of a target's configuration (partial rotary factor,
# multimodal rope sections, mixture-of-experts fields, ...) stays out: copied wholesale it changes what engines
# compute while training used something else, and only the served acceptance shows it.
TARGET_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)
ROPE_SCALING_TYPES = ("llama3", "linear", "yarn")


class DrafterConfig(Config):
    """A DFlash drafter (arXiv 2602.06036). The defaults of the switches are the published method."""

    vocab_size: int = Field(ge=2)
    """rows of the target's embedding and head, which the drafter borrows and never stores"""
    hidden_size: int = Field(ge=1)
    """D; equal to the target's, whose embedding and head are borrowed"""
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(default=5, ge=1, le=64)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: dict[str, Any] | None = None
    """transformers' rope parameters without the theta; None = plain RoPE"""
    max_position_embeddings: int = 40960
    """tokens"""
    attention_bias: bool = False
    layer_types: tuple[LayerType, ...] = ()
    """one per layer; empty = all full_attention"""
    sliding_window: int | None = Field(default=None, ge=1)
    """tokens a query of a sliding layer sees, itself included (transformers' convention): key j at query position q
    is visible where q - j < sliding_window"""
    causal: bool | None = None
    """attention inside the block; None = the published rule: bidirectional in full layers, causal in sliding ones"""

    block_size: int = Field(default=16, ge=2, le=64)
    """K: the anchor and K - 1 drafted positions"""
    mask_token_id: int = Field(ge=0)
    """row of the target's embedding that stands for "to be drafted" """
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    """0-based target layers whose output is the context feature, in the order of fc's columns"""
    num_target_layers: int = Field(ge=1)

    conditioning: Literal["kv_injection", "input_fusion", "none"] = "kv_injection"
    """where target features enter: the keys and values of every layer (published); the block's inputs, fused with the
    feature before the anchor, while keys and values come from token embeddings; or nowhere (token embeddings only)"""
    drafting: Literal["block", "autoregressive"] = "block"
    """all positions in one pass (published), or one after the other with causal attention inside the block"""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill_layer_types(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("layer_types"):
            data = {**data, "layer_types": ("full_attention",) * int(data.get("num_hidden_layers", 5))}
        return data

    @pydantic.model_validator(mode="after")
    def _agree(self) -> "DrafterConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads do not divide into {self.num_key_value_heads} key/value "
                "heads; make num_attention_heads a multiple of num_key_value_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; RoPE needs an even one")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers; give one each"
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention but sliding_window is missing; give it in tokens")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is no row of an embedding with {self.vocab_size} rows; "
                "choose an unused row below that"
            )
        bad = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers - 1]
        if bad:
            raise ValueError(
                f"target layer id {bad[0]} is outside 0..{self.num_target_layers - 2}: the last of "
                f"{self.num_target_layers} layers is before or after the final norm depending on the engine; choose "
                "an earlier layer"
            )
        if self.drafting == "autoregressive" and self.causal is False:
            raise ValueError("an autoregressive drafter is causal inside the block; leave causal out")
        return self

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def needs_context_embeds(self) -> bool:
        """Whether forward and decode want the token embeddings of the context besides the target's features."""
        return self.conditioning != "kv_injection"

    @property
    def published(self) -> bool:
        """Whether engines can load it: no ablation switch is on."""
        return self.conditioning == "kv_injection" and self.drafting == "block"

    def layer_causal(self, layer: int) -> bool:
        if self.drafting == "autoregressive":
            return True
        return self.layer_types[layer] == "sliding_attention" if self.causal is None else self.causal

    def layer_window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @classmethod
    def for_target(cls, target: Any, **fields: Any) -> "DrafterConfig":
        """A drafter for a target.

        Args:
            target: the target's transformers configuration (its text part is taken), or its dict.
            fields: what a target cannot say (`block_size`, `mask_token_id`, `target_layer_ids`), and overrides
                (`num_hidden_layers`, `intermediate_size`, the switches).

        Raises:
            ConfigError: the target lacks a needed field, or the combination is impossible.
        """
        if hasattr(target, "get_text_config"):
            target = target.get_text_config().to_dict()
        target = target.get("text_config") or target
        values: dict[str, Any] = {k: target[k] for k in TARGET_FIELDS if target.get(k) is not None}
        values.update(_rope(target))
        values["num_target_layers"] = target.get("num_hidden_layers")
        values.update(fields)
        return _validated(values, "drafter")

    def to_zlab_json(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The keys of a published `config.json`; ablation switches go into `dflash_config` only where they differ."""
        sliding = "sliding_attention" in self.layer_types
        dflash: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if self.causal is not None:
            dflash["causal"] = self.causal
        if not self.published:
            dflash["conditioning"] = self.conditioning
            dflash["drafting"] = self.drafting
        out: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": dflash,
            "num_target_layers": self.num_target_layers,
            **self.transformer_json(),
            "dtype": dtype,
            "max_window_layers": self.num_hidden_layers,
            "use_sliding_window": sliding,
            "use_cache": True,
        }
        if self.causal is not None:
            out["is_causal"] = self.causal  # the name under which the authors' own model reads it
        return out

    def transformer_json(self) -> dict[str, Any]:
        """The plain transformer fields, named as in a Qwen3 configuration."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
        }

    @classmethod
    def from_zlab_json(cls, data: dict[str, Any]) -> "DrafterConfig":
        """Read a published `config.json`: `block_size`, mask and layer ids at the top or inside `dflash_config`.

        The layer ids are never recomputed: the paper's formula gives those of only 6 of 20 published checkpoints.

        Raises:
            CheckpointError: ids are missing, or the checkpoint is of a kind this drafter does not compute.
        """
        dflash = data.get("dflash_config") or {}
        refuse_other_layouts(data, dflash)

        def either(name: str) -> Any:
            value = dflash.get(name, data.get(name))
            if value is None:
                raise CheckpointError(
                    f"config.json of the drafter has no {name!r}, neither at the top nor in dflash_config; add the "
                    "value it was trained with (it cannot be recomputed)"
                )
            return value

        values = {
            k: data[k] for k in (*TARGET_FIELDS, "num_hidden_layers", "attention_bias") if data.get(k) is not None
        }
        values.update(_rope(data))
        if "head_dim" not in values:
            values["head_dim"] = data["hidden_size"] // data["num_attention_heads"]
        layer_types = tuple(data.get("layer_types") or ())
        window = data.get("sliding_window")
        if dflash.get("use_swa"):
            layer_types = layer_types or ("sliding_attention",) * data["num_hidden_layers"]
            window = dflash.get("swa_window_size", window)
        values["layer_types"] = layer_types
        values["sliding_window"] = window if "sliding_attention" in layer_types else None
        values["causal"] = dflash.get("causal", data.get("is_causal"))
        values["block_size"] = either("block_size")
        values["mask_token_id"] = either("mask_token_id")
        values["target_layer_ids"] = either("target_layer_ids")
        values["num_target_layers"] = either("num_target_layers")
        for switch in ("conditioning", "drafting"):
            if switch in dflash:
                values[switch] = dflash[switch]
        return _validated(values, "config.json of the drafter", CheckpointError)


def refuse_other_layouts(data: dict[str, Any], dflash: dict[str, Any]) -> None:
    """Refuse relatives of DFlash that would load with the same tensor names and compute something else.

    Raises:
        CheckpointError: sample-from-anchor labels, a projector or Markov head, DFlash2, a reduced vocabulary.
    """

    def value(name: str) -> Any:
        return dflash.get(name, data.get(name))

    architecture = (data.get("architectures") or ["DFlashDraftModel"])[0]
    if value("sample_from_anchor") or value("shift_label") or "DSpark" in architecture:
        raise CheckpointError(
            f"drafter of architecture {architecture!r} uses the sample-from-anchor layout, in which slot k predicts "
            "the token at p + k + 1 (here: p + k), so its drafts would be off by one; train or load a DFlash drafter"
        )
    for name in ("projector_type", "markov_rank", "enable_confidence_head", "conv_kernel_size", "selector_rank"):
        if value(name):
            raise CheckpointError(
                f"drafter of architecture {architecture!r} has {name} = {value(name)!r}, a part that DFlash does not "
                "have; load a plain DFlash drafter"
            )
    for name in ("attention_sink_bias", "attention_value_scale", "output_multiplier", "input_embedding_scale"):
        if value(name) not in (None, False, 1, 1.0):
            raise CheckpointError(
                f"drafter has {name} = {value(name)!r}, which is not supported; load a plain DFlash drafter"
            )
    if data.get("draft_vocab_size") not in (None, data.get("vocab_size")):
        raise CheckpointError(
            f"drafter has a reduced vocabulary of {data['draft_vocab_size']} tokens, which is not supported; load one "
            "that uses the target's whole vocabulary"
        )


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` from either spelling of transformers (before 5: two keys; since: one dict)."""
    parameters = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or data.get("rope_theta")
    kind = parameters.get("rope_type", parameters.pop("type", None)) or "default"
    out: dict[str, Any] = {} if theta is None else {"rope_theta": float(theta)}
    if kind in ROPE_SCALING_TYPES:
        parameters.pop("partial_rotary_factor", None)
        out["rope_scaling"] = {**parameters, "rope_type": kind}
    return out


def _validated(values: dict[str, Any], what: str, error: type[Exception] = ConfigError) -> DrafterConfig:
    try:
        return validate(DrafterConfig, {k: v for k, v in values.items() if v is not None}, what)
    except ConfigError as e:
        raise error(str(e)) from None
