"""Norm and MLP: transformers' outputs bit by bit, its gradients, and less kept for the backward pass."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from trainer.drafter.parts import MLP, RMSNorm

D, INNER, N = 32, 96, 40


def pair(name):
    """Ours and transformers', with equal random weights."""
    torch.manual_seed(0)
    if name == "norm":
        ours, theirs = RMSNorm(D, eps=1e-6), Qwen3RMSNorm(D, eps=1e-6)
        torch.nn.init.normal_(ours.weight, 1.0, 0.2)
    else:
        config = Qwen3Config(hidden_size=D, intermediate_size=INNER, hidden_act="silu")
        ours, theirs = MLP(config), Qwen3MLP(config)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def kept_bytes(module):
    """Bytes that a forward pass leaves allocated, its input and output apart."""
    x = torch.randn(N, D, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = module(x)
    return sum(e.self_cpu_memory_usage for e in profiled.key_averages()) - out.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["norm", "mlp"])
@pytest.mark.parametrize("shape", [(N, D), (4, N // 4, D)])
def test_outputs_and_gradients_are_those_of_transformers(name, dtype, shape):
    ours, theirs = (m.to(dtype) for m in pair(name))
    x = torch.randn(shape).to(dtype)
    weight = torch.randn(shape).to(dtype)
    found = []
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = module(leaf * 1.0)
        (out * weight).sum().backward()
        found.append((out, leaf.grad, *[p.grad for p in module.parameters()]))
    (out, *grads), (want, *want_grads) = found
    assert torch.equal(out, want)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for grad, want_grad in zip(grads, want_grads, strict=True):
        assert grad.dtype == want_grad.dtype
        assert (grad - want_grad).float().norm() <= tolerance * want_grad.float().norm()
    with torch.no_grad():
        assert torch.equal(ours(x), want)


@pytest.mark.parametrize("name", ["norm", "mlp"])
def test_gradients_stop_where_none_is_wanted(name):
    ours, theirs = pair(name)
    for module in (ours, theirs):
        module.requires_grad_(False)
    x = torch.randn(N, D)
    assert not ours(x).requires_grad
    grads = []
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_what_is_kept():
    """A norm keeps a number per row besides its input, the MLP two factors where transformers keeps four."""
    inner = 4 * N * INNER
    ours, theirs = pair("norm")
    assert kept_bytes(ours) == 4 * N and kept_bytes(theirs) == 4 * N + 4 * N * D
    ours, theirs = pair("mlp")
    assert kept_bytes(ours) == 2 * inner and kept_bytes(theirs) == 4 * inner


def test_a_second_use_of_one_graph():
    """retain_graph: what is computed again is computed from the same factors."""
    ours, _ = pair("mlp")
    loss = ours(torch.randn(N, D)).square().sum()
    first = torch.autograd.grad(loss, list(ours.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(ours.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert copy.deepcopy(ours).state_dict().keys() == ours.state_dict().keys()
