"""The RL objective: its gradient is the derivative of its value, and drawing drafts has the same gradient on average.

Legend: A blocks, K block size, V vocabulary, D hidden size, G draws.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from kernels import acceptance, weighting
from kernels.acceptance_loss import Acceptance, Drafted, Reference, acceptance_loss

A, K, V, D = 5, 6, 11, 7


@pytest.fixture
def blocks():
    """hidden, head, labels, mask (one block cut by the end, one with a hole, one with nothing), target log-probs."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(A, K, D, generator=g, dtype=torch.float64)
    head = torch.randn(V, D, generator=g, dtype=torch.float64)
    labels = torch.randint(V, (A, K), generator=g)
    mask = torch.ones(A, K, dtype=torch.bool)
    mask[:, 0] = False
    mask[1, 4:] = False
    mask[2, 2] = False
    mask[3] = False
    target = -2.5 * torch.rand(A, K, generator=g, dtype=torch.float64)
    return hidden, head, labels, mask, target


def directional_error(f, hidden, epsilon=1e-5, directions=4):
    """Largest relative difference of df along random directions to central differences."""
    x = hidden.clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(x), x)
    worst = 0.0
    for seed in range(directions):
        d = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed), dtype=hidden.dtype)
        numeric = float(f(hidden + epsilon * d) - f(hidden - epsilon * d)) / (2 * epsilon)
        worst = max(worst, abs(float((grad * d).sum()) - numeric) / max(abs(numeric), 1e-3))
    return worst


FLOORS = {"none": None, "decay": weighting.decay_K(4.0, K), "uniform": torch.ones(K)}
REWARDS = {
    "tau": acceptance.tau_gains(K),
    "concave": acceptance.gains_of(torch.tensor([1.0, 1.8, 2.3, 2.5, 2.6, 2.65])),
}


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("log", [True, False])
def test_gradient_is_the_derivative(blocks, floor, verification, log):
    hidden, head, labels, mask, target = blocks
    for reward, temperature, kl in itertools.product(REWARDS, (1.0, 0.6), ((0, 0), (0.3, 0.0), (0.0, 0.3))):
        goal = Acceptance(
            REWARDS[reward], log=log, temperature=temperature,
            target_logprob_AK=target if verification == "rejection" else None,
        )  # fmt: skip
        reference = Reference(hidden.flip(0), torch.tensor([True, False, True, True, False]), *kl)

        def value(x, goal=goal, reference=reference):
            return acceptance_loss(
                x, head, labels, mask, goal, floor_K=FLOORS[floor], reference=reference, chunk_rows=2 * K
            ).numerator

        assert directional_error(value, hidden) <= 1e-6


def test_distilled_divergences_are_differentiated(blocks):
    hidden, head, labels, mask, _ = blocks
    other = torch.randn(A, K, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(-1)
    logprobs, ids = other.topk(4)
    k = torch.arange(K)
    for accepted in (-1, 2, K):
        drafted = Drafted(
            ids, logprobs, (k <= accepted).expand(A, K) * 0.7, (k > accepted) * (0.8 ** (k - 1)).expand(A, K)
        )
        goal = Acceptance(acceptance.tau_gains(K), temperature=0.6)

        def value(x, drafted=drafted, goal=goal):
            return acceptance_loss(x, head, labels, mask, goal, drafted=drafted, chunk_rows=2 * K).numerator

        assert directional_error(value, hidden) <= 1e-6
    # the target's own distribution: both divergences vanish
    own = (hidden @ head.T).log_softmax(-1)
    logprobs, ids = own.topk(V - 3)
    kl = acceptance_loss(hidden, head, labels, mask, goal, drafted=Drafted(ids, logprobs, mask * 1.0, mask * 1.0)).kl
    assert abs(float(kl)) < 1e-3


def test_value_is_the_expectation_over_all_drafts(blocks):
    """E[τ] of drafts drawn token by token, by enumeration of hits."""
    hidden, head, labels, mask, _ = blocks
    out = acceptance_loss(hidden, head, labels, mask, Acceptance(acceptance.tau_gains(K), temperature=0.7))
    q = torch.softmax(hidden @ head.T / 0.7, -1).gather(2, labels[..., None])[..., 0]
    for a, end in ((0, 5), (1, 3), (2, 1), (3, 0)):  # slots that decoding can reach
        expected = 0.0
        for hits in itertools.product((0, 1), repeat=end):
            p = math.prod(float(q[a, k + 1]) if h else 1 - float(q[a, k + 1]) for k, h in enumerate(hits))
            expected += p * (1 + next((k for k, h in enumerate(hits) if not h), end))
        assert float(out.value_A[a]) == pytest.approx(expected, rel=1e-12)


def test_rejection_sampling_has_this_expected_length():
    """On text drawn from the target, the mean of 1 + Σ Π min(1, q/p) is the simulated τ of speculative sampling."""
    rng, n, steps = np.random.default_rng(1), 200_000, 3
    p, q = rng.dirichlet(np.ones(4), size=steps), rng.dirichlet(np.ones(4), size=steps)
    drafts = np.stack([rng.choice(4, size=n, p=q[k]) for k in range(steps)], 1)
    ratio = np.stack([p[k][drafts[:, k]] / q[k][drafts[:, k]] for k in range(steps)], 1)
    simulated = 1 + (rng.random((n, steps)) < ratio).cumprod(1).sum(1)
    text = torch.from_numpy(np.stack([rng.choice(4, size=n, p=p[k]) for k in range(steps)], 1))
    log_p, log_q = (torch.stack([torch.from_numpy(np.log(d[k]))[text[:, k]] for k in range(steps)], 1) for d in (p, q))
    pad = torch.zeros(n, 1)
    lead = torch.ones(n, steps + 1, dtype=torch.bool)
    lead[:, 0] = False
    log_a, _ = acceptance.accepted_logprob(torch.cat([pad, log_q], 1), torch.cat([pad, log_p], 1))
    value = acceptance.expected(log_a, lead, acceptance.tau_gains(steps + 1)).value_A
    error = math.sqrt(simulated.var() / n + float(value.var()) / n)
    assert abs(simulated.mean() - float(value.mean())) < 4 * error


def test_smoothed_weights_are_those_of_decay_ce(blocks):
    hidden, head, labels, mask, _ = blocks
    mask[2] = mask[0]  # without the hole, where the two differ on purpose
    for alpha in (0.0, 0.3, 1.0):
        log_q = torch.log_softmax(hidden @ head.T, -1).gather(2, labels[..., None])[..., 0]
        mine = acceptance.expected(log_q, acceptance.leading(mask), acceptance.tau_gains(K), alpha).weight_AK
        theirs = weighting.acceptance(alpha)(log_q.exp(), mask)
        torch.testing.assert_close(mine[:, 1:].float(), theirs[:, 1:], atol=1e-6, rtol=1e-5)


def test_products_that_leave_float32_give_finite_gradients():
    hidden = torch.zeros(2, K, D)
    hidden[..., 0] = 200.0
    head = torch.zeros(V, D)
    head[0, 0] = 1.0  # token 0 has logit 200; the labels have 0, so a = e^-200 each
    labels, mask = torch.ones(2, K, dtype=torch.long), torch.ones(2, K, dtype=torch.bool)
    mask[:, 0] = False
    for goal in (
        Acceptance(acceptance.tau_gains(K), temperature=0.5),
        Acceptance(acceptance.tau_gains(K), alpha=0.5),
        Acceptance(acceptance.tau_gains(K), target_logprob_AK=torch.zeros(2, K)),
    ):
        x = hidden.clone().requires_grad_()
        out = acceptance_loss(x, head, labels, mask, goal)
        out.numerator.backward()
        assert torch.isfinite(x.grad).all() and torch.equal(out.value_A, torch.ones(2))
        assert (x.grad.abs().sum() > 0) == (goal.alpha > 0)  # smoothing is what still moves such a block


def grads(n, blocks, goal, reference=None):
    """[n, A·K·D] gradients of independent draws: the blocks n times over in one call."""
    hidden, head, labels, mask, _ = blocks
    x = hidden.repeat(n, 1, 1).requires_grad_()
    if reference is not None:
        reference = Reference(reference.hidden_AKD.repeat(n, 1, 1), reference.blocks_A.repeat(n))
    if goal.rollout_AKD is not None:
        goal = dataclasses.replace(goal, rollout_AKD=goal.rollout_AKD.repeat(n, 1, 1))
    out = acceptance_loss(x, head, labels.repeat(n, 1), mask.repeat(n, 1), goal, reference=reference, chunk_rows=9000)
    out.numerator.backward()
    return x.grad.reshape(n, -1)


@pytest.mark.parametrize("baseline", ["none", "group", "reference"])
def test_group_gradient_has_the_closed_form_as_its_mean(blocks, baseline):
    hidden = blocks[0]
    hidden *= 0.4
    reference = Reference(hidden.roll(1, 1), torch.ones(A, dtype=torch.bool))
    group, generator = acceptance.Group(size=4, baseline=baseline), torch.Generator().manual_seed(5)
    for gains in REWARDS.values():
        goal = Acceptance(gains, log=False, temperature=0.8)
        drawn = grads(2000, blocks, dataclasses.replace(goal, group=group, generator=generator), reference)
        exact = grads(1, blocks, goal)[0]
        # projected on random directions, each z is N(0, 1) when the means agree
        along = torch.randn(drawn.shape[1], 24, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        projected = (drawn - exact) @ along
        z = projected.mean(0) / (projected.std(0) / math.sqrt(len(drawn)))
        assert float(z.abs().max()) < 4.5  # 144 of them over all cases: one in a thousand by chance
        assert float((exact @ along).norm()) > 3 * float((projected.std(0) / math.sqrt(len(drawn))).norm())


def test_variances_order_as_derived():
    """Closed form 0 < reward to come without baseline < with the value baseline < mean baseline < plain REINFORCE."""
    g = torch.Generator().manual_seed(3)
    slots, n = 16, 4000
    logits = torch.randn(1, slots, 6, generator=g, dtype=torch.float64)
    logits[..., 0] += 2.0
    log_q = torch.log_softmax(logits, -1)
    lead = torch.ones(1, slots, dtype=torch.bool)
    lead[:, 0] = False
    gains = acceptance.tau_gains(slots)
    label = log_q[..., 0]

    def variance(advantage_of):
        """Σ of variances of the logit gradient of one draw, over ‖mean‖²."""
        draws = acceptance.draw(label, lead, n, g)
        other = torch.distributions.Categorical(log_q[0, :, 1:].exp()).sample((n,)) + 1
        tokens = torch.where(draws.hits_GAK[:, 0], 0, other)  # of slots behind the failing one, any draw
        tokens = torch.where(
            draws.reached_GAK[:, 0], tokens, torch.distributions.Categorical(log_q[0].exp()).sample((n,))
        )
        score = torch.nn.functional.one_hot(tokens, 6) - log_q[0].exp()
        gradient = advantage_of(draws)[:, 0, :, None] * score
        return float(gradient.var(0)[1:].sum() / exact.pow(2).sum())

    weight = acceptance.expected(label, lead, gains).weight_AK[0, :, None]
    exact = weight * (torch.nn.functional.one_hot(torch.zeros(slots, dtype=torch.long), 6) - log_q[0].exp())
    whole = lambda draws: draws.length_GA[..., None].double().expand(n, 1, slots)  # noqa: E731
    plain = variance(whole)
    mean = variance(lambda d: whole(d) - whole(d).mean(0))
    to_come = variance(lambda d: acceptance.advantages(d, gains, lead, "none"))
    value = variance(lambda d: acceptance.advantages(d, gains, lead, "reference", label))
    assert to_come < value < mean < plain
    assert to_come * 5 < mean


def test_all_equal_groups_are_harmless(blocks):
    hidden, head, labels, mask, _ = blocks
    head[:] = 0
    head[3, 0] = 1.0
    hidden[..., 0] = 80.0  # every draw is token 3
    labels[:] = 3
    for sign in (1, -1):
        x = (hidden * sign).requires_grad_()
        for baseline in ("none", "group"):
            goal = Acceptance(acceptance.tau_gains(K), log=False, group=acceptance.Group(4, baseline))
            out = acceptance_loss(x, head, labels, mask, goal)
            out.numerator.backward()
            assert torch.isfinite(x.grad).all()
    goal = Acceptance(acceptance.tau_gains(K), log=False, group=acceptance.Group(4, "group"))
    assert out.value_A.tolist() == [1.0] * A  # nothing of it stands when token 3 is the least likely


def test_clipped_ratios_have_no_gradient():
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    ratio = torch.tensor([1.0, 1.3, 0.5, 1.0, 0.7, 1.5])
    pushed = acceptance.surrogate(advantage, ratio.log(), 0.2)
    torch.testing.assert_close(pushed, torch.tensor([1.0, 0.0, 0.5, -1.0, 0.0, -1.5]))


def test_stale_rollouts_are_weighed_by_the_ratio(blocks):
    """Drawn by another drafter and weighed without clipping, the mean gradient is still the closed form's."""
    hidden = blocks[0]
    hidden *= 0.4
    group, stale = acceptance.Group(size=4, clip=1e9), hidden + 0.1 * hidden.roll(1, 0)
    # per-slot ratios correct the slot alone; without baseline the reach of earlier slots stays the rollout drafter's,
    # so the first slot of each block is what must agree exactly for a reward that ends there
    gains = torch.zeros(K, dtype=torch.float64)
    gains[:2] = 1.0
    goal = Acceptance(gains, log=False)
    generator = torch.Generator().manual_seed(5)
    drawn = grads(2000, blocks, dataclasses.replace(goal, group=group, generator=generator, rollout_AKD=stale))
    exact = grads(1, blocks, goal)[0]
    along = torch.randn(drawn.shape[1], 16, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    projected = (drawn - exact) @ along
    z = projected.mean(0) / (projected.std(0) / math.sqrt(len(drawn)))
    assert float(z.abs().max()) < 4.0


def test_refusals(blocks):
    hidden, head, labels, mask, target = blocks
    group = acceptance.Group()
    with pytest.raises(ValueError, match="exact-match verification"):
        acceptance_loss(
            hidden, head, labels, mask, Acceptance(acceptance.tau_gains(K), group=group, target_logprob_AK=target)
        )
    with pytest.raises(ValueError, match="needs a reference drafter"):
        goal = Acceptance(acceptance.tau_gains(K), group=acceptance.Group(baseline="reference"))
        acceptance_loss(hidden, head, labels, mask, goal)
    with pytest.raises(ValueError, match="not finite"):
        acceptance.gains_of(torch.tensor([1.0, math.inf]))
