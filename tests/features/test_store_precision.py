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
def test_compact_teacher_is_the_log_softmax(chunk):
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(20, 8, generator=g), torch.randn(50, 8, generator=g)
    tokens = torch.randint(0, 50, (20,), generator=g)
    want = (hidden @ head.T).log_softmax(-1)
    logprob, ids, logprobs = compact_teacher(hidden, head, tokens.numpy(), top_k=5, chunk_tokens=chunk)
    assert logprob[0] == 0 and (ids[0] == 0).all()
    torch.testing.assert_close(torch.from_numpy(logprob[1:]), want[:-1].gather(1, tokens[1:, None])[:, 0])
    top = want[:-1].topk(5)
    np.testing.assert_array_equal(ids[1:], top.indices.numpy())
    torch.testing.assert_close(torch.from_numpy(logprobs[1:]).float(), top.values, rtol=0, atol=4e-3)
    assert compact_teacher(hidden, lambda h: h @ head.T, tokens)[1:] == (None, None)
    one = compact_teacher(hidden[:1], head, tokens[:1], top_k=2)
    assert one[0].tolist() == [0] and one[1].shape == (1, 2)
