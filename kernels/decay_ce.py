"""Weighted cross-entropy of drafted blocks through the frozen head, without logits for more than one chunk.

Legend: A blocks, K block size, R rows of one chunk (its supervised slots), V vocabulary, D hidden size, T teacher's k.

With N = 8192 rows and V = 151,936 the logits of one document are 2.5 GB in bf16, and autograd keeps them (and an fp32
copy) until the backward. The head is frozen, so all that a backward needs is grad_hidden: this op computes it in the
forward, chunk by chunk, and keeps [A, K, D] only. One chunk of whole blocks:

    logits_RV = hidden_RD @ head_VD.T              only supervised slots are gathered
    log-sum-exp, label logit, argmax per row       -> label probabilities of whole blocks -> weights
    logits_RV <- weight * (softmax - target)       in place
    grad_hidden_RD = logits_RV @ head_VD

The weights may depend on the label probabilities (`kernels.weighting`) and are detached, as in D-PACE; so the same op
is the supervised objective and the closed-form gradient of the expected acceptance length.
On CUDA the row passes are Triton kernels (`kernels.decay_ce_triton`); the torch functions here are their definition.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.weighting import Weighting


class BlockLoss(NamedTuple):
    """What `weighted_cross_entropy` returns; everything but `numerator` is detached."""

    numerator: Tensor
    """scalar fp32, sum over supervised slots of weight * loss; differentiable with respect to hidden"""
    denominator: Tensor
    """scalar fp32, sum of the weights of these blocks. Training divides by the one of the whole global batch"""
    label_logprob_AK: Tensor
    """fp32, log q(label); 0 where unsupervised"""
    correct_AK: Tensor
    """bool, argmax (lowest id among equals) is the label; False where unsupervised"""
    run_A: Tensor
    """int64, leading correct supervised slots of each block: tau-hat = 1 + mean over blocks with a supervised slot 1"""
    mask_AK: Tensor
    """the supervised slots that all of this is of"""


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at each slot, as its T likeliest tokens.

    The loss is the forward KL between teacher and drafter over T + 1 outcomes, the T tokens and "any other":

        KL = sum_i p_i log(p_i / q_i) + r log(r / q_rest),   r = 1 - sum p_i,   q_rest = 1 - sum q_i

    which never exceeds the KL over the whole vocabulary (data processing) and equals it where the drafter spreads the
    rest as the teacher does. Its gradient is q_j - p_j on the T tokens and q_j (1 - r / q_rest) elsewhere: mass is
    pushed in or out of the tail as a whole. Dropping the tail or renormalising the T tokens would instead teach the
    drafter that nothing else ever happens.
    """

    ids_AKT: Tensor
    """int64, distinct within a row"""
    logprobs_AKT: Tensor
    """float, log p of those tokens"""
    share: float = 1.0
    """loss = (1 - share) * cross-entropy with the label + share * KL"""


def weighted_cross_entropy(
    hidden_AKD: Tensor,
    head_VD: Tensor,
    labels_AK: Tensor,
    mask_AK: Tensor,
    weighting: Weighting,
    *,
    teacher: Teacher | None = None,
    chunk_rows: int | None = None,
    triton: bool | None = None,
) -> BlockLoss:
    """Sum of weighted cross-entropies of the supervised slots, and what the metrics need.

    Args:
        hidden_AKD: the drafter's output, float. Slot k predicts `labels_AK[a, k]`.
        head_VD: the target's head, frozen; rows of the vocabulary. Cast to hidden's dtype if it differs.
        labels_AK: int64; anything at unsupervised slots.
        mask_AK: bool, supervised slots. Others are never multiplied with the head.
        weighting: see `kernels.weighting`.
        teacher: soft labels.
        chunk_rows: rows of logits that exist at once, rounded to whole blocks; None = 1 GB of logits on CUDA; on a CPU
            512 rows (matmuls gain nothing beyond) and at most 64 MB.
        triton: None = on CUDA. True on a CPU needs TRITON_INTERPRET=1.

    Raises:
        ValueError: shapes do not fit.
    """
    A, K, D = hidden_AKD.shape
    if head_VD.shape[1] != D or labels_AK.shape != (A, K) or mask_AK.shape != (A, K):
        raise ValueError(
            f"hidden {tuple(hidden_AKD.shape)}, head {tuple(head_VD.shape)}, labels {tuple(labels_AK.shape)} and mask "
            f"{tuple(mask_AK.shape)} do not fit; give [A, K, D], [V, D], [A, K] and [A, K]"
        )
    numerator, denominator, logprob, correct = _Op.apply(
        hidden_AKD, head_VD, labels_AK, mask_AK, weighting, teacher, chunk_blocks_for(hidden_AKD, head_VD, chunk_rows),
        hidden_AKD.is_cuda if triton is None else triton,
    )  # fmt: skip
    return BlockLoss(numerator, denominator, logprob, correct, leading_run(correct, mask_AK), mask_AK)


def chunk_blocks_for(hidden_AKD: Tensor, head_VD: Tensor, chunk_rows: int | None) -> int:
    """Whole blocks of a chunk of `chunk_rows` rows, at least one; the default is `weighted_cross_entropy`'s."""
    if chunk_rows is None:
        row_bytes = head_VD.shape[0] * hidden_AKD.element_size()
        chunk_rows = (1 << 30) // row_bytes if hidden_AKD.is_cuda else min(512, (1 << 26) // row_bytes)
    return max(1, chunk_rows // hidden_AKD.shape[1])


def leading_run(correct_AK: Tensor, mask_AK: Tensor) -> Tensor:
    """Leading correct drafts [A] per block: slots 1.. until the first that is wrong or unsupervised.

    The golden case of blocks with 3, 2, 1 and 0 leading hits has mean 1.5; a product of per-position accuracies gives
    1.219 or 1.734 depending on how the later hits fall.
    """
    return (correct_AK & mask_AK)[:, 1:].to(torch.int64).cumprod(1).sum(1)


class _Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_AKD, head_VD, labels_AK, mask_AK, weighting, teacher, chunk_blocks, triton):
        A, K, D = hidden_AKD.shape
        device, wide = hidden_AKD.device, torch.promote_types(hidden_AKD.dtype, torch.float32)
        head = head_VD.to(hidden_AKD.dtype)
        need_grad = ctx.needs_input_grad[0]
        grad = torch.zeros_like(hidden_AKD) if need_grad else None
        logprob_AK = torch.zeros(A, K, device=device, dtype=wide)
        correct_AK = torch.zeros(A, K, device=device, dtype=torch.bool)
        numerator = torch.zeros((), device=device, dtype=wide)
        denominator = torch.zeros((), device=device, dtype=wide)
        blocks = torch.nonzero(mask_AK.any(1)).flatten()
        buffer = None
        for first in range(0, blocks.numel(), chunk_blocks):
            chunk_a = blocks[first : first + chunk_blocks]
            mask_aK = mask_AK[chunk_a]
            rows = (chunk_a[:, None] * K + torch.arange(K, device=device))[mask_aK]  # of the flattened [A*K]
            x = hidden_AKD.view(A * K, D)[rows]
            if buffer is None:  # the first chunk is the largest or equal; later ones use its first rows
                most = int(mask_AK.sum()) if blocks.numel() <= chunk_blocks else chunk_blocks * K
                buffer = torch.empty(most, head.shape[0], device=device, dtype=x.dtype)
            logits = torch.mm(x, head.T, out=buffer[: rows.numel()])
            labels = labels_AK.view(-1)[rows]
            soft = None if teacher is None else _TeacherRows.gather(teacher, rows, logits)
            step = _triton_step if triton else _torch_step
            label_logprob, hit, finish = step(logits, labels, soft)
            logprob_AK.view(-1)[rows] = label_logprob
            correct_AK.view(-1)[rows] = hit
            prob_aK = torch.zeros(mask_aK.shape, device=device, dtype=wide)
            prob_aK[mask_aK] = label_logprob.exp()
            weight = weighting(prob_aK, mask_aK)[mask_aK].to(wide)
            loss = -label_logprob if soft is None else (1 - soft.share) * -label_logprob + soft.share * soft.kl
            numerator += (weight * loss).sum()
            denominator += weight.sum()
            if need_grad:
                grad.view(A * K, D)[rows] = finish(weight, head)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(denominator, logprob_AK, correct_AK)
        return numerator, denominator, logprob_AK, correct_AK

    @staticmethod
    def backward(ctx, grad_numerator, *_):
        (grad,) = ctx.saved_tensors
        return (grad * grad_numerator.to(grad.dtype), *[None] * 7)


class _TeacherRows:
    """Soft labels of the rows of one chunk. The teacher's tokens are taken out of the logits (set to -inf), so that
    what remains there is the drafter's tail, whose mass is then known without cancellation (1 - sum q would lose all
    digits once the drafter is sure)."""

    def __init__(self, ids_RT: Tensor, p_RT: Tensor, logits_RT: Tensor, share: float):
        self.ids_RT, self.p_RT, self.logits_RT, self.share = ids_RT, p_RT, logits_RT, share
        self.kl = torch.empty(0)

    @classmethod
    def gather(cls, teacher: Teacher, rows: Tensor, logits_RV: Tensor) -> "_TeacherRows":
        wide = torch.promote_types(logits_RV.dtype, torch.float32)
        ids = teacher.ids_AKT.flatten(0, 1)[rows]
        p = teacher.logprobs_AKT.flatten(0, 1)[rows].to(wide).exp()
        return cls(ids, p, logits_RV.gather(1, ids).to(wide), teacher.share)

    def merge(self, tail_lse_R: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exp of the whole row, and log of the drafter's tail mass; sets `kl`."""
        lse = torch.logaddexp(tail_lse_R, self.logits_RT.logsumexp(1))
        log_tail = tail_lse_R - lse
        rest = self.rest
        kl = (torch.xlogy(self.p_RT, self.p_RT) - self.p_RT * (self.logits_RT - lse[:, None])).sum(1)
        self.kl = kl + torch.xlogy(rest, rest) - rest * log_tail
        return lse, log_tail

    @property
    def rest(self) -> Tensor:
        """The teacher's tail mass, at least 0 (probabilities of a store are rounded)."""
        return (1 - self.p_RT.sum(1)).clamp_min(0)

    def tail_factor(self, log_tail_R: Tensor) -> Tensor:
        """Gradient in the tail = factor * (softmax over the tail): (1-s) q_j + s q_j (1 - r / q_rest)."""
        return log_tail_R.exp() - self.share * self.rest

    def top_grad(self, lse_R: Tensor) -> Tensor:
        """Gradient [R, T] on the teacher's tokens, without the hard label's -(1-s)."""
        return torch.exp(self.logits_RT - lse_R[:, None]) - self.share * self.p_RT


def label_hits(logits_RV: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Label's logit [R, 1], largest logit [R, 1], and whether the argmax is the label [R] (lowest id among equals)."""
    label_logit = logits_RV.gather(1, labels_R[:, None])
    top = logits_RV.amax(1, keepdim=True)
    hit = (label_logit == top).flatten()
    if bool(hit.any()):
        at = hit.nonzero().flatten()
        hit[at] = (logits_RV[at] == top[at]).to(torch.uint8).argmax(1) == labels_R[at]
    return label_logit, top, hit


def _torch_step(logits_RV: Tensor, labels_R: Tensor, soft: _TeacherRows | None):
    """Row statistics of a chunk, consuming its logits; and the function that turns weights into grad_hidden.

    Passes over [R, V]: maximum, softmax in place, and the two matmuls. The weights enter after the second matmul,
    as grad_hidden = w * ((softmax - target) @ head), and the target as -1 at one column per row.
    """
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    label_logit, top, hit = label_hits(logits_RV, labels_R)
    if soft is not None:
        logits_RV.scatter_(1, soft.ids_RT, float("-inf"))
        top = logits_RV.amax(1, keepdim=True)
    if logits_RV.dtype == wide:
        probs = torch.softmax(logits_RV, 1, out=logits_RV)
    else:
        probs = torch.softmax(logits_RV, 1, dtype=wide)
    # exact even where the label's probability underflows: log-sum-exp = max - log(max probability), and that is >= 1/V
    lse = top.flatten().to(wide) - probs.amax(1).log()
    log_tail = None
    if soft is not None:
        lse, log_tail = soft.merge(lse)
    label_logprob = label_logit.flatten().to(wide) - lse

    def finish(weight_R: Tensor, head_VD: Tensor) -> Tensor:
        minus = -torch.ones_like(weight_R)
        if soft is not None:
            probs.mul_(soft.tail_factor(log_tail)[:, None])
            probs.scatter_(1, soft.ids_RT, soft.top_grad(lse))
            minus = minus * (1 - soft.share)
        probs.scatter_add_(1, labels_R[:, None], minus[:, None])
        return torch.mm(probs.to(head_VD.dtype), head_VD) * weight_R[:, None].to(head_VD.dtype)

    return label_logprob, hit, finish


def _triton_step(logits_RV: Tensor, labels_R: Tensor, soft: _TeacherRows | None):
    """The same with two Triton passes: statistics, then the gradient in place."""
    from kernels.decay_ce_triton import row_gradient_, row_statistics

    label_logit = logits_RV.gather(1, labels_R[:, None]).flatten().float()
    if soft is not None:
        logits_RV.scatter_(1, soft.ids_RT, float("-inf"))
    lse, top, argmax = row_statistics(logits_RV)
    tail_lse, log_tail = lse, None
    if soft is not None:
        lse, log_tail = soft.merge(lse)
        best, which = soft.logits_RT.max(1)
        ids = soft.ids_RT.gather(1, which[:, None]).flatten()
        argmax = torch.where((best > top) | ((best == top) & (ids < argmax)), ids, argmax)
    label_logprob = label_logit - lse

    def finish(weight_R: Tensor, head_VD: Tensor) -> Tensor:
        if soft is None:
            row_gradient_(logits_RV, labels_R, tail_lse, weight_R, weight_R)
        else:
            row_gradient_(
                logits_RV, labels_R, tail_lse, weight_R * soft.tail_factor(log_tail), weight_R * (1 - soft.share)
            )
            top_grad = soft.top_grad(lse) - (1 - soft.share) * (soft.ids_RT == labels_R[:, None])
            logits_RV.scatter_(1, soft.ids_RT, (weight_R[:, None] * top_grad).to(logits_RV.dtype))
        return torch.mm(logits_RV, head_VD)

    return label_logprob, argmax == labels_R, finish
