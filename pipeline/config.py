"""What a corpus file (`pipeline/corpora/*.toml`) says. Imports without torch or ray.

cfg = resolve("smollm2-135m", "demo", ["regenerate.max_new_tokens=128", "target.max_length=512"])
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from features.target_config import TargetConfig, load_target_config
from infra.config import Config, apply_overrides, find_named, read_toml, validate
from infra.errors import ConfigError
from infra.provenance import canonical_json, sha256_hex

CORPORA = Path(__file__).parent / "corpora"


class FieldsConfig(Config):
    """Which columns hold what. A name left out is looked for among the usual ones (`pipeline/conversation.py`)."""

    messages: str | None = None
    """column with the list of turns (`role`/`content` or `from`/`value`)"""
    prompt: str | None = None
    """column with the user's text, where there is no list of turns"""
    input: str | None = None
    """column with a second part of the user's text, put after an empty line"""
    response: str | None = None
    """column with the answer"""
    system: str | None = None
    """column with the system text"""
    tools: str | None = None
    """column with the list of tools (JSON schemas) for the chat template"""


class _Mixed(Config):
    weight: float = Field(default=1.0, gt=0)
    """share of the mixture relative to the other sources, as long as this source lasts"""
    limit: int | None = Field(default=None, ge=1)
    """conversations taken at most from this source"""
    split: Literal["train", "heldout"] | None = None
    """split of all its rows; None: by content, `heldout_share`"""
    fields: FieldsConfig = FieldsConfig()


class PromptsSource(Config):
    """The generator of `pipeline/prompts.py`."""

    kind: Literal["prompts"] = "prompts"
    count: int = Field(default=600, ge=1)
    """training prompts"""
    heldout: int = Field(default=64, ge=0)
    """held-out prompts"""
    seed: int = 0
    weight: float = Field(default=1.0, gt=0)


class FilesSource(_Mixed):
    """JSON lines, one JSON list, or Parquet, by the file's name."""

    kind: Literal["files"] = "files"
    paths: tuple[str, ...] = Field(min_length=1)
    """local paths and patterns (`data/*.jsonl`), or `s3://bucket/key`"""


class HubSource(_Mixed):
    """A data set of the Hugging Face hub, streamed; or a folder written by `Dataset.save_to_disk`."""

    kind: Literal["hub"] = "hub"
    repo: str
    """`organisation/name`, or a local folder"""
    subset: str | None = None
    revision: str | None = None
    hub_split: str = "train"


Source = Annotated[PromptsSource | FilesSource | HubSource, Field(discriminator="kind")]


class RegenerateConfig(Config):
    """The answers are written anew by the target, as DFlash requires; `engine = "none"` keeps the corpus's."""

    engine: Literal["transformers", "openai", "none"] = "transformers"
    max_new_tokens: int = Field(default=512, ge=2)
    """tokens per answer, the stop token included"""
    temperature: float = Field(default=0.0, ge=0)
    """0: greedy"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0: all tokens"""
    seed: int = 0
    """with the prompt's content it decides each answer's draws, whatever the batch"""
    batch_size: int = Field(default=48, ge=1)
    """answers written at once by one actor"""
    urls: tuple[str, ...] = ()
    """engine "openai": base URLs of servers, `http://host:8000/v1`; requests go to them in turn"""
    model: str = ""
    """engine "openai": the name under which the servers know the target"""
    concurrency: int = Field(default=32, ge=1)
    """engine "openai": requests in flight, all servers together"""
    retries: int = Field(default=6, ge=0)
    """engine "openai": further tries after a failure, with waits of 0.5, 1, 2, ... s, at most 30 s"""
    timeout_s: float = Field(default=600.0, gt=0)
    """engine "openai": seconds one request may take"""
    api_key_env: str = "OPENAI_API_KEY"
    """engine "openai": environment variable with the key; unset: no key is sent"""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "RegenerateConfig":
        if self.engine == "openai" and not (self.urls and self.model):
            raise ValueError('regenerate.engine = "openai" needs regenerate.urls and regenerate.model; set both')
        return self

    def identity(self) -> dict[str, Any]:
        """What decides the answers' text (not how fast they come); sampling fields only where they matter."""
        keys = ["engine", "max_new_tokens", "temperature"]
        keys += ["top_p", "top_k", "seed"] if self.temperature > 0 else []
        keys += ["model"] if self.engine == "openai" else []
        return {k: getattr(self, k) for k in keys}


class RenderConfig(Config):
    """From conversations to token ids and loss masks."""

    rows: Literal["conversation", "turn"] = "conversation"
    """one document per conversation, or one per assistant turn (for templates that rewrite earlier turns)"""
    min_supervised: int = Field(default=2, ge=2)
    """fewest supervised tokens of a document"""


class PrefillConfig(Config):
    """From documents to features."""

    storage_dtype: Literal["bf16", "fp8_e4m3", "fp32"] = "bf16"
    shard_tokens: int = Field(default=65_536, ge=64)
    """tokens per shard: 65,536 are 377 MB for SmolLM2-135M and 2.7 GB for Qwen3-8B in bf16"""
    batch_tokens: int | None = Field(default=None, ge=16)
    """tokens per forward pass, padding included; halved when memory runs out. None: 8,192 on a GPU, and 1,024 on a
    CPU, where each thread computes a batch of its own"""
    top_k: int = Field(default=0, ge=0)
    """store the target's k most likely tokens at each position (the compact teacher); 0: none"""
    max_bytes: int | None = Field(default=None, ge=1)
    """refuse to begin when the store would be larger"""


class RayConfig(Config):
    """Where the work runs."""

    address: str = "local"
    """"local" starts Ray for this run alone; "auto" (on one of its hosts) or "host:6379" joins a cluster;
    "ray://host:10001" runs on one from outside. The environment variable RAY_ADDRESS wins over "local"."""
    actors: int | None = Field(default=None, ge=1)
    """actors, each of which holds the target once; None: all GPUs, or without GPUs one per CPU, at most four"""
    num_cpus: int | None = Field(default=None, ge=1)
    """CPUs of a local Ray; None: all"""
    cpus_per_actor: float | None = Field(default=None, ge=0)
    """None: an equal share of all CPUs; also each actor's torch threads"""
    gpus_per_actor: float = Field(default=0, ge=0)
    """0: CPU; 0.5: two actors share a GPU; 4: the target is spread over four"""
    max_failures: int = Field(default=3, ge=0)
    """times that a task is repeated after its actor died, before the job ends"""


class FeaturesConfig(Config):
    """Everything from a corpus to a store."""

    name: str
    """slug of the corpus"""
    target: TargetConfig
    sources: dict[str, Source] = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)
    """conversations of the whole mixture"""
    heldout_share: float = Field(default=0.02, ge=0, lt=1)
    """share of rows that are held out, where the source does not say"""
    regenerate: RegenerateConfig = RegenerateConfig()
    render: RenderConfig = RenderConfig()
    prefill: PrefillConfig = PrefillConfig()
    ray: RayConfig = RayConfig()
    store_root: str = "store"
    """folder or `s3://bucket/prefix`"""
    data_root: str = "data"
    """folder for responses and documents"""
    dry: bool = False
    """stop after the estimate"""

    def corpus_digest(self) -> str:
        """Of everything that decides the documents apart from the target's own identity."""
        parts = {
            "sources": {k: v.model_dump(mode="json") for k, v in self.sources.items()},
            "limit": self.limit,
            "heldout_share": self.heldout_share,
            "regenerate": self.regenerate.identity(),
            "render": self.render.model_dump(mode="json"),
            "target": self.target.model_dump(
                mode="json", include={"source", "dtype", "chat_template_args", "chat_template", "max_length"}
            ),
        }
        return sha256_hex(canonical_json(parts))

    @property
    def work_folder(self) -> Path:
        return Path(self.data_root) / self.target.name / f"{self.name}-{self.corpus_digest()[:12]}"


def resolve(model: str, corpus: str, overrides: list[str] | None = None) -> FeaturesConfig:
    """A target's name or file and a corpus's name or file, with overrides; keys under `target.` change the target.

    Raises:
        ConfigError: unknown names or keys, bad values.
    """
    overrides = overrides or []
    target = load_target_config(model, [o.removeprefix("target.") for o in overrides if o.startswith("target.")])
    path = find_named(CORPORA, corpus, "CORPUS")
    data = apply_overrides(read_toml(path), [o for o in overrides if not o.startswith("target.")])
    if "target" in data:
        raise ConfigError(f"{path} has a section [target]; the target comes from MODEL, remove the section")
    data["target"] = target.model_dump()
    data.setdefault("name", path.stem)
    address = os.environ.get("RAY_ADDRESS")
    if address and data.get("ray", {}).get("address", "local") == "local":
        data.setdefault("ray", {})["address"] = address
    return validate(FeaturesConfig, data, str(path))
