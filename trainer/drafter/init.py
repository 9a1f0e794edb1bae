"""How a drafter's weights start: at random, or from the target's own last layers.

Legend: S context rows, D hidden size, L taps, E head dim, G key/value heads.
"""

import torch
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
def init_from_target(drafter: Drafter, model: nn.Module, hidden_SLD: Tensor | None = None, seed: int = 0) -> None:
    """Start from the target's last layers, reading the last tap.

    The n drafter layers are the target's last n. `fc` is the identity on the last tap and zero elsewhere, so the
    context feature is that tap's normalised residual stream. A target layer sees RMS(x) * g_i with a norm weight of its
    own, while all drafter layers share one context feature: g_i moves into the columns of q, k and v, and `hidden_norm`
    and `input_layernorm` become 1. Context keys and values then are exactly those that the target's layer would compute
    from the tap. The final norm is the target's, so that its head reads what it expects.

    Where the target has no query/key norms, theirs are the root-mean-square of its queries and keys: over
    `hidden_SLD` (features of a few hundred tokens) if given, else for inputs of independent unit components.

    Args:
        model: the target, a transformers causal language model of one of `WARM_START_TYPES`.

    Raises:
        TargetError: other kinds of layers, or shapes that differ from the drafter's.
    """
    init_random(drafter, seed)
    cfg = drafter.config
    kind = model.config.get_text_config().model_type
    decoder = model.get_decoder()
    sources = list(decoder.layers)[-cfg.num_hidden_layers :]
    if kind not in WARM_START_TYPES or len(sources) < cfg.num_hidden_layers:
        raise TargetError(
            f"a drafter of {cfg.num_hidden_layers} layers cannot start from a target of type {kind!r} with "
            f"{len(decoder.layers)} layers; set init to random"
        )
    if cfg.conditioning == "kv_injection":
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -cfg.hidden_size :] = torch.eye(cfg.hidden_size)
    else:
        drafter.fc.weight.copy_(torch.eye(cfg.hidden_size))
    if cfg.conditioning == "input_fusion":
        drafter.fuse.weight[:, : cfg.hidden_size] = torch.eye(cfg.hidden_size)
    for layer, source in zip(drafter.layers, sources, strict=True):
        gain = source.input_layernorm.weight.float()
        for name in ("q_proj", "k_proj", "v_proj"):
            _copy(getattr(layer.self_attn, name), getattr(source.self_attn, name), name, gain)
        _copy(layer.self_attn.o_proj, source.self_attn.o_proj, "o_proj")
        for name in ("gate_proj", "up_proj", "down_proj"):
            _copy(getattr(layer.mlp, name), getattr(source.mlp, name), name)
        layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            ours = getattr(layer.self_attn, norm)
            if hasattr(source.self_attn, norm):
                ours.weight.copy_(getattr(source.self_attn, norm).weight)
            else:
                ours.weight.fill_(_projected_rms(drafter, getattr(layer.self_attn, projection), hidden_SLD))
    drafter.norm.weight.copy_(decoder.norm.weight)


def _copy(ours: nn.Linear, theirs: nn.Linear, name: str, column_gain_D: Tensor | None = None) -> None:
    if ours.weight.shape != theirs.weight.shape:
        raise TargetError(
            f"{name} of the drafter is {tuple(ours.weight.shape)} and the target's is {tuple(theirs.weight.shape)}; "
            "give the drafter the target's sizes or set init to random"
        )
    weight = theirs.weight.float()
    ours.weight.copy_(weight if column_gain_D is None else weight * column_gain_D)
    if ours.bias is not None and theirs.bias is not None:
        ours.bias.copy_(theirs.bias)


def _projected_rms(drafter: Drafter, projection: nn.Linear, hidden_SLD: Tensor | None) -> float:
    """Root-mean-square component of a projection's output for context-like inputs."""
    if hidden_SLD is None or drafter.config.needs_context_embeds:
        return float(projection.weight.float().square().sum(1).mean().sqrt())
    return float(projection(drafter._context(hidden_SLD, None)).float().square().mean().sqrt())
