"""Both verification rules leave the target's distribution unchanged: worked examples and χ² over 120,000 draws."""

import pytest
import torch

from eval.verify import draw, probabilities, target_tokens, verify_exact, verify_rejection

DRAWS = 120_000


def test_exact_example():
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [1, 6, 7], [5, 1, 7]])
    target = torch.tensor([[5, 6, 9, 2], [5, 6, 7, 2], [5, 6, 7, 2], [5, 6, 7, 2]])
    matched, following = verify_exact(drafts, target)
    assert matched.tolist() == [2, 3, 0, 1] and following.tolist() == [9, 2, 5, 6]


def test_draw_is_the_inverse_cdf():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.9999999, 1.0], dtype=torch.float64)
    assert draw(probs.expand(5, 5), uniforms).tolist() == [1, 1, 3, 3, 3]
    assert probabilities(torch.tensor([1.0, 3.0, 2.0]), 0).tolist() == [0, 1, 0]


def chain(seed, V=4, N=2):
    """A target over V tokens and N+1 positions that depends on the prefix, and factorised drafts unlike it."""
    g = torch.Generator().manual_seed(seed)
    p = [torch.softmax(1.5 * torch.randn(V**i, V, generator=g, dtype=torch.float64), -1) for i in range(N + 1)]
    q = torch.softmax(1.5 * torch.randn(N, V, generator=g, dtype=torch.float64), -1)
    return p, q


def along(p, drafts_BN):
    """p_BbV: the target's distribution after each prefix of the drafts."""
    V, rows, prefix = p[0].shape[-1], [], torch.zeros(len(drafts_BN), dtype=torch.long)
    for i, table in enumerate(p):
        rows.append(table[prefix])
        if i < drafts_BN.shape[1]:
            prefix = prefix * V + drafts_BN[:, i]
    return torch.stack(rows, dim=1)


def chi_square_p_value(counts, expected):
    keep = expected > 0
    assert counts[~keep].sum() == 0
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    degrees = torch.tensor(float(keep.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_first_two_tokens_have_the_targets_law(rule, seed):
    """After one cycle at least one token is emitted; the second, if not emitted, follows from the target itself."""
    p, q = chain(seed)
    V, g = 4, torch.Generator().manual_seed(100 + seed)
    u = torch.rand(4, DRAWS, 3, generator=g, dtype=torch.float64)
    if rule == "rejection":
        drafts = draw(q.expand(DRAWS, 2, V), u[0, :, :2])
        matched, following = verify_rejection(along(p, drafts), drafts, q.expand(DRAWS, 2, V), u[1, :, :2], u[2])
    else:
        drafts = q.argmax(-1).expand(DRAWS, 2)
        target = target_tokens(along(p, drafts).log(), 1.0, u[2])
        matched, following = verify_exact(drafts, target)
    first = torch.where(matched >= 1, drafts[:, 0], following)
    plain_second = draw(p[1][first], u[3, :, 0])
    second = torch.where(matched >= 2, drafts[:, 1], torch.where(matched == 1, following, plain_second))
    pair = first * V + second
    expected = (p[0][0][:, None] * p[1]).flatten() * DRAWS
    assert chi_square_p_value(torch.bincount(pair, minlength=V * V).double(), expected) > 1e-3
    third = torch.where(matched == 2, following, -1)  # the bonus token after two accepted drafts
    for a in range(V * V):
        seen = third[(pair == a) & (third >= 0)]
        if len(seen) > 2000:
            assert chi_square_p_value(torch.bincount(seen, minlength=V).double(), p[2][a] * len(seen)) > 1e-4


def test_the_test_can_fail():
    """Accepting argmax drafts with min(1, p/q) of the softmax q is the classic mistake; χ² sees it."""
    p, q = chain(0)
    u = torch.rand(2, DRAWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafts = q.argmax(-1).expand(DRAWS, 2)
    matched, following = verify_rejection(along(p, drafts), drafts, q.expand(DRAWS, 2, 4), u[0, :, :2], u[1])
    first = torch.where(matched >= 1, drafts[:, 0], following)
    assert chi_square_p_value(torch.bincount(first, minlength=4).double(), p[0][0] * DRAWS) < 1e-6


def test_equal_distributions_accept_everything():
    p = torch.softmax(torch.randn(1000, 3, 5, dtype=torch.float64), -1)
    u = torch.rand(3, 1000, 3, dtype=torch.float64)
    drafts = draw(p[:, :2], u[0, :, :2])
    matched, _ = verify_rejection(p, drafts, p[:, :2], u[1, :, :2], u[2])
    assert (matched == 2).all()


def test_acceptance_of_rejection_is_the_overlap():
    """P(first draft stands) = Σ min(p, q)."""
    p, q = chain(5)
    u = torch.rand(3, DRAWS, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drafts = draw(q.expand(DRAWS, 2, 4), u[0, :, :2])
    matched, _ = verify_rejection(along(p, drafts), drafts, q.expand(DRAWS, 2, 4), u[1, :, :2], u[2])
    assert (matched >= 1).double().mean() == pytest.approx(float(torch.minimum(p[0][0], q[0]).sum()), abs=0.005)
