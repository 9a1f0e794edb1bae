"""What an RL recipe says beyond an SFT recipe's. Imports without torch."""

from typing import Literal

import pydantic
from pydantic import Field

from infra.config import Config
from trainer.config import SftConfig


class GroupConfig(Config):
    """The estimator that draws drafts; see `kernels.acceptance.Group`."""

    size: int = Field(default=8, ge=1)
    """drafts per block, all from one set of logits"""
    baseline: Literal["none", "group", "reference"] = "none"
    """`none` has the smallest variance for rewards of the accepted length (docs/rl.md)"""
    clip: float = Field(default=0.2, gt=0)
    """of the probability ratio to the drafter that drew"""
    rollout_every: int = Field(default=1, ge=1)
    """steps for which one frozen drafter draws; 1: the current drafter, no second forward pass, no clipping"""


class RlSection(Config):
    """-log E[f(N)] + floor · cross-entropy + kl · divergence from the drafter that the stage starts from."""

    objective: Literal["log", "linear"] = "log"
    """-log E[f(N)], or -E[f(N)]"""
    estimator: Literal["closed", "group"] = "closed"
    verification: Literal["exact", "rejection"] = "exact"
    """how serving accepts: exact match (DFlash's servers), or speculative sampling with min(1, p/q)"""
    text: Literal["greedy", "sampled"] = "greedy"
    """what the store's answers are: greedy text gives the argmax objective, text drawn at temperature 1 that of
    sampling; checked against the store"""
    reward: Literal["tau", "throughput", "window"] = "tau"
    """f(N): 1 + N; tokens per millisecond under a measured cost table; or (1 + N) / (1 + window_cost (1 + N))"""
    schedule: str = ""
    """schedule.json of `python -m eval schedule`, for reward `throughput`"""
    concurrency: int = Field(default=1, ge=1)
    """sequences decoded at once, a row of that table"""
    window_cost: float = Field(default=0.1, gt=0)
    floor: float = Field(default=0.1, ge=0)
    """λ: weight of the cross-entropy of section `loss` (its mean over slots)"""
    kl: float = Field(default=0.0, ge=0)
    """β: weight of the divergence per supervised slot, over the whole vocabulary"""
    kl_direction: Literal["forward", "reverse", "both"] = "forward"
    """`forward`: KL(start || drafter) keeps mass; `reverse`: KL(drafter || start) may sharpen"""
    kl_share: float = Field(default=0.25, gt=0, le=1)
    """share of the blocks that pay for it, weighted up accordingly: the second drafter's pass costs that much"""
    reference: str = ""
    """run or checkpoint that the divergence is from; empty: drafter.start_from"""
    temperature: tuple[float, float] = (1.0, 0.5)
    """of the drafts at the first and at the last step"""
    alpha: tuple[float, float] = (0.5, 0.1)
    """smoothing of the weights at the first and at the last step"""
    visited_share: float = Field(default=0.5, ge=0, le=1)
    """share of a document's anchors at which decoding with the current drafter really begins a block"""
    visited_every: int = Field(default=100, ge=1)
    """steps between two replays that find them"""
    visited_documents: int = Field(default=150, ge=1)
    """documents per replay, of those that the next steps read the ones whose visits are oldest"""
    follow_share: float = Field(default=0.0, ge=0, le=0.5)
    """share of the blocks that begin where decoding would go on from another block of the step, which is trained before
    them, behind the same context: visited starts that need no replay"""
    group: GroupConfig = GroupConfig()
    patience: int = Field(default=0, ge=0)
    """held-out replays without a better argmax τ after which the stage ends; 0: never"""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "RlSection":
        if min(self.temperature) <= 0 or min(self.alpha) < 0 or max(self.alpha) > 1:
            raise ValueError(
                f"temperature {self.temperature} must be positive and alpha {self.alpha} between 0 and 1; the defaults "
                "are (1.0, 0.5) and (0.5, 0.1)"
            )
        if self.verification == "rejection" and (self.text != "sampled" or self.temperature != (1.0, 1.0)):
            raise ValueError(
                "verification = 'rejection' is the expectation over text drawn from the target and drafts drawn at "
                "temperature 1; set text = 'sampled' and temperature = [1.0, 1.0], with a store of sampled answers"
            )
        if self.verification == "rejection" and self.estimator == "group":
            raise ValueError(
                "estimator = 'group' knows exact-match verification only (the target's distribution behind drawn "
                "prefixes is not in the store); set estimator = 'closed'"
            )
        if self.reward == "throughput" and not self.schedule:
            raise ValueError("reward = 'throughput' needs rl.schedule, the schedule.json of `python -m eval schedule`")
        return self


class RlConfig(SftConfig):
    """Fine-tuning of a trained drafter for accepted length, from a feature store."""

    stage: Literal["rl"] = "rl"  # type: ignore[assignment]
    rl: RlSection = RlSection()

    @pydantic.model_validator(mode="after")
    def _starts(self) -> "RlConfig":
        if not self.drafter.start_from:
            raise ValueError(
                "stage 'rl' fine-tunes a trained drafter and none is named; give INIT=runs/<sft run>, or set "
                "drafter.start_from"
            )
        if self.loss.weighting not in ("decay", "uniform") or self.loss.soft_share:
            raise ValueError(
                f"loss.weighting = {self.loss.weighting!r} with soft_share = {self.loss.soft_share} is the "
                "cross-entropy floor of rl, which has fixed weights and hard labels; use decay or uniform, and 0"
            )
        return self
