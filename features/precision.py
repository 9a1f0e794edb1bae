"""How hidden states become stored bits and back: bf16, fp8 e4m3 with a power-of-two scale per token and tap, fp32.

fp8: scale = 2^ceil(log2(amax / 448)), so amax / scale lies in (224, 448] and uses e4m3's top binade; the value is
scale * q exactly, in bf16 too (three mantissa bits, power-of-two factor). The relative error is at most 2^-4 per
element and about 2.6 % in root mean square, whatever the outliers of other tokens.

Legend: S tokens, L taps, D hidden size.
"""

import numpy as np
import torch

from features.spec import StorageDtype

FP8_MAX = 448.0
LOAD_DTYPE: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp8_e4m3": torch.bfloat16, "fp32": torch.float32}
"""torch dtype in which a reader hands out each storage dtype"""


def encode(hidden_SLD: torch.Tensor, storage: StorageDtype) -> tuple[np.ndarray, np.ndarray | None, bool]:
    """Stored bits (S, L, D) of `hidden_SLD` (any float dtype, any device), scales (S, L) float32 for fp8, and whether
    every value is finite, before the conversion and after.

    Meant for parts of a document: what follows, a checksum and a write, then finds 1 MB still in the cache. A
    contiguous tensor on the host that has the stored dtype already is not copied. Without finite values the bits are
    of no use.
    """
    if storage == "fp8_e4m3":
        part = hidden_SLD.to("cpu", torch.float32)
        scale = fp8_scale(part)
        codes = (part / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes.numpy(), scale.numpy(), bool(torch.isfinite(scale).all())
    bits, infinity, dtype = (
        (torch.int16, 0x7F80, torch.bfloat16) if storage == "bf16" else (torch.int32, 0x7F800000, torch.float32)
    )
    signed = hidden_SLD.to("cpu", dtype).contiguous().view(bits).numpy()
    out_SLD = signed.view(np.uint16 if storage == "bf16" else np.uint32)
    return out_SLD, None, _finite_bits(out_SLD.reshape(-1), infinity)


def fp8_scale(hidden_SLD: torch.Tensor) -> torch.Tensor:
    """scale_SL (float32): the power of two per token and tap; 1 where all is zero, not finite where a value is not."""
    amax = hidden_SLD.float().abs().amax(-1)
    exponent = torch.ceil(torch.log2(amax / FP8_MAX)).clamp(min=-100)
    scale = torch.where(amax == 0, torch.ones_like(amax), torch.exp2(exponent))
    return torch.where(torch.isfinite(amax), scale, amax)


def decode_fp8(codes_SLD: np.ndarray, scale_SL: np.ndarray, out_SLD: torch.Tensor) -> None:
    """Dequantise uint8 bits into `out_SLD` (bf16), 64 tokens at a time so that temporaries stay in the cache."""
    codes, scale = torch.from_numpy(codes_SLD).view(torch.float8_e4m3fn), torch.from_numpy(scale_SL)
    for a in range(0, len(codes), 64):
        torch.mul(
            codes[a : a + 64].to(torch.bfloat16), scale[a : a + 64, :, None].to(torch.bfloat16), out=out_SLD[a : a + 64]
        )


def relative_error_L(hidden_SLD: torch.Tensor, approx_SLD: torch.Tensor) -> torch.Tensor:
    """Root of (squared error / squared value) per tap, float64."""
    x, y = hidden_SLD.double(), approx_SLD.double()
    return ((x - y).square().sum((0, 2)) / x.square().sum((0, 2)).clamp(min=1e-300)).sqrt()


def _finite_bits(flat: np.ndarray, infinity: int) -> bool:
    # Not-finite values are the bit patterns from +inf up among the positive ones and from -inf up among the negative.
    # Seen as signed, the first are the largest; seen as unsigned, the second are. Two maxima, no temporary.
    signed = flat.dtype.str.replace("u", "i")
    sign = 1 << (8 * flat.itemsize - 1)
    return not len(flat) or bool(flat.view(signed).max() < infinity and flat.max() < infinity + sign)
