"""Blocks that begin where decoding goes on from other blocks of the step: visited starts, free and never stale.

A step trains its leading blocks first, at their drawn anchors p. Their forward pass also says how many of their drafts
stand: N, so decoding would emit N + 1 tokens and begin its next block at p + N + 1, on the token that ended this one. A
following block is put there, in place of one drawn elsewhere, and trained in the same step. Such starts are hard ones,
since runs end there. This is the first step, from uniform places, of the chain whose stationary law replay samples by
walking whole documents (`trainer.visits`); the end of a long run is likelier here by its length.

Legend: A blocks, K block size, X = K + lookahead, a some blocks of the batch.
"""

import dataclasses

import torch
from torch import Tensor

from features.stream import AnchorBatch

BLOCK_FIELDS = (
    "context_start_A", "context_end_A", "anchor_position_A", "anchor_document_A", "anchor_valid_A",
    "labels_AK", "supervised_AK", "target_logprob_AK",
)  # fmt: skip


def blocks_of(batch: AnchorBatch, picked_a: Tensor) -> AnchorBatch:
    """The batch with only the picked blocks; its context stays."""
    return dataclasses.replace(batch, **{n: getattr(batch, n)[picked_a] for n in BLOCK_FIELDS})


def leaders_and_followers(valid_A: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Which blocks keep their places, and which are to follow which of those.

    Args:
        share: of the valid blocks that follow, at most 1/2: no block is followed by two.
    Returns:
        int64 indices: `kept` (ascending; every invalid block among them), `led` and `following`, of equal length.
        Pairs of neighbours are spread evenly over the blocks; in every second one the later block is the follower, in
        the others the earlier one, since the anchors of a document are in order and its last ones are to lead as well.
    """
    at = torch.nonzero(valid_A).flatten()
    n = torch.arange(len(at), device=at.device, dtype=torch.float64)
    later = torch.nonzero(torch.floor((n + 1) * share) > torch.floor(n * share)).flatten()
    later = later[later > 0]
    swapped = torch.arange(len(later), device=at.device) % 2
    led, following = at[later - 1 + swapped], at[later - swapped]
    kept_A = torch.ones_like(valid_A).index_fill(0, following, False)
    return torch.nonzero(kept_A).flatten(), led, following


def follow(batch: AnchorBatch, led_a: Tensor, following_a: Tensor, run_a: Tensor) -> tuple[AnchorBatch, Tensor]:
    """The following blocks, each where decoding goes on from the block it follows, and which are there (bool [a]).

    A block stays where it was drawn if the next start is no legal anchor (its token and the one behind it are
    supervised) or lies behind the batch's context. So the number of supervised blocks, which the loss is divided by,
    does not change.

    Args:
        batch: with a lookahead of at least K.
        run_a: leading drafts of the blocks `led_a` that stand, 0 .. K-1.
    Raises:
        ValueError: no lookahead, or less than K.
    """
    K = batch.labels_AK.shape[1]
    if batch.ahead_labels_AX is None or batch.ahead_labels_AX.shape[1] < 2 * K:
        raise ValueError(f"the batch has no {K} tokens behind its blocks; set StreamConfig.lookahead to the block size")
    step_a = run_a + 1
    mask_aX = batch.ahead_loss_mask_AX[led_a]
    goes_a = mask_aX.gather(1, step_a[:, None])[:, 0] & mask_aX.gather(1, step_a[:, None] + 1)[:, 0]
    goes_a &= batch.context_end_A[led_a] + step_a <= batch.context_limit_A[led_a]
    window_aK = step_a[:, None] + torch.arange(K, device=step_a.device)
    supervised_aK = mask_aX.gather(1, window_aK)
    supervised_aK[:, 0] = False
    there = {
        "context_start_A": batch.context_start_A[led_a],
        "context_end_A": batch.context_end_A[led_a] + step_a,
        "anchor_position_A": batch.anchor_position_A[led_a] + step_a,
        "anchor_document_A": batch.anchor_document_A[led_a],
        "labels_AK": batch.ahead_labels_AX[led_a].gather(1, window_aK),
        "supervised_AK": supervised_aK,
        "target_logprob_AK": batch.ahead_logprob_AX[led_a].gather(1, window_aK),
    }
    drawn = blocks_of(batch, following_a)
    put = {
        name: torch.where(goes_a if value.ndim == 1 else goes_a[:, None], value, getattr(drawn, name))
        for name, value in there.items()
    }
    return dataclasses.replace(drawn, **put, topk_ids_AKk=None, topk_logprobs_AKk=None), goes_a
