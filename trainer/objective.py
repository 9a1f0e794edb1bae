"""From a batch of blocks to the loss that every rank back-propagates.

Legend: A blocks, K block size, S context tokens, L taps, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from features.stream import AnchorBatch
from features.target import FrozenHead
from kernels import weighting
from kernels.decay_ce import BlockLoss, Teacher, weighted_cross_entropy
from trainer.config import LossConfig
from trainer.drafter.config import DrafterConfig


class Objective:
    """Σ w·CE / Σ w, the sums over the whole global batch: all ranks, all micro-batches of an optimiser step.

    The denominator is a function of the supervision masks alone, which every rank knows for the whole step
    (`AnchorBatch.step_supervised_K`), so it needs no collective and is known before the first backward. For weights
    that depend on the drafter (D-PACE, expected acceptance) it is the number of supervised blocks: their loss is a
    sum over the block by nature.
    """

    def __init__(self, cfg: LossConfig, drafter: DrafterConfig):
        self.cfg, self.drafter = cfg, drafter
        self.gamma = cfg.resolved_gamma(drafter.block_size)
        match cfg.weighting:
            case "decay":
                self.weighting = weighting.decay(self.gamma)
                self.slot_weight_K = weighting.decay_K(self.gamma, drafter.block_size).double()
            case "uniform":
                self.weighting = weighting.uniform()
                self.slot_weight_K = torch.ones(drafter.block_size, dtype=torch.float64)
            case "dpace":
                self.weighting, self.slot_weight_K = weighting.dpace(cfg.alpha), None
            case "acceptance":
                self.weighting, self.slot_weight_K = weighting.acceptance(cfg.alpha), None

    def begin(self, step: int, total: int) -> None:
        """Nothing moves with the steps."""

    def metrics(self) -> dict[str, float]:
        return {}

    def denominator(self, batch: AnchorBatch) -> float:
        """Of the whole optimiser step of the batch; at least 1e-9, so that nothing supervised gives loss 0."""
        if self.slot_weight_K is None:
            return max(float(batch.step_blocks), 1e-9)
        return max(float((self.slot_weight_K * batch.step_supervised_K.cpu().double()).sum()), 1e-9)

    def __call__(self, model: nn.Module, batch: AnchorBatch, head: FrozenHead) -> BlockLoss:
        """Forward pass of one micro-batch; `numerator` is to be divided by `denominator(batch)`."""
        hidden_AKD = forward(model, self.drafter, batch, head)
        teacher = None
        if self.cfg.soft_share:
            teacher = Teacher(batch.topk_ids_AKk, batch.topk_logprobs_AKk, self.cfg.soft_share)
        return weighted_cross_entropy(
            hidden_AKD, head.head_VD, batch.labels_AK, batch.supervised_AK, self.weighting,
            teacher=teacher, chunk_rows=self.cfg.chunk_rows,
        )  # fmt: skip


def forward(
    model: nn.Module,
    cfg: DrafterConfig,
    batch: AnchorBatch,
    head: FrozenHead,
    then: Callable[[Tensor], AnchorBatch] | None = None,
) -> Any:
    """The drafter's output hidden_AKD for all blocks of a batch; `model` is the drafter or an engine around it.

    With `then`, a pair: also that of the blocks of the batch which it makes of the first output; the context is shared.
    """
    drafter = getattr(model, "module", model)

    def blocks(b: AnchorBatch) -> tuple[Tensor, ...]:
        tokens = b.labels_AK[:, 0] if cfg.drafting == "block" else b.labels_AK
        inputs = drafter.block_inputs(tokens, head.embedding_VD)
        return inputs, b.context_start_A, b.context_end_A, b.anchor_position_A, b.anchor_valid_A

    context = nn.functional.embedding(batch.token_ids_S, head.embedding_VD) if cfg.needs_context_embeds else None
    return model(
        batch.hidden_SLD,
        batch.positions_S,
        *blocks(batch),
        context_embeds_SD=context,
        then=None if then is None else lambda hidden_AKD: blocks(then(hidden_AKD)),
    )
