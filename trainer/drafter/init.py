"""How a drafter's weights start: at random, or from the target's own last layers.

Legend: D hidden size, L taps, E head dim.
"""

import torch

from trainer.drafter.model import Drafter


@torch.no_grad()
def init_random(drafter: Drafter, seed: int = 0) -> None:
    """Matrices from N(0, 0.02^2), norms 1, biases 0; the same weights for the same seed on any device."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in drafter.named_parameters():
        if p.ndim == 2:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.02)
        else:
            p.fill_(0.0 if name.endswith("bias") else 1.0)
