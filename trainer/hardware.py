"""What a GPU does while it trains: memory, and model FLOP utilisation (MFU). Nothing on a CPU."""

import torch

from trainer.drafter.bench_gpu import PEAK_TFLOPS, step_flops
from trainer.drafter.config import DrafterConfig
from trainer.engine import World


def gpu_metrics(
    cfg: DrafterConfig, world: World, *, tokens: float, blocks: float, documents: float, seconds: float
) -> dict[str, float]:
    """`gpu_memory_gb` (peak of rank 0 since the call before) and, for a known GPU, `mfu`; empty on a CPU.

    Args:
        tokens, blocks, documents: of all ranks within `seconds`: context rows, supervised blocks, documents.
    """
    if world.device.type != "cuda":
        return {}
    out = {"gpu_memory_gb": torch.cuda.max_memory_allocated() / 1e9}
    torch.cuda.reset_peak_memory_stats()
    name = torch.cuda.get_device_name(world.device)
    peak = next((v for k, v in PEAK_TFLOPS.items() if k in name), None)
    if peak:
        out["mfu"] = training_flops(cfg, tokens, blocks, documents) / (seconds * world.size * peak * 1e12)
    return out


def training_flops(cfg: DrafterConfig, tokens: float, blocks: float, documents: float) -> float:
    """Forward and backward of `documents` of average length and number of blocks; recomputation does not count."""
    sizes = {
        "D": cfg.hidden_size, "I": cfg.intermediate_size, "layers": cfg.num_hidden_layers, "V": cfg.vocab_size,
        "H": cfg.num_attention_heads, "G": cfg.num_key_value_heads, "E": cfg.head_dim, "L": cfg.num_taps,
        "K": cfg.block_size,
    }  # fmt: skip
    return documents * sum(step_flops(sizes, tokens / documents, blocks / documents).values())
