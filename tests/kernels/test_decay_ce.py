"""The fused op against float64 autograd on whole logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.decay_ce import Teacher, leading_run, weighted_cross_entropy
from kernels.weighting import acceptance, decay, dpace, uniform

WEIGHTINGS = {"decay": decay(4.0), "uniform": uniform(), "dpace": dpace(0.5), "acceptance": acceptance(0.0)}


def make(A, K, D, V, seed, *, share=None, keep=0.7, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(A, K, D, generator=g, dtype=dtype).requires_grad_()
    head = torch.randn(V, D, generator=g, dtype=dtype)
    labels = torch.randint(0, V, (A, K), generator=g)
    mask = torch.rand(A, K, generator=g) < keep
    mask[:, 0] = False
    teacher = None
    if share is not None:
        noise = torch.randn(A, K, V, generator=g, dtype=dtype)
        p, ids = (0.5 * (hidden.detach() @ head.T) + noise).log_softmax(-1).topk(min(4, V - 1))
        teacher = Teacher(ids, p, share)
    return hidden, head, labels, mask, teacher


def reference(hidden, head, labels, mask, weighting, teacher):
    """Everything at once, in autograd, from the definitions."""
    logq = (hidden @ head.T).log_softmax(-1)
    label = logq.gather(-1, labels[..., None])[..., 0]
    weight = weighting((label.detach().exp() * mask), mask)
    loss = -label
    if teacher is not None:
        p, q = teacher.logprobs_AKT.exp(), logq.gather(-1, teacher.ids_AKT)
        tail = torch.ones_like(logq).scatter(-1, teacher.ids_AKT, 0.0)
        r, q_rest = 1 - p.sum(-1), (logq.exp() * tail).sum(-1)
        kl = (p * (p.log() - q)).sum(-1) + r * (r.log() - q_rest.log())
        loss = (1 - teacher.share) * loss + teacher.share * kl
    correct = (logq.argmax(-1) == labels) & mask
    return (weight * loss * mask).sum(), weight.sum(), label * mask, correct


@settings(max_examples=150, deadline=None)
@given(
    A=st.integers(1, 9),
    K=st.integers(2, 7),
    V=st.integers(6, 67),
    seed=st.integers(0, 10**6),
    weighting=st.sampled_from(sorted(WEIGHTINGS)),
    share=st.sampled_from([None, 0.4, 1.0]),
    chunk_rows=st.integers(1, 40),
    keep=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_equals_autograd(A, K, V, seed, weighting, share, chunk_rows, keep):
    hidden, head, labels, mask, teacher = make(A, K, 5, V, seed, share=share, keep=keep)
    weight = WEIGHTINGS[weighting]
    expected, total, label, correct = reference(hidden, head, labels, mask, weight, teacher)
    (grad,) = torch.autograd.grad(3 * expected, hidden)
    got = weighted_cross_entropy(hidden, head, labels, mask, weight, teacher=teacher, chunk_rows=chunk_rows)
    (got_grad,) = torch.autograd.grad(3 * got.numerator, hidden)
    torch.testing.assert_close(got.numerator, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(got.denominator.float(), total.float())
    torch.testing.assert_close(got.label_logprob_AK, label)
    # weights are fp32 by contract, everything else is as wide as the input
    torch.testing.assert_close(got_grad, grad, rtol=1e-5, atol=1e-8)
    assert torch.equal(got.correct_AK, correct)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_against_float64(dtype):
    hidden, head, labels, mask, _ = make(12, 6, 32, 203, 0, dtype=torch.float64)
    narrow = hidden.detach().to(dtype).requires_grad_()
    wide = narrow.detach().double().requires_grad_()
    expected, *_ = reference(wide, head.to(dtype).double(), labels, mask, WEIGHTINGS["decay"], None)
    got = weighted_cross_entropy(narrow, head.to(dtype), labels, mask, WEIGHTINGS["decay"], chunk_rows=30)
    expected.backward()
    got.numerator.backward()
    eps = torch.finfo(dtype).eps
    assert abs(got.numerator.double() / expected - 1) < 4 * eps
    assert (narrow.grad.double() - wide.grad).abs().max() < 8 * eps * wide.grad.abs().max()


def test_nothing_supervised_is_zero_and_still_differentiable():
    hidden, head, labels, mask, _ = make(3, 4, 5, 11, 0)
    out = weighted_cross_entropy(hidden, head, labels, mask & False, decay(4.0))
    out.numerator.backward()
    assert out.numerator == 0
    assert out.denominator == 0
    assert hidden.grad.abs().max() == 0


def test_unsupervised_labels_may_be_anything():
    hidden, head, labels, mask, _ = make(3, 4, 5, 11, 0)
    a = weighted_cross_entropy(hidden, head, labels, mask, decay(4.0)).numerator
    b = weighted_cross_entropy(hidden, head, labels.masked_fill(~mask, -100), mask, decay(4.0)).numerator
    assert torch.equal(a, b)


def test_label_of_vanishing_probability_keeps_its_loss():
    """exp(-200) is 0 in fp32; the loss of such a label is still 200."""
    head = torch.eye(3)
    hidden = torch.tensor([[[0.0, 0, 0], [200.0, 0, 0]]], requires_grad=True)
    mask = torch.tensor([[False, True]])
    out = weighted_cross_entropy(hidden, head, torch.tensor([[0, 1]]), mask, uniform())
    assert out.numerator.item() == 200
    out.numerator.backward()
    assert hidden.grad[0, 1].tolist() == [1, -1, 0]


def test_equal_logits_count_as_the_lowest_id():
    hidden, head = torch.ones(1, 3, 1), torch.ones(4, 1)
    mask = torch.tensor([[False, True, True]])
    out = weighted_cross_entropy(hidden, head, torch.tensor([[0, 0, 1]]), mask, uniform())
    assert out.correct_AK.tolist() == [[False, True, False]]


def test_no_gradient_is_computed_where_none_is_wanted():
    hidden, head, labels, mask, _ = make(3, 4, 5, 11, 0)
    with torch.no_grad():
        out = weighted_cross_entropy(hidden, head, labels, mask, decay(4.0))
    assert not out.numerator.requires_grad


@pytest.mark.parametrize(
    "hits",
    [
        [[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]],
        [[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]],
    ],
)
def test_leading_run_golden(hits):
    """Product-of-marginals estimates give 1.219 and 1.734 here."""
    correct = torch.tensor([[0, *h] for h in hits], dtype=torch.bool)
    run = leading_run(correct, torch.ones_like(correct))
    assert run.tolist() == [3, 2, 1, 0]
    assert run.double().mean() == 1.5


def test_run_ends_at_an_unsupervised_slot():
    correct = torch.tensor([[False, True, True, True]])
    assert leading_run(correct, torch.tensor([[False, True, False, True]])).tolist() == [1]


def test_memory_is_one_chunk_and_never_all_logits():
    """256 blocks x 16 slots x 4,096 words: 67 MB of logits in fp32, 4 MB a chunk."""
    hidden, head, labels, mask, _ = make(256, 16, 8, 4096, 0, keep=1.0, dtype=torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        weighted_cross_entropy(hidden, head, labels, mask, decay(7.0), chunk_rows=256)
    live = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak < 10e6


def test_shapes_that_do_not_fit():
    hidden, head, labels, mask, _ = make(3, 4, 5, 11, 0)
    with pytest.raises(ValueError, match=r"\[V, D\]"):
        weighted_cross_entropy(hidden, head.T, labels, mask, decay(4.0))
