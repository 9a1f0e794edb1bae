"""Which drafted tokens stand, and which token follows them: two rules that leave the target's distribution unchanged.

exact      the target's own token is drawn at every position; a draft stands where it equals it. Any drafts will do.
rejection  draft x ~ q stands with probability min(1, p(x)/q(x)); the first that does not is replaced by a draw from
           norm(max(p - q, 0)). q must be the distribution the draft was really drawn from (Leviathan et al. 2023).

Randomness comes in as uniforms, one per *position of the text*: the exact rule then gives the very text that plain
sampling with the same uniforms gives, at any temperature.

Legend: B sequences, b verified positions (anchor + drafts), N = b - 1 drafts, V vocabulary.
"""

import torch
from torch import Tensor


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last axis, float64; temperature 0 puts everything on the first argmax."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(torch.float64)
    return torch.softmax(logits.to(torch.float64) / temperature, dim=-1)


def draw(probs_V: Tensor, uniform: Tensor) -> Tensor:
    """Tokens by inverse CDF: the first index whose cumulative probability exceeds `uniform` in [0, 1).

    Args:
        probs_V: [..., V] float64, each row summing to a positive total (not necessarily 1).
        uniform: [...] float64.

    Returns:
        int64 of the shape of `uniform`; never an index of probability 0.
    """
    cumulative = probs_V.cumsum(-1)
    token = torch.searchsorted(cumulative, (uniform * cumulative[..., -1])[..., None], right=True)[..., 0]
    # rounding at the very end may point past the last token that has probability
    last = probs_V.shape[-1] - 1 - (probs_V.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(token, last)


def target_tokens(logits: Tensor, temperature: float, uniform: Tensor | None) -> Tensor:
    """The target's token at each position: [..., V] logits -> [...] int64; temperature 0 needs no uniforms."""
    if temperature == 0:
        return logits.argmax(-1)
    return draw(probabilities(logits, temperature), uniform)


def verify_exact(drafts_BN: Tensor, target_Bb: Tensor) -> tuple[Tensor, Tensor]:
    """Leading drafts equal to the target's tokens.

    Args:
        drafts_BN: drafted tokens.
        target_Bb: `target_Bb[:, i]` is the target's token after the anchor and i drafts.

    Returns:
        (matched_B in 0..N, next_B): next is the target's token after the matched drafts (correction or bonus).

    Example: drafts [5, 6, 7], target [5, 6, 9, 2] -> matched 2, next 9.
    """
    matched_B = (drafts_BN == target_Bb[:, :-1]).long().cumprod(-1).sum(-1)
    return matched_B, target_Bb.gather(1, matched_B[:, None])[:, 0]


def verify_rejection(
    p_BbV: Tensor, drafts_BN: Tensor, q_BNV: Tensor, accept_BN: Tensor, next_uniform_Bb: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling.

    Args:
        p_BbV: target probabilities after the anchor and i drafts (float64).
        drafts_BN, q_BNV: drafts and the distributions they were drawn from.
        accept_BN, next_uniform_Bb: uniforms for acceptance, and for the token after i accepted drafts.

    Returns:
        (matched_B, next_B) as `verify_exact`.
    """
    p_draft_BN = p_BbV[:, :-1].gather(2, drafts_BN[..., None])[..., 0]
    q_draft_BN = q_BNV.gather(2, drafts_BN[..., None])[..., 0]
    stands_BN = accept_BN * q_draft_BN < p_draft_BN  # u < p/q without a division
    matched_B = stands_BN.long().cumprod(-1).sum(-1)
    rows_B = torch.arange(len(matched_B), device=matched_B.device)
    p_BV = p_BbV[rows_B, matched_B]
    padded_BbV = torch.cat([q_BNV, torch.zeros_like(p_BbV[:, :1])], dim=1)  # all drafts stand: a draw from p itself
    residual_BV = (p_BV - padded_BbV[rows_B, matched_B]).clamp_min(0)
    # p == q up to rounding leaves no residual; a rejection is then itself a rounding accident, and p is the right law
    residual_BV = torch.where(residual_BV.sum(-1, keepdim=True) > 0, residual_BV, p_BV)
    return matched_B, draw(residual_BV, next_uniform_Bb[rows_B, matched_B])
