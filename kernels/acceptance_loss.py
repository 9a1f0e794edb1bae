"""The RL objective of drafted blocks through the frozen head, without logits for more than one chunk.

    sum over blocks of  -log E[f(N)]  (or -E[f(N)])  +  sum_k floor_k CE_k  +  KL to a reference drafter, to the target

Like `kernels.decay_ce`, whose loss is the `floor` here, the op computes grad_hidden in its forward, chunk by chunk of
whole blocks, since the head is frozen. Per chunk of R supervised slots:

    logits_RV = hidden_RD @ head_VD.T
    q = softmax(logits), q_T = softmax(logits / T)     log-probability of the label, argmax hit
    whole blocks -> value, weight of every slot        `kernels.acceptance`
    grad_logits_RV = floor (q - e_y) + weight / T (q_T - e_y) + KL terms
    grad_hidden_RD = grad_logits_RV @ head_VD

Two buffers of chunk size exist (one at T = 1). It is torch on every device: against the two head matmuls of a chunk
(4 D flops per logit, D = 4096) the eight passes over its logits are memory traffic of about a quarter of their time on
an H200, and `decay_ce`'s Triton passes would save a part of that alone.

Legend: A blocks, K block size, R rows of one chunk (its supervised slots), V vocabulary, D hidden size, G draws.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import acceptance
from kernels.decay_ce import chunk_blocks_for, label_hits, leading_run


@dataclass(frozen=True)
class Acceptance:
    """What of the expected acceptance is maximised."""

    gains_K: Tensor
    """reward table as gains, `acceptance.gains_of`"""
    log: bool = True
    """-log E[f(N)], which weighs hard blocks more; False: -E[f(N)]"""
    temperature: float = 1.0
    """of the drafts: q_T tends to the argmax draft that serving uses as T falls"""
    alpha: float = 0.0
    """smoothing of the weights, 0 is the exact gradient"""
    target_logprob_AK: Tensor | None = None
    """log p of the labels: rejection sampling; None: exact match"""
    group: acceptance.Group | None = None
    """draw drafts instead of the closed form (exact match only)"""
    generator: torch.Generator | None = None
    """of the group's draws"""
    rollout_AKD: Tensor | None = None
    """hidden states of the drafter that draws; None: the current one"""


@dataclass(frozen=True)
class Reference:
    """KL over the whole vocabulary to a frozen drafter, at the supervised slots of some blocks."""

    hidden_AKD: Tensor
    """the frozen drafter's output; anything at other blocks"""
    blocks_A: Tensor
    """bool: blocks that pay for it"""
    forward: float = 0.0
    """weight of KL(reference || drafter), which keeps mass"""
    reverse: float = 0.0
    """weight of KL(drafter || reference), which may sharpen"""


@dataclass(frozen=True)
class Drafted:
    """The target's distribution behind the drafts that were really verified, as its T likeliest tokens and the rest.

    Forward KL at accepted slots teaches what stands there, reverse KL at rejected ones takes mass from where the target
    has none (Draft-OPD, arXiv 2605.29343).
    """

    ids_AKT: Tensor
    """int64, distinct within a row"""
    logprobs_AKT: Tensor
    """float, log p of those tokens given the drafts before"""
    forward_AK: Tensor
    """weight of KL(target || drafter) at each slot"""
    reverse_AK: Tensor
    """weight of KL(drafter || target) at each slot"""


SMALLEST_REST = 1e-4
"""probability that the target is taken to leave outside its T tokens at least: stored log-probabilities are rounded to
three digits, and reverse KL divides by the rest"""


class AcceptanceLoss(NamedTuple):
    """As `decay_ce.BlockLoss`, and the parts; everything but `numerator` is detached."""

    numerator: Tensor
    label_logprob_AK: Tensor
    """at temperature 1; 0 where unsupervised"""
    correct_AK: Tensor
    run_A: Tensor
    mask_AK: Tensor
    value_A: Tensor
    """E[f(N)] at the draft temperature (the group's mean where it draws); f(0) where nothing is supervised"""
    kl: Tensor
    """scalar: the weighted divergences' sum, from the reference and from the target"""


def acceptance_loss(
    hidden_AKD: Tensor,
    head_VD: Tensor,
    labels_AK: Tensor,
    mask_AK: Tensor,
    goal: Acceptance,
    *,
    floor_K: Tensor | None = None,
    reference: Reference | None = None,
    drafted: Drafted | None = None,
    chunk_rows: int | None = None,
) -> AcceptanceLoss:
    """The sum over blocks of the terms above.

    Args:
        hidden_AKD: the drafter's output, float. Slot k predicts `labels_AK[a, k]`.
        head_VD: the target's frozen head.
        labels_AK: int64; mask_AK: bool, supervised slots. The products of a block end at its first unsupervised slot.
        reference, drafted: divergences, see there.
        floor_K: weights of the cross-entropy at temperature 1, by slot; None: none.
        chunk_rows: as in `decay_ce.weighted_cross_entropy`.

    Raises:
        ValueError: a combination that has no meaning.
    """
    if goal.group is not None and goal.target_logprob_AK is not None:
        raise ValueError(
            "a group estimates exact-match verification: for rejection sampling it would need the target's "
            "distribution behind every drawn prefix; take the closed form"
        )
    if goal.group is not None and goal.group.baseline == "reference" and reference is None:
        raise ValueError("the baseline 'reference' needs a reference drafter; give one, or take another baseline")
    if goal.temperature <= 0:
        raise ValueError(f"draft temperature {goal.temperature} is not positive; 0.5 is close to argmax drafts")
    numerator, *rest = _Op.apply(
        hidden_AKD, head_VD, labels_AK, mask_AK, goal, floor_K, reference, drafted,
        chunk_blocks_for(hidden_AKD, head_VD, chunk_rows),
    )  # fmt: skip
    logprob, correct, value, kl = rest
    return AcceptanceLoss(numerator, logprob, correct, leading_run(correct, mask_AK), mask_AK, value, kl)


class _Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_AKD, head_VD, labels_AK, mask_AK, goal, floor_K, reference, drafted, chunk_blocks):
        A, K, D = hidden_AKD.shape
        device, wide = hidden_AKD.device, torch.promote_types(hidden_AKD.dtype, torch.float32)
        head = head_VD.to(hidden_AKD.dtype)
        need_grad = ctx.needs_input_grad[0]
        grad = torch.zeros_like(hidden_AKD) if need_grad else None
        logprob_AK = torch.zeros(A, K, device=device, dtype=wide)
        correct_AK = torch.zeros(A, K, device=device, dtype=torch.bool)
        gains_K = goal.gains_K.to(device, wide)
        value_A = gains_K[0].repeat(A)
        numerator, kl = torch.zeros((), device=device, dtype=wide), torch.zeros((), device=device, dtype=wide)
        blocks = torch.nonzero(mask_AK.any(1)).flatten()
        scratch = _Scratch()
        for first in range(0, blocks.numel(), chunk_blocks):
            chunk_a = blocks[first : first + chunk_blocks]
            c = _Chunk(
                chunk_a, hidden_AKD, head, labels_AK, mask_AK, goal.temperature, scratch,
                keep_logits=reference is not None or drafted is not None,
            )  # fmt: skip
            logprob_AK.view(-1)[c.rows_R] = c.logprob_R
            correct_AK.view(-1)[c.rows_R] = c.hit_R
            c.reward(goal, gains_K, reference)
            value_A[chunk_a] = c.value_a
            numerator += c.loss
            if floor_K is not None:
                c.floor(floor_K.to(device, wide))
                numerator -= (c.floor_R * c.logprob_R).sum()
            if reference is not None and (reference.forward or reference.reverse):
                kl += c.divergence(reference)
            if drafted is not None:
                kl += c.distil(drafted)
            if need_grad:
                grad.view(A * K, D)[c.rows_R] = c.grad_hidden()
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(logprob_AK, correct_AK, value_A, kl)
        return numerator + kl, logprob_AK, correct_AK, value_A, kl

    @staticmethod
    def backward(ctx, grad_numerator, *_):
        (grad,) = ctx.saved_tensors
        return (grad * grad_numerator.to(grad.dtype), *[None] * 8)


class _Scratch:
    """Memory for what a chunk makes of size [R, V], used again by the next chunk: fresh pages of 64 MB, which the
    C allocator gives back each time, cost as much as the softmax that fills them."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def empty(self, name: str, rows: int, like_VD: Tensor, dtype: torch.dtype) -> Tensor:
        held = self.held.get(name)
        if held is None or len(held) < rows:
            held = self.held[name] = torch.empty(rows, like_VD.shape[0], device=like_VD.device, dtype=dtype)
        return held[:rows]


class _Chunk:
    """Supervised slots of whole blocks: their logits, what is asked of them, and the gradient that answers."""

    def __init__(
        self, chunk_a, hidden_AKD, head_VD, labels_AK, mask_AK, temperature: float, scratch: _Scratch, keep_logits: bool
    ):
        K = mask_AK.shape[1]
        self.chunk_a, self.head_VD, self.temperature = chunk_a, head_VD, temperature
        self.mask_aK = mask_AK[chunk_a]
        self.lead_aK = acceptance.leading(self.mask_aK)
        self.rows_R = (chunk_a[:, None] * K + torch.arange(K, device=mask_AK.device))[self.mask_aK]
        self.labels_R = labels_AK.reshape(-1)[self.rows_R]
        self.wide = torch.promote_types(hidden_AKD.dtype, torch.float32)
        R = len(self.rows_R)
        self.logits_RV = self._logits(hidden_AKD, scratch.empty("logits", R, head_VD, head_VD.dtype))
        label_logit, top, self.hit_R = label_hits(self.logits_RV, self.labels_R)
        self.label_logit, self.top = label_logit.to(self.wide), top.to(self.wide)
        if temperature != 1:
            out = scratch.empty("drawn", R, head_VD, self.wide)
            drawn = self._softmax(self.logits_RV, temperature, self.label_logit, self.top, out)
        out = self.logits_RV
        if keep_logits or out.dtype != self.wide:
            out = scratch.empty("q", R, head_VD, self.wide)
        self.q_RV, self.logprob_R, self.lse_R = self._softmax(self.logits_RV, 1.0, self.label_logit, self.top, out)
        self.drawn_RV, self.drawn_logprob_R = (self.q_RV, self.logprob_R) if temperature == 1 else drawn[:2]
        self.extra_RV: Tensor | None = None  # of grad_logits, from terms without a closed shape
        self.floor_R: Tensor | None = None

    def _logits(self, hidden_AKD: Tensor, out: Tensor | None = None) -> Tensor:
        rows = hidden_AKD.reshape(-1, hidden_AKD.shape[-1])[self.rows_R]
        return torch.mm(rows.to(self.head_VD.dtype), self.head_VD.T, out=out)

    def _softmax(self, logits, temperature, label_logit, top, out=None):
        """Probabilities (in `out`, which may be the logits), label's log-probability, log-sum-exp of logits / T."""
        if temperature != 1:
            logits = torch.div(logits.to(self.wide), temperature, out=out)
        if out is not None and logits.dtype == out.dtype:
            probs = torch.softmax(logits, 1, out=out)
        else:
            probs = torch.softmax(logits, 1, dtype=self.wide)
        p_R = probs.gather(1, self.labels_R[:, None]).flatten()
        lse = label_logit / temperature - p_R.log()[:, None]
        # exact even where the label's probability underflows: log-sum-exp = max - log(max probability)
        rare = torch.nonzero(p_R < 1e-30).flatten()
        lse[rare] = top[rare] / temperature - probs[rare].amax(1, keepdim=True).log()
        return probs, (label_logit / temperature - lse).flatten(), lse

    def spread(self, values_R: Tensor) -> Tensor:
        """By block and slot, 0 where unsupervised."""
        out = torch.zeros(self.mask_aK.shape, device=values_R.device, dtype=self.wide)
        out[self.mask_aK] = values_R.to(self.wide)
        return out

    def reward(self, goal: Acceptance, gains_K: Tensor, reference: Reference | None) -> None:
        """Sets value_a, loss, and push_R: how much the log-probability of the label at T is to rise."""
        log_q_aK = self.spread(self.drawn_logprob_R)
        if goal.group is None:
            target = None if goal.target_logprob_AK is None else goal.target_logprob_AK[self.chunk_a]
            log_a_aK, slope_aK = acceptance.accepted_logprob(log_q_aK, target)
            e = acceptance.expected(log_a_aK, self.lead_aK, gains_K, goal.alpha)
            self.value_a, push_aK = e.value_A, e.weight_AK * slope_aK
            scale_a = e.scale_A
        else:
            push_aK = self._draw(goal, gains_K, reference, log_q_aK)
            scale_a = self.value_a
        if goal.log:
            push_aK = push_aK / scale_a[:, None]
        self.loss = -(self.value_a.log() if goal.log else self.value_a).sum()
        self.push_R = push_aK[self.mask_aK]
        if goal.group is not None and goal.log and self.extra_RV is not None:
            self.extra_RV /= scale_a[:, None].expand_as(push_aK)[self.mask_aK][:, None]

    def _draw(self, goal: Acceptance, gains_K: Tensor, reference: Reference | None, log_q_aK: Tensor) -> Tensor:
        group, T = goal.group, self.temperature
        drawing_aK, drawing_RV = log_q_aK, self.drawn_RV
        if goal.rollout_AKD is not None:
            drawing_RV, drawing_aK = self._other(goal.rollout_AKD, T)
        draws = acceptance.draw(drawing_aK, self.lead_aK, group.size, goal.generator)
        reference_aK = self._other(reference.hidden_AKD, T)[1] if group.baseline == "reference" else None
        advantage = acceptance.advantages(draws, gains_K, self.lead_aK, group.baseline, reference_aK)
        total_K = gains_K.cumsum(0)
        self.value_a = total_K[draws.length_GA].mean(0)
        push = acceptance.surrogate(advantage, (log_q_aK - drawing_aK)[None], group.clip)
        if group.baseline != "none":  # the failing draft counts too: which token it was
            self._failures(draws, advantage, drawing_RV, goal)
        return (push * draws.hits_GAK).mean(0)

    def _failures(self, draws, advantage, drawing_RV: Tensor, goal: Acceptance) -> None:
        """Adds the gradient of the drafts that were not the text's token: one token per group, drawn given that."""
        group, T = goal.group, self.temperature
        self.extra_RV = torch.zeros_like(self.q_RV)
        failed_GR = (draws.reached_GAK & ~draws.hits_GAK)[:, self.mask_aK]
        other_RV = drawing_RV.scatter(1, self.labels_R[:, None], 0.0)
        for g in range(group.size):
            r = torch.nonzero(failed_GR[g] & (other_RV.sum(1) > 0)).flatten()
            token_r = torch.multinomial(other_RV[r], 1, generator=goal.generator)
            ratio = (self.drawn_RV[r].gather(1, token_r) / drawing_RV[r].gather(1, token_r)).log().flatten()
            push_r = acceptance.surrogate(advantage[g][self.mask_aK][r], ratio, group.clip) / (group.size * T)
            self.extra_RV[r] += push_r[:, None] * self.drawn_RV[r]
            self.extra_RV.index_put_((r, token_r.flatten()), -push_r, accumulate=True)

    def _other(self, hidden_AKD: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Another drafter's probabilities and label log-probabilities at these slots."""
        logits = self._logits(hidden_AKD)
        label, top = logits.gather(1, self.labels_R[:, None]), logits.amax(1, keepdim=True)
        probs, logprob_R, _ = self._softmax(logits, temperature, label.to(self.wide), top.to(self.wide))
        return probs, self.spread(logprob_R)

    def floor(self, floor_K: Tensor) -> None:
        self.floor_R = floor_K.expand(self.mask_aK.shape)[self.mask_aK]

    def divergence(self, reference: Reference) -> Tensor:
        """Weighted KL both ways at the slots of the paying blocks; their gradient goes into extra_RV."""
        at = reference.blocks_A[self.chunk_a][:, None].expand(self.mask_aK.shape)[self.mask_aK]
        r = torch.nonzero(at).flatten()
        if not r.numel():
            return self.loss.new_zeros(())
        rows = reference.hidden_AKD.reshape(-1, reference.hidden_AKD.shape[-1])[self.rows_R[r]]
        log_p = torch.log_softmax((rows.to(self.head_VD.dtype) @ self.head_VD.T).to(self.wide), 1)
        log_q, q, p = self.logits_RV[r].to(self.wide) - self.lse_R[r], self.q_RV[r], log_p.exp()
        difference = log_q - log_p
        reverse_r = (q * difference).sum(1, keepdim=True)
        total = -reference.forward * (p * difference).sum() + reference.reverse * reverse_r.sum()
        grad = reference.forward * (q - p) + reference.reverse * q * (difference - reverse_r)
        if self.extra_RV is None:
            self.extra_RV = torch.zeros_like(self.q_RV)
        self.extra_RV[r] += grad
        return total

    def distil(self, drafted: Drafted) -> Tensor:
        """Both weighted KL between T + 1 outcomes, the target's T tokens and any other; gradient into extra_RV."""
        forward_R, reverse_R = (w[self.chunk_a][self.mask_aK] for w in (drafted.forward_AK, drafted.reverse_AK))
        r = torch.nonzero((forward_R > 0) | (reverse_R > 0)).flatten()
        if not r.numel():
            return self.loss.new_zeros(())
        f, b = forward_R[r].to(self.wide)[:, None], reverse_R[r].to(self.wide)[:, None]
        ids_rT = drafted.ids_AKT.flatten(0, 1)[self.rows_R[r]]
        p_rT = drafted.logprobs_AKT.flatten(0, 1)[self.rows_R[r]].to(self.wide).exp()
        p_rest = (1 - p_rT.sum(1, keepdim=True)).clamp_min(SMALLEST_REST)
        q_rV = self.q_RV[r]
        log_q_rT = (self.logits_RV[r].gather(1, ids_rT) - self.lse_R[r]).to(self.wide)
        q_rT, q_rest = log_q_rT.exp(), q_rV.scatter(1, ids_rT, 0.0).sum(1, keepdim=True).clamp_min(1e-30)
        gap_rT, gap_rest = log_q_rT - p_rT.clamp_min(1e-30).log(), q_rest.log() - p_rest.log()
        reverse_r = (q_rT * gap_rT).sum(1, keepdim=True) + q_rest * gap_rest
        forward_r = -(p_rT * gap_rT).sum(1, keepdim=True) - p_rest * gap_rest
        grad_rV = q_rV * (f * (1 - p_rest / q_rest) + b * (gap_rest - reverse_r))
        grad_rV.scatter_(1, ids_rT, f * (q_rT - p_rT) + b * q_rT * (gap_rT - reverse_r))
        if self.extra_RV is None:
            self.extra_RV = torch.zeros_like(self.q_RV)
        self.extra_RV[r] += grad_rV
        return (f * forward_r + b * reverse_r).sum()

    def grad_hidden(self) -> Tensor:
        push_R = self.push_R / self.temperature
        if self.temperature == 1:
            both = push_R if self.floor_R is None else push_R + self.floor_R
            grad = self.q_RV.mul_(both[:, None])
        else:
            grad, both = self.drawn_RV.mul_(push_R[:, None]), push_R
            if self.floor_R is not None:
                grad, both = grad.addcmul_(self.q_RV, self.floor_R[:, None]), both + self.floor_R
        if self.extra_RV is not None:
            grad += self.extra_RV
        grad.scatter_add_(1, self.labels_R[:, None], -both[:, None])
        return grad.to(self.head_VD.dtype) @ self.head_VD
