"""Blocks moved on to where decoding goes from them: visited starts for a fraction of a step, and never stale.

From a drawn anchor p the current drafter's block is verified against the text: N drafts stand, N + 1 tokens are
emitted, and the next block begins at p + N + 1, on the token that ended this one. So one pass without gradient over
some drawn blocks turns them into starts that decoding visits: hard places, since runs end there. It is the first step,
from uniform places, of the chain whose stationary law replay samples by walking whole documents (`trainer.visits`); the
end of a long run is likelier here by its length.

Legend: A blocks, K block size, X = K + lookahead, a the picked blocks.
"""

import dataclasses

import torch
from torch import Tensor, nn

from features.stream import AnchorBatch
from features.target import FrozenHead
from kernels import weighting
from kernels.decay_ce import weighted_cross_entropy
from trainer.drafter.config import DrafterConfig
from trainer.objective import forward

BLOCK_FIELDS = (
    "context_start_A", "context_end_A", "anchor_position_A", "anchor_document_A", "anchor_valid_A",
    "labels_AK", "supervised_AK", "target_logprob_AK",
)  # fmt: skip


def blocks_of(batch: AnchorBatch, picked_a: Tensor) -> AnchorBatch:
    """The batch with only the picked blocks; its context stays."""
    return dataclasses.replace(batch, **{n: getattr(batch, n)[picked_a] for n in BLOCK_FIELDS})


def evenly(valid_A: Tensor, share: float) -> Tensor:
    """Indices of `share` of the valid blocks, evenly spaced: every second one for 0.5."""
    at = torch.nonzero(valid_A).flatten()
    n = torch.arange(len(at), device=at.device, dtype=torch.float64)
    return at[torch.floor((n + 1) * share) > torch.floor(n * share)]


@torch.no_grad()
def runs(model: nn.Module, cfg: DrafterConfig, batch: AnchorBatch, head: FrozenHead, chunk_rows: int | None) -> Tensor:
    """Drafts [A] that stand, of every block of the batch."""
    hidden_AKD = forward(getattr(model, "module", model), cfg, batch, head)
    return weighted_cross_entropy(
        hidden_AKD, head.head_VD, batch.labels_AK, batch.supervised_AK, weighting.uniform(), chunk_rows=chunk_rows
    ).run_A


def moved(batch: AnchorBatch, picked_a: Tensor, run_a: Tensor) -> tuple[AnchorBatch, Tensor]:
    """Blocks `picked_a` begin `run_a + 1` tokens further, and which did (bool [A]).

    A block stays where the next start is no legal anchor (its token and the one behind it are supervised) or lies
    behind the batch's context. So the number of supervised blocks, which the loss is divided by, does not change.

    Args:
        batch: with a lookahead of at least K.
        run_a: leading drafts that stand, 0 .. K-1.
    Raises:
        ValueError: no lookahead, or less than K.
    """
    K = batch.labels_AK.shape[1]
    if batch.ahead_labels_AX is None or batch.ahead_labels_AX.shape[1] < 2 * K:
        raise ValueError(f"the batch has no {K} tokens behind its blocks; set StreamConfig.lookahead to the block size")
    step_a = run_a + 1
    mask_aX = batch.ahead_loss_mask_AX[picked_a]
    legal = mask_aX.gather(1, step_a[:, None])[:, 0] & mask_aX.gather(1, step_a[:, None] + 1)[:, 0]
    legal &= batch.context_end_A[picked_a] + step_a <= batch.context_limit_A[picked_a]
    picked_a, step_a = picked_a[legal], step_a[legal]
    window_aK = step_a[:, None] + torch.arange(K, device=step_a.device)
    supervised_aK = batch.ahead_loss_mask_AX[picked_a].gather(1, window_aK)
    supervised_aK[:, 0] = False

    def put(name: str, values: Tensor) -> Tensor:
        return getattr(batch, name).index_copy(0, picked_a, values)

    new = dataclasses.replace(
        batch,
        labels_AK=put("labels_AK", batch.ahead_labels_AX[picked_a].gather(1, window_aK)),
        supervised_AK=put("supervised_AK", supervised_aK),
        target_logprob_AK=put("target_logprob_AK", batch.ahead_logprob_AX[picked_a].gather(1, window_aK)),
        context_end_A=put("context_end_A", batch.context_end_A[picked_a] + step_a),
        anchor_position_A=put("anchor_position_A", batch.anchor_position_A[picked_a] + step_a),
        topk_ids_AKk=None,  # of the old places
        topk_logprobs_AKk=None,
    )
    moved_A = torch.zeros_like(batch.anchor_valid_A).index_fill(0, picked_a, True)
    return new, moved_A
