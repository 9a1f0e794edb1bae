"""Sums of what training predicts right, between two log entries and over all ranks.

Legend: K block size.
"""

import math

import torch

from kernels.acceptance_loss import AcceptanceLoss
from kernels.decay_ce import BlockLoss
from trainer.engine import World


class Meter:
    """Accuracy and cross-entropy per position, and the teacher-forced τ̂ = 1 + mean leading run of supervised blocks.

    τ̂ is an average over uniform anchors; decoding visits hard places more often, so replay τ is lower.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.last: dict[str, float] = {}
        """of the latest `reduce`"""
        self.work: dict[str, float] = {}
        """tokens, documents, seconds and supervised blocks that the latest `reduce` spoke of"""
        self._reset()

    def add_step(self, tokens: float, documents: float, seconds: float) -> None:
        """Of one optimiser step, all ranks together."""
        for key, value in (("tokens", tokens), ("documents", documents), ("seconds", seconds)):
            self._work[key] += value

    def _reset(self) -> None:
        self._work = dict.fromkeys(("tokens", "documents", "seconds"), 0.0)
        # rows: supervised slots, correct ones, Σ −log q; then blocks and Σ run in a row of their own
        self.sums = torch.zeros(4, self.block_size, dtype=torch.float64)

    def add(self, terms: BlockLoss | AcceptanceLoss) -> None:
        mask = terms.mask_AK
        self.sums[0] += mask.sum(0).cpu()
        self.sums[1] += (terms.correct_AK & mask).sum(0).cpu()
        self.sums[2] -= (terms.label_logprob_AK * mask).double().sum(0).cpu()
        blocks = mask[:, 1:].any(1)
        self.sums[3, 0] += blocks.sum().cpu()
        self.sums[3, 1] += terms.run_A[blocks].sum().cpu()

    def reduce(self, world: World) -> dict[str, float]:
        """`accuracy`, `accuracy_k`, `cross_entropy`, `tau_hat`; every rank calls it. Empty without supervision."""
        slots, correct, nll, runs = world.sum(self.sums)
        self.work = {**self._work, "blocks": float(runs[0])}
        self._reset()
        out: dict[str, float] = {}
        if slots.sum() > 0:
            out["accuracy"] = float(correct.sum() / slots.sum())
            out["cross_entropy"] = float(nll.sum() / slots.sum())
            out["tau_hat"] = 1 + float(runs[1] / runs[0]) if runs[0] > 0 else math.nan
            out |= {f"accuracy_{k}": float(correct[k] / slots[k]) for k in range(1, self.block_size) if slots[k] > 0}
        self.last = out
        return out

    def short(self) -> str:
        """Accuracies at positions 1, 2, 4, 8 of the latest `reduce`, `0.31/0.12/0.05`; empty before the first."""
        shown = [self.last.get(f"accuracy_{k}") for k in (1, 2, 4, 8)]
        return "/".join(f"{a:.2f}" for a in shown if a is not None)
