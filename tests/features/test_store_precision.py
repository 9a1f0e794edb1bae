"""Stored bits of hidden states, and the compact teacher."""

import numpy as np
import pytest
import torch

from features.convert import stored_as
from features.precision import encode, fp8_scale, relative_error_L
from features.teacher import compact_teacher


def with_outliers(S=300, L=3, D=64):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, L, D, generator=g) * torch.logspace(-3, 3, S)[:, None, None]
    hidden[::7, :, 5] *= 1000  # massive activations, as real models have
    hidden[3] = 0
    return hidden


def test_fp8_error_does_not_depend_on_the_size_of_a_token():
    hidden = with_outliers()
    back = stored_as(hidden, "fp8_e4m3")
    assert back.dtype == torch.bfloat16
    rest = torch.ones(300, dtype=torch.bool)
    rest[::7] = False
    rest[3] = False
    per_token = (back.float() - hidden).norm(dim=-1) / hidden.norm(dim=-1).clamp(min=1e-30)
    assert per_token[rest].max() < 0.04
    assert relative_error_L(hidden[rest], back[rest]).max() < 0.03
    assert (back[3] == 0).all()


def test_fp8_scales_are_powers_of_two_and_fill_the_range():
    scale = fp8_scale(with_outliers())
    assert (torch.frexp(scale).mantissa == 0.5).all()
    amax = with_outliers().abs().amax(-1)
    used = (amax / scale)[amax > 0]
    assert used.max() <= 448 and used.min() > 224


def test_values_that_e4m3_holds_come_back_exactly():
    hidden = torch.tensor([1.0, 1.5, 2.0, -0.875, 0.0, 448.0]).reshape(1, 1, 6)
    assert torch.equal(stored_as(hidden, "fp8_e4m3").float(), hidden)
    assert torch.equal(stored_as(hidden * 2**-20, "fp8_e4m3").float(), hidden * 2**-20)


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3", "fp32"])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf"), None])
def test_what_is_not_finite_is_refused(storage, value):
    hidden = with_outliers()
    hidden[0, 0, :4] = torch.tensor([3.38e38, -3.38e38, -0.0, 1e-45])  # extremes that are fine
    if value is not None:
        hidden[299, 2, 63] = value
    bits, scale_SL, finite = encode(hidden, storage)
    assert finite is (value is None)
    assert bits.dtype == {"bf16": "<u2", "fp8_e4m3": "|u1", "fp32": "<u4"}[storage] and bits.shape == hidden.shape
    assert (scale_SL is not None) == (storage == "fp8_e4m3")


def test_overflow_in_bf16_is_refused():
    assert not encode(torch.full((1, 1, 4), 3.4028e38), "bf16")[2]


def test_nothing_is_copied_that_has_the_stored_dtype():
    hidden = with_outliers().bfloat16()
    assert encode(hidden, "bf16")[0].ctypes.data == hidden.data_ptr()


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_compact_teacher_is_the_log_softmax_where_supervised(chunk):
    g = torch.Generator().manual_seed(0)
    hidden_BSD, head = torch.randn(2, 20, 8, generator=g), torch.randn(50, 8, generator=g)
    tokens = [torch.randint(0, 50, (n,), generator=g).numpy() for n in (20, 13)]
    masks = [np.ones(20, np.uint8), (np.arange(13) % 5 > 1).astype(np.uint8)]
    made = compact_teacher(hidden_BSD, head, tokens, masks, top_k=5, chunk_tokens=chunk)
    for row, (logprob, ids, logprobs) in enumerate(made):
        at = np.flatnonzero(masks[row][1:]) + 1
        want = (hidden_BSD[row] @ head.T).log_softmax(-1)[at - 1]
        label = want.gather(1, torch.from_numpy(tokens[row][at])[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(logprob[at]), label)
        top = want.topk(5)
        np.testing.assert_array_equal(ids[at], top.indices.numpy())
        torch.testing.assert_close(torch.from_numpy(logprobs[at]).float(), top.values, rtol=0, atol=4e-3)
        for values in (logprob, ids, logprobs):
            assert len(values) == len(tokens[row]) and not np.delete(values, at, 0).any()
    assert compact_teacher(hidden_BSD, lambda h: h @ head.T, tokens, masks)[0][1:] == (None, None)
    ((one, ids, _),) = compact_teacher(hidden_BSD[:1, :1], head, [tokens[0][:1]], [masks[0][:1]], top_k=2)
    assert one.tolist() == [0] and ids.shape == (1, 2)
