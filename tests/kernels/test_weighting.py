"""Weightings against the worked examples of their papers and against autograd."""

import math

import pytest
import torch

from kernels.weighting import acceptance, decay, decay_K, dpace, uniform


def one_block(q, mask=None):
    prob = torch.tensor([[0.0, *q]])
    keep = torch.ones_like(prob, dtype=torch.bool) if mask is None else torch.tensor([[False, *mask]])
    keep[:, 0] = False
    return prob, keep


def test_decay_golden():
    w = decay(4.0)(*one_block([0.9, 0.5, 0.2]))
    torch.testing.assert_close(w, torch.tensor([[0.0, 1.0, math.exp(-0.25), math.exp(-0.5)]]))
    ce = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert ((w * ce).sum() / w.sum()).item() == pytest.approx(1.8350, abs=5e-5)
    assert decay_K(4.0, 4)[1:].tolist() == w[0, 1:].tolist()


def test_dpace_golden():
    w = dpace(0.5)(*one_block([0.9, 0.5, 0.2]))
    torch.testing.assert_close(w, torch.tensor([[0.0, 2.09, 1.14, 0.4275]]))


def test_dpace_with_an_unsupervised_slot_in_the_middle():
    w = dpace(0.5)(*one_block([0.9, 0.5, 0.2], [True, False, True]))
    torch.testing.assert_close(w, torch.tensor([[0.0, 1.52, 0.0, 0.57]]))


def test_acceptance_is_the_gradient_of_expected_accepted_drafts():
    g = torch.Generator().manual_seed(0)
    logq = -torch.rand(5, 8, generator=g, dtype=torch.float64)
    logq.requires_grad_()
    mask = torch.ones(5, 8, dtype=torch.bool)
    mask[:, 0] = False
    expected = torch.cumprod(logq[:, 1:].exp(), 1).sum()
    (grad,) = torch.autograd.grad(expected, logq)
    torch.testing.assert_close(acceptance(0.0)(logq.detach().exp(), mask).double(), grad, rtol=1e-6, atol=1e-7)


def test_uniform_and_full_smoothing():
    prob, mask = one_block([0.9, 0.5, 0.2], [True, False, True])
    assert uniform()(prob, mask).tolist() == [[0, 1, 0, 1]]
    assert acceptance(1.0)(prob, mask).tolist() == [[0, 2, 0, 1]]  # counts of slots still to come


@pytest.mark.parametrize(("make", "value"), [(decay, 0.0), (decay, -1.0), (acceptance, -0.1), (acceptance, 1.5)])
def test_bad_parameters(make, value):
    with pytest.raises(ValueError, match=str(value)):
        make(value)
