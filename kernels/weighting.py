"""How much each drafted position counts: small pure functions of the drafter's label probabilities.

Legend: A blocks, K block size (slot 0 is the anchor and never supervised).

A weighting is a function `(label_prob_AK, mask_AK) -> weight_AK`, fp32, detached: label_prob is q_k = q(token at
p + k), mask says which slots are supervised, and weights outside the mask are zero. Any such function works with
`kernels.decay_ce.weighted_cross_entropy`; it sees whole blocks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Weighting = Callable[[Tensor, Tensor], Tensor]


def decay(gamma: float) -> Weighting:
    """exp(-(k - 1) / gamma) at slot k (DFlash eq. 4; gamma 7 / 5 / 4 for K 16 / 10 / 8)."""
    if gamma <= 0:
        raise ValueError(f"decay gamma is {gamma}; give a positive number of slots (uniform weighting is `uniform`)")

    def weights(label_prob_AK: Tensor, mask_AK: Tensor) -> Tensor:
        return decay_K(gamma, mask_AK.shape[1], mask_AK.device) * mask_AK

    return weights


def decay_K(gamma: float, K: int, device=None) -> Tensor:
    """The weights [K] by slot; slot 0 gets 1 and is never supervised."""
    k = torch.arange(K, device=device, dtype=torch.float32)
    return torch.exp(-(k - 1).clamp_min(0) / gamma)


def uniform() -> Weighting:
    """1 at every supervised slot."""
    return lambda label_prob_AK, mask_AK: mask_AK.to(torch.float32)


def acceptance(alpha: float = 0.0) -> Weighting:
    """Gradient of the expected number of accepted drafts: w_k = sum_{m>=k} C_m with C_m = prod_{i<=m} q_i.

    d(sum_m C_m) / d(log q_k) = w_k, so the cross-entropy with these detached weights has exactly the gradient of
    -E[accepted drafts] for a drafter that samples its drafts independently. `alpha` smooths q to (1 - alpha) q + alpha
    inside the weights, so that one hard slot does not silence all later ones.
    Unsupervised slots count as q = 1 in the products and as 0 in the sums.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"smoothing alpha is {alpha}; give a number from 0 to 1")

    def weights(label_prob_AK: Tensor, mask_AK: Tensor) -> Tensor:
        smoothed = (1 - alpha) * label_prob_AK.to(torch.float32) + alpha
        reached = torch.cumprod(torch.where(mask_AK, smoothed, 1.0), dim=1) * mask_AK
        return reached.flip(1).cumsum(1).flip(1) * mask_AK

    return weights


def dpace(alpha: float = 0.5) -> Weighting:
    """D-PACE (arXiv 2605.18810): expected-acceptance weights of smoothed probabilities, alpha 0.3-0.7.

    q = [.9, .5, .2], alpha .5: smoothed [.95, .75, .6], products [.95, .7125, .4275], weights [2.09, 1.14, .4275].
    """
    return acceptance(alpha)
