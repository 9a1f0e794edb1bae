"""The CPU execution (two parts merged by log-sum-exp) and FlexAttention against the dense mask, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.drafter.attention import ContextRanges, anchored_attention, dense_mask


def make(S, K, H, G, E, starts, ends, valid, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    A = len(starts)
    shapes = ((A, K, H, E), (S, G, E), (S, G, E), (A, K, G, E), (A, K, G, E))
    tensors = [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes]
    return tensors, ContextRanges(torch.tensor(starts), torch.tensor(ends), torch.tensor(valid))


def outputs(tensors, ranges, execution, **kwargs):
    out = anchored_attention(*tensors, ranges, execution=execution, **kwargs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return (out, *torch.autograd.grad((out * weight).sum(), tensors))


@st.composite
def rows(draw):
    """Documents of any length in a packed row; anchors anywhere in them, in any order, some blocks invalid."""
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    starts, ends, first = [], [], 0
    for n in lengths:
        for p in draw(st.lists(st.integers(0, n - 1), max_size=40)):
            starts.append(first)
            ends.append(first + p)
        first += n
    if not starts:
        starts, ends = [0], [0]
    order = draw(st.permutations(range(len(starts)))) if draw(st.booleans()) else range(len(starts))
    valid = draw(st.lists(st.booleans(), min_size=len(starts), max_size=len(starts))) if draw(st.booleans()) else None
    return first, [starts[i] for i in order], [ends[i] for i in order], valid or [True] * len(starts)


@settings(max_examples=150, deadline=None)
@given(
    row=rows(),
    K=st.integers(1, 5),
    groups=st.sampled_from([(1, 1), (4, 2), (4, 4), (6, 2)]),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3, 20, 64]),
    seed=st.integers(0, 10**6),
)
def test_cpu_equals_dense(row, K, groups, causal, window, seed):
    S, starts, ends, valid = row
    tensors, ranges = make(S, K, *groups, 4, starts, ends, valid, seed)
    expected = outputs(tensors, ranges, "dense", causal=causal, window=window)
    got = outputs(tensors, ranges, "cpu", causal=causal, window=window)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 4e-2)])
def test_narrow_types(dtype, tolerance):
    starts, ends = [0] * 40 + [150] * 40, [*range(0, 120, 3), *range(150, 190)]
    tensors, ranges = make(200, 4, 4, 2, 16, starts, ends, [True] * 80)
    narrow = [t.detach().to(dtype).requires_grad_() for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in narrow]
    for a, b in zip(outputs(narrow, ranges, "cpu"), outputs(wide, ranges, "dense"), strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() < tolerance * max(1.0, b.abs().max())


@pytest.mark.parametrize("execution", ["dense", "cpu"])
def test_invalid_and_contextless_blocks(execution):
    tensors, ranges = make(8, 3, 2, 1, 4, [0, 0, 0], [0, 5, 5], [True, False, True])
    out, gq, gk, gv, gkb, gvb = outputs(tensors, ranges, execution)
    assert out[1].abs().max() == 0
    for g in (gq[1], gkb[1], gvb[1]):
        assert g.abs().max() == 0
    assert all(torch.isfinite(t).all() for t in (out, gq, gk, gv, gkb, gvb))
    assert gk[5:].abs().max() == 0
    own = torch.softmax(tensors[0][0].transpose(0, 1) @ tensors[3][0, :, 0].T / 2, -1) @ tensors[4][0, :, 0]
    torch.testing.assert_close(out[0].transpose(0, 1), own)  # a block at position 0 attends to itself alone


def test_the_rule_by_hand():
    ranges = ContextRanges(torch.tensor([0, 0]), torch.tensor([5, 6]))
    mask = dense_mask(ranges, 12, 4, causal=False, window=None)
    assert mask[:4, :12].sum(1).tolist() == [5] * 4
    assert mask[4:, :12].sum(1).tolist() == [6] * 4
    assert mask[:4, 12:].int().tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]] * 4
    windowed = dense_mask(ranges, 12, 4, causal=True, window=3)
    assert windowed[:4, :12].sum(1).tolist() == [2, 1, 0, 0]  # itself and two before: rows 3, 4 at slot 0
    assert windowed[:4, 12:16].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 9)])
def test_flex_forward_equals_dense(causal, window):
    """FlexAttention has no backward on CPU; the forward shows that the mask is the same."""
    tensors, ranges = make(
        40, 4, 4, 2, 16, [0, 0, 0, 20], [0, 7, 9, 33], [True, True, False, True], dtype=torch.float32
    )
    tensors = [t.detach() for t in tensors]
    kwargs = {"causal": causal, "window": window}
    got = anchored_attention(*tensors, ranges, execution="flex", **kwargs)
    torch.testing.assert_close(
        got, anchored_attention(*tensors, ranges, execution="dense", **kwargs), rtol=0, atol=2e-6
    )
