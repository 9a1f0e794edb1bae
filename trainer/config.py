"""What a training recipe (`trainer/recipes/*.toml`) says. Imports without torch."""

import math
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field

from infra.config import Config

RECIPES = Path(__file__).parent / "recipes"


class DataConfig(Config):
    """Which features, in which batches."""

    store: str = ""
    """folder or URI of one finished store; empty: the newest one of the target below `store/`"""
    anchors_per_document: int = Field(default=512, ge=1)
    """blocks drawn per document and epoch"""
    anchors: Literal["random", "fixed"] = "random"
    """`fixed` cuts the response into consecutive blocks (the paper's Table 13 ablation)"""
    global_batch: int = Field(default=64, ge=1)
    """documents per optimiser step, whatever the number of ranks"""
    documents_per_micro_batch: int = Field(default=1, ge=1)
    """documents packed into one forward pass of one rank; memory grows with it"""
    shape: Literal["fixed", "trimmed"] = "fixed"
    """`fixed`: one shape for compiled kernels; `trimmed`: no padding, faster on a CPU"""
    prefetch: int = Field(default=2, ge=1)
    """micro-batches read ahead"""


class DrafterSection(Config):
    """Shape of the drafter; what is not said comes from the target."""

    num_hidden_layers: int = Field(default=5, ge=1, le=32)
    block_size: int | None = Field(default=None, ge=2, le=64)
    """anchor + drafted positions; None: the target file's"""
    conditioning: Literal["kv_injection", "input_fusion", "none"] = "kv_injection"
    """how the target's features enter; the other two are the paper's ablations (Tables 9 and 10)"""
    init: Literal["auto", "target", "random"] = "auto"
    """`target`: layers start as the target's last ones; `auto`: that, where the target's layers fit"""
    start_from: str = ""
    """folder of a drafter to go on from (ours, z-lab's or speculators'); its shape wins over this section"""


class LossConfig(Config):
    """Σ w·CE / Σ w over all ranks and micro-batches."""

    weighting: Literal["decay", "uniform", "dpace", "acceptance"] = "decay"
    gamma: float | None = Field(default=None, gt=0)
    """of `decay`, w_k = exp(−(k−1)/γ); None: the paper's 7, 5, 4 for blocks of 16, 10, 8, between by line"""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """smoothing of `dpace` and `acceptance`"""
    soft_share: float = Field(default=0.0, ge=0, le=1)
    """share of the divergence from the target's stored top-k; the rest is the cross-entropy with its token"""
    chunk_rows: int | None = Field(default=None, ge=1)
    """rows of logits that exist at once; None: as many as fit 64 MB on a CPU and 1 GB on a GPU"""

    def resolved_gamma(self, block_size: int) -> float:
        if self.gamma is not None:
            return self.gamma
        if block_size >= 10:
            return 5 + (block_size - 10) / 3
        return max(4 + (block_size - 8) / 2, 1.0)


class OptimConfig(Config):
    """AdamW, or Muon for the matrices, with linear warm-up and cosine decay to `min_lr_ratio`."""

    matrices: Literal["adamw", "muon"] = "adamw"
    """`muon`: orthogonalised momentum for matrices, AdamW for norms; under ZeRO 1 or 2"""
    muon_lr: float = Field(default=0.02, gt=0)
    """peak learning rate of Muon's matrices, whose updates have spectral norm about 1; scheduled like `lr`"""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    lr: float = Field(default=6e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """of matrices; norms have none"""
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    """of all steps"""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    clip: float = Field(default=1.0, gt=0)
    """largest global gradient norm; has no effect with Muon, which normalises by itself"""

    def lr_at(self, step: int, total: int) -> float:
        """Learning rate of 0-based `step` of `total`."""
        warmup = max(round(self.warmup_ratio * total), 1)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        t = (step - warmup) / max(total - warmup, 1)
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(t, 1.0))))


class EngineConfig(Config):
    """DeepSpeed."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """1 shards the optimiser's 12 bytes per parameter over the ranks; 2 also gradients, 3 also parameters"""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps fp32 master weights and accumulates gradients in fp32"""


class TrainConfig(Config):
    """How long, how often."""

    steps: int | None = Field(default=None, ge=1)
    """optimiser steps; None: `epochs` over the store"""
    epochs: float = Field(default=6, gt=0)
    seed: int = 42
    log_every: int = Field(default=10, ge=1)
    """steps between two entries in MLflow and the log"""
    eval_every: int = Field(default=500, ge=1)
    """steps between two replays of held-out documents"""
    eval_documents: int = Field(default=64, ge=0)
    """held-out documents per replay; 0: none"""
    patience: int = Field(default=0, ge=0)
    """replays in a row without a better τ after which training ends; 0: never"""
    save_every: int = Field(default=1000, ge=1)
    """steps between two checkpoints"""
    save_async: bool = True
    """write checkpoints while training goes on, from a copy in host memory (12 bytes per parameter over all ranks)"""
    keep: int = Field(default=2, ge=1)
    """checkpoints kept"""
    max_skipped: int = Field(default=5, ge=1)
    """consecutive steps with non-finite gradients after which the run ends"""


class SftConfig(Config):
    """Supervised training of a drafter from a feature store."""

    stage: Literal["sft"] = "sft"
    model: str = "smollm2-135m"
    """target: a name in features/targets or the path of a TOML file"""
    name: str = ""
    """of the run and its folder `runs/<name>`; empty: `<model>-sft`"""
    data: DataConfig = DataConfig()
    drafter: DrafterSection = DrafterSection()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    engine: EngineConfig = EngineConfig()
    train: TrainConfig = TrainConfig()

    @pydantic.model_validator(mode="after")
    def _batches(self) -> "SftConfig":
        if self.data.global_batch % self.data.documents_per_micro_batch:
            raise ValueError(
                f"data.global_batch = {self.data.global_batch} is not a multiple of data.documents_per_micro_batch = "
                f"{self.data.documents_per_micro_batch}; change one of them"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _engine(self) -> "SftConfig":
        if self.engine.zero_stage == 0 and self.engine.dtype == "bf16":
            raise ValueError(
                "engine.zero_stage = 0 with engine.dtype = 'bf16' is a pair that DeepSpeed does not do with fp32 "
                "accumulation; use stage 1, which is the same on one rank"
            )
        if self.optim.matrices == "muon" and self.engine.zero_stage not in (1, 2):
            raise ValueError(
                f"optim.matrices = 'muon' is not done under engine.zero_stage = {self.engine.zero_stage} (3 cuts the "
                "matrices, 0 does not watch for non-finite gradients); use stage 1 or 2"
            )
        return self

    @property
    def run_name(self) -> str:
        return self.name or f"{Path(self.model).stem}-{self.stage}"


# A resumed run may differ in these and is still the same run; anything else changes what is learnt.
HARMLESS = (
    "name",
    "data.store",  # the fingerprint is compared instead
    "data.prefetch",
    "loss.chunk_rows",
    "engine.zero_stage",
    "train.log_every",
    "train.eval_every",
    "train.eval_documents",
    "train.patience",
    "train.save_every",
    "train.save_async",
    "train.keep",
    "train.max_skipped",
)


def changed_settings(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old, new) of every difference between two resolved configurations."""
    out: dict[str, tuple[Any, Any]] = {}
    for key in sorted(old.keys() | new.keys()):
        a, b, dotted = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            out |= changed_settings(a, b, f"{dotted}.")
        elif a != b:
            out[dotted] = (a, b)
    return out
