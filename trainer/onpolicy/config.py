"""What an on-policy recipe says beyond an RL recipe's. Imports without torch."""

from typing import Literal

import pydantic
from pydantic import Field

from infra.config import Config
from trainer.rl_config import RlConfig


class RolloutConfig(Config):
    """Real speculative decoding with target and current drafter."""

    steps_per_round: int = Field(default=100, ge=1)
    """optimiser steps between two rounds of decoding"""
    prompts_per_round: int = Field(default=256, ge=1)
    """prompts of training documents of the store, another draw each round"""
    parts: int = Field(default=2, ge=1)
    """shards of a round: the unit of work, of retry and of commit; each needs a global batch of prompts"""
    staleness: int = Field(default=1, ge=0)
    """rounds that a rollout may be older than the newest; older ones leave the replay buffer"""
    max_new_tokens: int = Field(default=256, ge=2)
    batch_size: int = Field(default=16, ge=1)
    """sequences that one actor decodes at once"""
    top_k: int = Field(default=16, ge=1, le=256)
    """tokens of the target's distribution kept at every drafted position"""
    overlap: bool = False
    """decode the next round while training on this one (a cluster); False: take turns (one machine)"""
    forward_weight: float = Field(default=1.0, ge=0)
    """of KL(target || drafter) at accepted positions, per block"""
    reverse_weight: float = Field(default=1.0, ge=0)
    """of KL(drafter || target) at rejected positions, per block; position k counts reverse_decay ** (k - 1)"""
    reverse_decay: float = Field(default=0.8, gt=0, le=1)
    address: str = "local"
    """of Ray: `local` starts one here; `auto` or host:port joins a running cluster"""
    actors: int = Field(default=1, ge=1)
    gpus_per_actor: float = Field(default=0, ge=0)
    keep_rounds: int = Field(default=3, ge=1)
    """rounds kept on disk beyond the buffer's"""


class OnPolicyConfig(RlConfig):
    """RL on what decoding with the real target showed."""

    stage: Literal["rl-onpolicy"] = "rl-onpolicy"  # type: ignore[assignment]
    rollout: RolloutConfig = RolloutConfig()

    @pydantic.model_validator(mode="after")
    def _rounds(self) -> "OnPolicyConfig":
        r = self.rollout
        if r.prompts_per_round // r.parts < self.data.global_batch:
            raise ValueError(
                f"rollout.prompts_per_round = {r.prompts_per_round} in {r.parts} parts is below data.global_batch = "
                f"{self.data.global_batch} per part; decode more prompts, or set rollout.parts lower"
            )
        if self.train.steps is None:
            raise ValueError("stage 'rl-onpolicy' has no epochs: set train.steps")
        if self.rl.estimator != "closed" or self.rl.verification != "exact":
            raise ValueError("stage 'rl-onpolicy' verifies by exact match and takes rl.estimator = 'closed'")
        if self.rl.follow_share:
            raise ValueError(
                "stage 'rl-onpolicy' has the starts that rollouts visited (rl.visited_share); set rl.follow_share = 0"
            )
        return self
