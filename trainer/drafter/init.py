"""How a drafter's weights start: at random, or from the target's own last layers.

Legend: S context rows, D hidden size, L taps, E head dim, G key/value heads.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from infra.errors import TargetError
from trainer.drafter.model import Drafter

# Decoder layers of these are pre-norm with RMSNorm(x) * weight, split q/k/v projections and a gated SiLU MLP: the
# drafter's own layer. Gemma's (weight + 1, post-norms) and mixture-of-experts layers share names but not meaning.
WARM_START_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_text", "smollm3", "ministral")


@torch.no_grad()
def init_random(drafter: Drafter, seed: int = 0) -> None:
    """Matrices from N(0, 0.02^2), norms 1, biases 0; the same weights for the same seed on any device."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in drafter.named_parameters():
        if p.ndim == 2:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.02)
        else:
            p.fill_(0.0 if name.endswith("bias") else 1.0)


@torch.no_grad()
def init_from_target(drafter: Drafter, folder: str | Path, hidden_SLD: Tensor | None = None, seed: int = 0) -> None:
    """Start from the target's last layers, reading the last tap.

    The n drafter layers are the target's last n. `fc` is the identity on the last tap and zero elsewhere, so the
    context feature is that tap's normalised residual stream. A target layer sees RMS(x) * g_i with a norm weight of its
    own, while all drafter layers share one context feature: g_i moves into the columns of q, k and v, and `hidden_norm`
    and `input_layernorm` become 1. Context keys and values then are exactly those that the target's layer would compute
    from the tap. The final norm is the target's, so that its head reads what it expects.

    Where the target has no query/key norms, theirs are the root-mean-square of its queries and keys: over
    `hidden_SLD` (features of a few hundred tokens) if given, else for inputs of independent unit components.

    Args:
        folder: the target's, with config.json and safetensors; only the tensors of its last layers are read.

    Raises:
        TargetError: other kinds of layers, or shapes that differ from the drafter's.
    """
    init_random(drafter, seed)
    cfg = drafter.config
    source = _TargetLayers(Path(folder), cfg.num_hidden_layers)
    eye = torch.eye(cfg.hidden_size)
    if cfg.conditioning == "kv_injection":
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -cfg.hidden_size :] = eye
    else:
        drafter.fc.weight.copy_(eye)
    if cfg.conditioning == "input_fusion":
        drafter.fuse.weight[:, : cfg.hidden_size] = eye
    for i, layer in enumerate(drafter.layers):
        gain_D = source.read(i, "input_layernorm.weight").float()
        for name, p in layer.named_parameters():
            if name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight", "input_layernorm.weight"):
                continue
            theirs = source.read(i, name)
            if theirs is None and name.endswith("bias"):
                continue  # ours stays 0
            if theirs is None or theirs.shape != p.shape:
                raise TargetError(
                    f"{name} of the drafter is {tuple(p.shape)} and the target's is "
                    f"{'absent' if theirs is None else tuple(theirs.shape)}; give the drafter the target's sizes or "
                    "set init to random"
                )
            gained = name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
            p.copy_(theirs.float() * gain_D if gained else theirs)
        for which in ("q", "k"):
            ours, theirs = getattr(layer.self_attn, f"{which}_norm"), source.read(i, f"self_attn.{which}_norm.weight")
            if theirs is not None:
                ours.weight.copy_(theirs)
            else:
                ours.weight.fill_(_projected_rms(drafter, getattr(layer.self_attn, f"{which}_proj"), hidden_SLD))
    drafter.norm.weight.copy_(source.final_norm())


class _TargetLayers:
    """The last layers of a checkpoint, tensor by tensor. Layer 0 is the first of the last `count`."""

    def __init__(self, folder: Path, count: int):
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or config
        self.first = text["num_hidden_layers"] - count
        if text["model_type"] not in WARM_START_TYPES or self.first < 0:
            raise TargetError(
                f"a drafter of {count} layers cannot start from a target of type {text['model_type']!r} with "
                f"{text['num_hidden_layers']} layers; set init to random"
            )
        self.files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as f:
                self.files |= dict.fromkeys(f.keys(), file)
        norms = [n for n in self.files if n.endswith(".norm.weight") and ".layers." not in n and "visual" not in n]
        if len(norms) != 1:
            raise TargetError(f"target in {str(folder)!r} has no single final norm ({norms}); set init to random")
        self.prefix = norms[0].removesuffix("norm.weight")

    def _tensor(self, name: str) -> Tensor | None:
        if name not in self.files:
            return None
        with safe_open(self.files[name], framework="pt") as f:
            return f.get_tensor(name)

    def read(self, layer: int, name: str) -> Tensor | None:
        return self._tensor(f"{self.prefix}layers.{self.first + layer}.{name}")

    def final_norm(self) -> Tensor:
        return self._tensor(f"{self.prefix}norm.weight")


def _projected_rms(drafter: Drafter, projection: nn.Linear, hidden_SLD: Tensor | None) -> float:
    """Root-mean-square component of a projection's output for context-like inputs."""
    if hidden_SLD is None or drafter.config.needs_context_embeds:
        return float(projection.weight.float().square().sum(1).mean().sqrt())
    return float(projection(drafter._context(hidden_SLD, None)).float().square().mean().sqrt())
