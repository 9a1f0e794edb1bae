"""The drafter: DFlash's block-diffusion transformer (arXiv 2602.06036) with the parameter names of its checkpoints.

Legend: S context rows, L taps, D hidden size, A blocks, K block size, H query heads, G key/value heads, E head dim,
B sequences.

One context feature, `hidden_norm(fc(taps))`, is projected to keys and values in every layer, beside the block's own
keys and values; queries come from the block only. Training (`forward`: all blocks of packed documents at once) and
drafting (`decode`: one block, context keys cached) are the same function of the same weights.
Embedding and head are the target's: callers pass them in, they are never parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from trainer.drafter.attention import ContextRanges, Execution, anchored_attention

if TYPE_CHECKING:  # the model itself needs torch and transformers only
    from trainer.drafter.config import DrafterConfig


def qwen3_config(cfg: DrafterConfig) -> Qwen3Config:
    """The same dimensions as a transformers configuration, for the parts taken from there."""
    fields = cfg.transformer_json()
    rope = {"rope_theta": fields.pop("rope_theta"), **(fields.pop("rope_scaling") or {"rope_type": "default"})}
    return Qwen3Config(rope_parameters=rope, use_sliding_window=cfg.sliding_window is not None, **fields)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in transformers' half-split layout. x [..., heads, E]; cos, sin [..., E], one row per position."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


class Rotary(Qwen3RotaryEmbedding):
    """Its frequencies stay fp32 when the drafter is cast: rounded to bf16 (2^-9), the phase at position 3,000 would be
    off by up to 6 radians."""

    def __init__(self, cfg: DrafterConfig):
        super().__init__(qwen3_config(cfg))
        self.exact = [self.inv_freq.clone(), self.original_inv_freq.clone()]  # a list: no buffers, never cast

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self.inv_freq, self.original_inv_freq = (t.to(self.inv_freq.device) for t in self.exact)
        return self


class Attention(nn.Module):
    def __init__(self, cfg: DrafterConfig, layer: int):
        super().__init__()
        D, E, bias = cfg.hidden_size, cfg.head_dim, cfg.attention_bias
        self.head_dim = E
        self.causal = cfg.layer_causal(layer)
        self.window = cfg.layer_window(layer)
        self.q_proj = nn.Linear(D, cfg.num_attention_heads * E, bias=bias)
        self.k_proj = nn.Linear(D, cfg.num_key_value_heads * E, bias=bias)
        self.v_proj = nn.Linear(D, cfg.num_key_value_heads * E, bias=bias)
        self.o_proj = nn.Linear(cfg.num_attention_heads * E, D, bias=bias)
        self.q_norm = Qwen3RMSNorm(E, eps=cfg.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(E, eps=cfg.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)
        return k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class Layer(nn.Module):
    def __init__(self, cfg: DrafterConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(cfg, layer)
        self.mlp = Qwen3MLP(qwen3_config(cfg))
        self.input_layernorm = Qwen3RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows the attention: output projection, residual, MLP. attended [..., H, E]."""
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DrafterCache:
    """Keys and values of the context, per layer; those of a block are never kept.

    Buffers grow by doubling, and a block's keys are written behind the context, where the next step overwrites them.
    """

    def __init__(self, num_layers: int):
        self.length = 0
        """context positions held"""
        self.buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self.last_feature_BLD: Tensor | None = None
        """target feature right before the anchor (conditioning = input_fusion)"""

    def crop(self, length: int) -> None:
        """Forget positions >= length."""
        self.length = min(self.length, length)

    def write(self, layer: int, at: int, k_BNGE: Tensor, v_BNGE: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows at position `at`; returns views of everything up to their end, [B, at + N, G, E]."""
        end = at + k_BNGE.shape[1]
        held = self.buffers[layer]
        if held is None or held[0].shape[1] < end:
            shape = (k_BNGE.shape[0], max(256, 2 * end), *k_BNGE.shape[2:])
            new = (k_BNGE.new_empty(shape), v_BNGE.new_empty(shape))
            if held is not None:
                for old, grown in zip(held, new, strict=True):
                    grown[:, :at] = old[:, :at]
            self.buffers[layer] = held = new
        held[0][:, at:end], held[1][:, at:end] = k_BNGE, v_BNGE
        return held[0][:, :end], held[1][:, :end]


class Drafter(nn.Module):
    """See the module's docstring. `Drafter(cfg)` is initialised as `trainer.drafter.init.init_random` describes."""

    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        self.config = cfg
        D = cfg.hidden_size
        context_width = D * (cfg.num_taps if cfg.conditioning == "kv_injection" else 1)
        self.fc = nn.Linear(context_width, D, bias=False)
        self.hidden_norm = Qwen3RMSNorm(D, eps=cfg.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.num_hidden_layers))
        self.norm = Qwen3RMSNorm(D, eps=cfg.rms_norm_eps)
        if cfg.conditioning == "input_fusion":
            self.feature_fc = nn.Linear(D * cfg.num_taps, D, bias=False)
            self.feature_norm = Qwen3RMSNorm(D, eps=cfg.rms_norm_eps)
            self.fuse = nn.Linear(2 * D, D, bias=False)
        self.rotary = Rotary(cfg)
        self.execution: Execution = "auto"
        self.apply(_initialise)

    def block_inputs(self, tokens: Tensor, embedding_VD: Tensor) -> Tensor:
        """Embeddings [A, K, D] of the blocks' inputs.

        Args:
            tokens: int64 [A] anchor tokens, or [A, K] labels whose column 0 is the anchor. Block drafting reads only
                the anchor and puts masks behind it; autoregressive drafting reads all K (teacher forcing).
            embedding_VD: the target's.
        """
        cfg = self.config
        if cfg.drafting == "block":
            anchors = tokens if tokens.ndim == 1 else tokens[:, 0]
            tokens = anchors[:, None].expand(-1, cfg.block_size).clone()
            tokens[:, 1:] = cfg.mask_token_id
        return F.embedding(tokens, embedding_VD).to(self.fc.weight.dtype)

    def forward(
        self,
        hidden_SLD: Tensor,
        positions_S: Tensor,
        block_embeds_AKD: Tensor,
        context_start_A: Tensor,
        context_end_A: Tensor,
        anchor_position_A: Tensor,
        anchor_valid_A: Tensor | None = None,
        *,
        context_embeds_SD: Tensor | None = None,
    ) -> Tensor:
        """All blocks of a packed row of documents at once.

        Args:
            hidden_SLD: target features, any float dtype; padding rows are never seen by a valid block.
            positions_S: int64, restart per document.
            block_embeds_AKD: from `block_inputs`.
            context_start_A, context_end_A: int64 rows [start, end) of S that block a sees; end is the anchor's row.
            anchor_position_A: int64, RoPE position of the anchor in its document.
            anchor_valid_A: bool; the attention of invalid blocks is zero and they cause no gradient to the context.
            context_embeds_SD: target embeddings of the context tokens, where `config.needs_context_embeds`.

        Returns:
            hidden_AKD after the final norm; `hidden_AKD[a, k] @ head_VD.T` are the logits of the token at p + k.
            Slot 0 is the anchor's and predicts nothing.
        """
        ranges = ContextRanges(context_start_A, context_end_A, anchor_valid_A)
        dtype = self.fc.weight.dtype
        context_SD = self._context(hidden_SLD, context_embeds_SD)
        x = block_embeds_AKD.to(dtype)
        if self.config.conditioning == "input_fusion":
            last = hidden_SLD[(context_end_A - 1).clamp_min(0)]
            last = last.masked_fill((context_end_A <= context_start_A)[:, None, None], 0.0)
            x = self._fuse(x, last)
        cos_S, sin_S = self.rotary(context_SD, positions_S)
        slots_K = torch.arange(x.shape[1], device=x.device)
        cos_AK, sin_AK = self.rotary(x, anchor_position_A[:, None] + slots_K)
        for layer in self.layers:
            attn = layer.self_attn
            k_ctx, v_ctx = attn.keys_values(context_SD, cos_S, sin_S)
            h = layer.input_layernorm(x)
            q = attn.queries(h, cos_AK, sin_AK)
            k_blk, v_blk = attn.keys_values(h, cos_AK, sin_AK)
            attended = anchored_attention(
                q, k_ctx, v_ctx, k_blk, v_blk, ranges,
                causal=attn.causal, window=attn.window, execution=self.execution,
            )  # fmt: skip
            x = layer.finish(x, attended)
        return self._outputs(x)

    def new_cache(self) -> DrafterCache:
        return DrafterCache(len(self.layers))

    @torch.no_grad()
    def decode(
        self,
        block_embeds_BKD: Tensor,
        new_hidden_SLD: Tensor,
        cache: DrafterCache,
        start: int,
        *,
        new_embeds_SD: Tensor | None = None,
    ) -> Tensor:
        """One drafting step as at inference: append the new context to the cache, run one block behind it.

        Args:
            block_embeds_BKD: inputs of the block that begins at position `start`; fewer than K slots are allowed.
            new_hidden_SLD: features [S, L, D] or [B, S, L, D] of positions cache.length .. start - 1 (may be empty,
                when the same block is drafted again).
            cache: from `new_cache`; afterwards holds `start` positions.
            start: position of the anchor.
            new_embeds_SD: token embeddings of the same positions, where `config.needs_context_embeds`.

        Returns:
            hidden_BKD after the final norm, as `forward` gives for the same block.
        """
        x = block_embeds_BKD.to(self.fc.weight.dtype)
        B, K, _ = x.shape
        hidden = new_hidden_SLD if new_hidden_SLD.ndim == 4 else new_hidden_SLD[None]
        embeds = new_embeds_SD if new_embeds_SD is None or new_embeds_SD.ndim == 3 else new_embeds_SD[None]
        at = cache.length
        if at + hidden.shape[1] != start:
            raise ValueError(
                f"the cache holds {at} positions and {hidden.shape[1]} new ones came, but the block starts at {start}; "
                f"pass the features of positions {at}..{start - 1}"
            )
        context = self._context(hidden, embeds)
        if self.config.conditioning == "input_fusion":
            if hidden.shape[1]:
                cache.last_feature_BLD = hidden[:, -1]
            if cache.last_feature_BLD is None:  # a block at position 0
                cache.last_feature_BLD = hidden.new_zeros(B, *hidden.shape[2:])
            x = self._fuse(x, cache.last_feature_BLD)
        positions = torch.arange(at, start + K, device=x.device)[None]
        cos, sin = self.rotary(x, positions)
        split = start - at
        for i, layer in enumerate(self.layers):
            attn = layer.self_attn
            cache.write(i, at, *attn.keys_values(context, cos[:, :split], sin[:, :split]))
            h = layer.input_layernorm(x)
            q = attn.queries(h, cos[:, split:], sin[:, split:])
            k, v = cache.write(i, start, *attn.keys_values(h, cos[:, split:], sin[:, split:]))
            attended = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                attn_mask=_decode_mask(start, K, attn.causal, attn.window, x.device), enable_gqa=True,
            )  # fmt: skip
            x = layer.finish(x, attended.transpose(1, 2))
        cache.length = start
        return self._outputs(x)

    @torch.no_grad()
    def draft(
        self,
        anchor_ids_B: Tensor,
        new_hidden_SLD: Tensor,
        cache: DrafterCache,
        start: int,
        embedding_VD: Tensor,
        head_VD: Tensor,
        *,
        new_ids_S: Tensor | None = None,
        length: int | None = None,
    ) -> Tensor:
        """Greedy drafts int64 [B, K - 1] for positions start + 1 .. ; one pass, or K - 1 for an autoregressive drafter.

        `new_ids_S` are the context tokens of `new_hidden_SLD` (needed where `config.needs_context_embeds`); `length`
        is the number of block slots including the anchor, K by default.
        """
        embeds = F.embedding(new_ids_S, embedding_VD) if self.config.needs_context_embeds else None
        K = length or self.config.block_size
        if self.config.drafting == "block":
            inputs = self.block_inputs(anchor_ids_B, embedding_VD)[:, :K]
            hidden_BKD = self.decode(inputs, new_hidden_SLD, cache, start, new_embeds_SD=embeds)
            return (hidden_BKD[:, 1:].to(head_VD.dtype) @ head_VD.T).argmax(-1)
        tokens = anchor_ids_B[:, None]
        for _ in range(K - 1):
            inputs = F.embedding(tokens, embedding_VD)
            hidden = self._next_hidden(inputs, new_hidden_SLD, cache, start, embeds)
            tokens = torch.cat([tokens, (hidden.to(head_VD.dtype) @ head_VD.T).argmax(-1)[:, None]], dim=1)
            new_hidden_SLD = new_hidden_SLD[..., :0, :, :]
            embeds = None if embeds is None else embeds[..., :0, :]
        return tokens[:, 1:]

    def _next_hidden(self, inputs, new_hidden, cache, start, embeds) -> Tensor:
        """Hidden state [B, D] that predicts the token behind the last input: `_outputs` shifts it to a spare slot."""
        spare = torch.cat([inputs, torch.zeros_like(inputs[:, :1])], dim=1)
        return self.decode(spare, new_hidden, cache, start, new_embeds_SD=embeds)[:, -1]

    def _context(self, hidden: Tensor, embeds: Tensor | None) -> Tensor:
        """The context feature, [..., S, D]."""
        if self.config.needs_context_embeds:
            if embeds is None:
                raise ValueError(
                    f"conditioning {self.config.conditioning!r} needs the context's token embeddings; pass them"
                )
            return self.hidden_norm(self.fc(embeds.to(self.fc.weight.dtype)))
        return self.hidden_norm(self.fc(hidden.flatten(-2).to(self.fc.weight.dtype)))

    def _fuse(self, x: Tensor, last_ALD: Tensor) -> Tensor:
        """Block inputs joined with the target's feature right before the anchor."""
        feature = self.feature_norm(self.feature_fc(last_ALD.flatten(-2).to(x.dtype)))
        return self.fuse(torch.cat([x, feature[:, None].expand_as(x)], dim=-1))

    def _outputs(self, x: Tensor) -> Tensor:
        """Final norm. Autoregressive: the state at slot k - 1 predicts p + k, so shift it to slot k."""
        x = self.norm(x)
        return x.roll(1, dims=1) if self.config.drafting == "autoregressive" else x


def _decode_mask(start: int, K: int, causal: bool, window: int | None, device) -> Tensor | None:
    if not causal and window is None:
        return None
    key = torch.arange(start + K, device=device)[None]
    query = torch.arange(start, start + K, device=device)[:, None]
    mask = torch.ones(K, start + K, dtype=torch.bool, device=device)
    if causal:
        mask &= key <= query
    if window is not None:
        mask &= query - key < window
    return mask


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
