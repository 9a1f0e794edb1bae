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
BLOCK_BYTES = 256 * 1024
LOAD_DTYPE: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp8_e4m3": torch.bfloat16, "fp32": torch.float32}
"""torch dtype in which a reader hands out each storage dtype"""


def encode(hidden_SLD: torch.Tensor, storage: StorageDtype, out_SLD: np.ndarray, scale_SL: np.ndarray | None) -> bool:
    """Write the stored bits (and scales) of `hidden_SLD` (any float dtype, any device) into the given arrays.

    Returns:
        False when a value is not finite, before or after the conversion; the arrays then hold nothing of use.
    """
    if storage == "fp8_e4m3":
        assert scale_SL is not None
        for a in range(0, len(hidden_SLD), 256):  # float32 copies of 256 tokens: 21 MB at D = 4096 with 5 taps
            part = hidden_SLD[a : a + 256].to("cpu", torch.float32)
            scale = fp8_scale(part)
            if not torch.isfinite(scale).all():
                return False
            codes = (part / scale[..., None]).to(torch.float8_e4m3fn)
            out_SLD[a : a + 256] = codes.view(torch.uint8).numpy()
            scale_SL[a : a + 256] = scale.numpy()
        return True
    bits, infinity, dtype = (
        (np.uint16, 0x7F80, torch.bfloat16) if storage == "bf16" else (np.uint32, 0x7F800000, torch.float32)
    )
    out = torch.from_numpy(out_SLD.view(np.dtype(bits).str.replace("u", "i"))).view(dtype)
    if hidden_SLD.device.type != "cpu":
        hidden_SLD = hidden_SLD.cpu()  # in one transfer
    step = max(1, BLOCK_BYTES // max(1, out_SLD[:1].nbytes))
    for a in range(0, len(hidden_SLD), step):  # a block is looked at while it is in the cache from its copy
        out[a : a + step].copy_(hidden_SLD[a : a + step])
        if not _finite_bits(out_SLD[a : a + step].reshape(-1), bits, infinity):
            return False
    return True


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


def _finite_bits(flat: np.ndarray, unsigned: type, infinity: int) -> bool:
    # Not-finite values are the bit patterns from +inf up among the positive ones and from -inf up among the negative.
    # Seen as signed, the first are the largest; seen as unsigned, the second are. Two maxima, no temporary.
    signed = np.dtype(unsigned).str.replace("u", "i")
    sign = 1 << (8 * flat.itemsize - 1)
    return bool(flat.view(signed).max() < infinity and flat.view(unsigned).max() < infinity + sign)
