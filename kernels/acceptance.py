"""Expected acceptance: what a block of drafts is worth, and how much each slot moves it. Small pure functions.

A drafter that fills a block in one pass draws its drafts independently given the context, so with a_k the chance that
draft k stands, N the number of leading drafts that stand and f(N) a reward,

    C_k = P(N >= k) = a_1 ... a_k                       E[f(N)] = f(0) + sum_k (f(k) - f(k - 1)) C_k
    d E[f(N)] / d log a_k = w_k = sum_{m >= k} (f(m) - f(m - 1)) C_m

exactly. With f(N) = 1 + N this is E[tau] (D-PACE, arXiv 2605.18810, has the same weights, smoothed). Products are sums
of float32 logarithms: fifteen factors of 1e-4 leave float32's range, their logarithm does not.

Legend: A blocks, K block size (slot 0 is the anchor: never drafted), G draws of a group.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


def tau_gains(K: int) -> Tensor:
    """Gains [K] of the reward tau = 1 + N: slot 0 holds f(0), slot k holds f(k) - f(k - 1)."""
    return torch.ones(K, dtype=torch.float64)


def gains_of(reward_K: Tensor) -> Tensor:
    """Gains [K] of any reward given as a table f(0) ... f(K-1).

    Raises:
        ValueError: a value that is not finite.
    """
    reward_K = reward_K.to(torch.float64)
    if not bool(torch.isfinite(reward_K).all()):
        raise ValueError(f"reward {reward_K.tolist()} has a value that is not finite; give one number per length")
    return torch.cat([reward_K[:1], reward_K.diff()])


def leading(mask_AK: Tensor) -> Tensor:
    """Slots that decoding could reach: supervised ones from slot 1 up to the first that is not (end of the answer)."""
    lead = mask_AK.clone()
    lead[:, 1:] = mask_AK[:, 1:].to(torch.uint8).cumprod(1).bool()
    lead[:, 0] = False
    return lead


def log_survival(log_a_AK: Tensor, lead_AK: Tensor) -> Tensor:
    """log C_k, 0 at slot 0 and -inf outside `lead`."""
    total = torch.where(lead_AK, log_a_AK, 0).cumsum(1)
    total = total.masked_fill(~lead_AK, float("-inf"))
    return total.index_fill(1, torch.zeros(1, dtype=torch.long, device=total.device), 0)


def smoothed(log_a_AK: Tensor, alpha: float) -> Tensor:
    """log((1 - alpha) a + alpha): one hard slot must not silence all later ones."""
    if alpha == 0:
        return log_a_AK
    if alpha == 1:
        return torch.zeros_like(log_a_AK)
    log1m, loga = torch.log(log_a_AK.new_tensor([1 - alpha, alpha]))
    return torch.logaddexp(log_a_AK + log1m, loga)


def to_come(log_c_AK: Tensor, gains_K: Tensor) -> Tensor:
    """w_k = sum_{m >= k} gain_m C_m; slot 0 holds E[f(N)] itself."""
    return (log_c_AK.exp() * gains_K).flip(1).cumsum(1).flip(1)


class Expected(NamedTuple):
    value_A: Tensor
    """E[f(N)]"""
    weight_AK: Tensor
    """d value / d log a_k, from smoothed probabilities; 0 outside the leading supervised slots"""
    scale_A: Tensor
    """the value under the smoothed probabilities: what the weights of -log E[f(N)] are divided by"""


def expected(log_a_AK: Tensor, lead_AK: Tensor, gains_K: Tensor, alpha: float = 0.0) -> Expected:
    """Closed form of value and weights; with alpha = 0 the weights are the exact derivative."""
    gains = gains_K.to(log_a_AK)
    exact = to_come(log_survival(log_a_AK, lead_AK), gains)
    soft = to_come(log_survival(smoothed(log_a_AK, alpha), lead_AK), gains) if alpha else exact
    return Expected(exact[:, 0], soft * lead_AK, soft[:, 0])


def accepted_logprob(label_logprob_AK: Tensor, target_logprob_AK: Tensor | None) -> tuple[Tensor, Tensor]:
    """(log a, d log a / d log q) per slot.

    Exact match accepts the drawn draft where it is the text: a = q(y), for greedy text the text itself, for sampled
    text an unbiased draw of it. Rejection sampling on text drawn from the target: a = min(1, q(y) / p(y)), whose
    product is an unbiased estimate of the accepted mass (docs/rl.md), flat where q >= p.
    """
    if target_logprob_AK is None:
        return label_logprob_AK, torch.ones_like(label_logprob_AK)
    ratio = label_logprob_AK - target_logprob_AK.to(label_logprob_AK)
    return ratio.clamp_max(0), (ratio < 0).to(ratio)


@dataclass(frozen=True)
class Group:
    """Drafts drawn instead of summed over: the estimator for rewards that are only known of a draw (GRPO's form)."""

    size: int = 8
    """G: draws per block, all from one set of logits"""
    baseline: Literal["none", "group", "reference"] = "none"
    """subtracted from the reward to come: nothing, the mean of the other draws that came as far, or the reference
    drafter's expectation (GTO's debiasing, arXiv 2509.22134). Never divided by a deviation: an all-equal group has
    none, and it would weigh blocks by difficulty"""
    clip: float = 0.2
    """of the probability ratio to the drafter that drew (PPO); without effect where that is the current one"""


class Draws(NamedTuple):
    hits_GAK: Tensor
    """the draft is the text's token"""
    reached_GAK: Tensor
    """all earlier drafts stood: slots 1 .. N + 1"""
    length_GA: Tensor
    """N"""


def draw(log_q_AK: Tensor, lead_AK: Tensor, size: int, generator: torch.Generator | None) -> Draws:
    """Whether each of `size` drawn drafts equals the text: Bernoulli(q_k(y_k)) per slot, which is all N depends on."""
    shape = (size, *log_q_AK.shape)
    uniform = torch.rand(shape, generator=generator, device=log_q_AK.device, dtype=log_q_AK.dtype)
    hits = (uniform < log_q_AK.exp()) & lead_AK
    stood = torch.cat([torch.ones_like(hits[..., :1]), hits[..., 1:]], 2).to(torch.uint8).cumprod(2).bool()
    reached = torch.cat([torch.zeros_like(stood[..., :1]), stood[..., :-1]], 2) & lead_AK
    return Draws(hits & reached, reached, (hits & reached).sum(2))


def reward_to_come(draws: Draws, gains_K: Tensor) -> Tensor:
    """f(N) - f(k - 1) at reached slots k, else 0 [G, A, K]; the slot that fails gets 0."""
    total_K = gains_K.cumsum(0)
    before_K = torch.cat([total_K[:1], total_K[:-1]])  # f(k - 1) at slot k
    return torch.where(draws.reached_GAK, total_K[draws.length_GA][..., None] - before_K, 0)


def advantages(
    draws: Draws, gains_K: Tensor, lead_AK: Tensor, baseline: str, reference_log_q_AK: Tensor | None = None
) -> Tensor:
    """[G, A, K]: reward to come minus the baseline, 0 where not reached.

    Each baseline is independent of the draw at its slot, so the mean gradient stays that of E[f(N)].
    """
    come = reward_to_come(draws, gains_K)
    if baseline == "none":
        return come
    if baseline == "group":
        others = draws.reached_GAK.sum(0, keepdim=True) - draws.reached_GAK.to(torch.int64)
        base = (come.sum(0, keepdim=True) - come) / others.clamp_min(1)
    else:
        # sum_{m>=k} gain_m C_m / C_{k-1} from the last slot back: no quotient of products that vanish
        a_AK = reference_log_q_AK.exp() * lead_AK
        base = torch.zeros_like(a_AK)
        for k in range(a_AK.shape[1] - 1, 0, -1):
            later = base[:, k + 1] if k + 1 < a_AK.shape[1] else 0
            base[:, k] = a_AK[:, k] * (gains_K[k] + later)
    return torch.where(draws.reached_GAK, come - base, 0)


def surrogate(advantage: Tensor, log_ratio: Tensor, clip: float) -> Tensor:
    """d/d log q of PPO's min(ratio * advantage, clip(ratio) * advantage): ratio * advantage, 0 where clipped."""
    ratio = log_ratio.exp()
    outside = ((advantage > 0) & (ratio > 1 + clip)) | ((advantage < 0) & (ratio < 1 - clip))
    return torch.where(outside, 0, ratio * advantage)
