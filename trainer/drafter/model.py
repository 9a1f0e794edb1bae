"""The drafter: DFlash's block-diffusion transformer (arXiv 2602.06036) with the parameter names of its checkpoints.

Legend: S context rows, L taps, D hidden size, A blocks, K block size, H query heads, G key/value heads, E head dim,
B sequences.

One context feature, `hidden_norm(fc(taps))`, is projected to keys and values in every layer, beside the block's own
keys and values; queries come from the block only. Training (`forward`: all blocks of packed documents at once) and
drafting (`decode_block`: one block per sequence, context keys cached) are the same function of the same weights.
Embedding and head are the target's: callers pass them in, they are never parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from trainer.drafter.attention import ContextRanges, Execution, anchored_attention
from trainer.drafter.cache import BlockView, DrafterCache
from trainer.drafter.parts import MLP, RMSNorm

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
        self.q_norm = RMSNorm(E, eps=cfg.rms_norm_eps)
        self.k_norm = RMSNorm(E, eps=cfg.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)
        return k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class Layer(nn.Module):
    def __init__(self, cfg: DrafterConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(cfg, layer)
        self.mlp = MLP(qwen3_config(cfg))
        self.input_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows the attention: output projection, residual, MLP. attended [..., H, E]."""
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """See the module's docstring. `Drafter(cfg)` is initialised as `trainer.drafter.init.init_random` describes."""

    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        self.config = cfg
        D = cfg.hidden_size
        context_width = D * (cfg.num_taps if cfg.conditioning == "kv_injection" else 1)
        self.fc = nn.Linear(context_width, D, bias=False)
        self.hidden_norm = RMSNorm(D, eps=cfg.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(D, eps=cfg.rms_norm_eps)
        if cfg.conditioning == "input_fusion":
            self.feature_fc = nn.Linear(D * cfg.num_taps, D, bias=False)
            self.feature_norm = RMSNorm(D, eps=cfg.rms_norm_eps)
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
        then: Callable[[Tensor], tuple[Tensor, ...]] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """All blocks of a packed row of documents at once.

        Args:
            hidden_SLD: target features, any float dtype; padding rows are never seen by a valid block.
            positions_S: int64, restart per document.
            block_embeds_AKD: from `block_inputs`.
            context_start_A, context_end_A: int64 rows [start, end) of S that block a sees; end is the anchor's row.
            anchor_position_A: int64, RoPE position of the anchor in its document.
            anchor_valid_A: bool; the attention of invalid blocks is zero and they cause no gradient to the context.
            context_embeds_SD: target embeddings of the context tokens, where `config.needs_context_embeds`.
            then: makes of the blocks' output the five arguments of further blocks, which share the projected context.

        Returns:
            hidden_AKD after the final norm; `hidden_AKD[a, k] @ head_VD.T` are the logits of the token at p + k.
            Slot 0 is the anchor's and predicts nothing. With `then`, also that of the further blocks.
        """
        context_SD = self._context(hidden_SLD, context_embeds_SD)
        cos_S, sin_S = self.rotary(context_SD, positions_S)
        context = [layer.self_attn.keys_values(context_SD, cos_S, sin_S) for layer in self.layers]
        blocks = (block_embeds_AKD, context_start_A, context_end_A, anchor_position_A, anchor_valid_A)
        out = self._blocks(context, hidden_SLD, *blocks)
        return out if then is None else (out, self._blocks(context, hidden_SLD, *then(out)))

    def _blocks(
        self,
        context: Sequence[tuple[Tensor, Tensor]],
        hidden_SLD: Tensor,
        block_embeds_AKD: Tensor,
        context_start_A: Tensor,
        context_end_A: Tensor,
        anchor_position_A: Tensor,
        anchor_valid_A: Tensor | None,
    ) -> Tensor:
        """As `forward`; `context`: keys and values per layer."""
        ranges = ContextRanges(context_start_A, context_end_A, anchor_valid_A)
        x = block_embeds_AKD.to(self.fc.weight.dtype)
        if self.config.conditioning == "input_fusion":
            last = hidden_SLD[(context_end_A - 1).clamp_min(0)]
            last = last.masked_fill((context_end_A <= context_start_A)[:, None, None], 0.0)
            x = self._fuse(x, last)
        slots_K = torch.arange(x.shape[1], device=x.device)
        cos_AK, sin_AK = self.rotary(x, anchor_position_A[:, None] + slots_K)
        for layer, (k_ctx, v_ctx) in zip(self.layers, context, strict=True):
            attn = layer.self_attn
            h = layer.input_layernorm(x)
            q = attn.queries(h, cos_AK, sin_AK)
            k_blk, v_blk = attn.keys_values(h, cos_AK, sin_AK)
            attended = anchored_attention(
                q, k_ctx, v_ctx, k_blk, v_blk, ranges,
                causal=attn.causal, window=attn.window, execution=self.execution,
            )  # fmt: skip
            x = layer.finish(x, attended)
        return self._outputs(x)

    def new_cache(self, rows: int = 1, capacity: int = 0) -> DrafterCache:
        """An empty cache; it grows where `rows` or `capacity` (positions) turn out too small."""
        return DrafterCache(len(self.layers), rows, capacity)

    @torch.no_grad()
    def append_context(
        self, cache: DrafterCache, rows: Sequence[int], hidden: Sequence[Tensor], embeds: Sequence[Tensor] | None = None
    ) -> None:
        """Append features to rows of the cache: all rows' new positions go through `fc` and the projections at once.

        Args:
            cache: from `new_cache`.
            rows: which rows, each at most once.
            hidden: per row, features [S_i, L, D] of the positions right behind `cache.lengths[row]` (S_i may be 0).
            embeds: per row, the token embeddings [S_i, D] of the same positions, where `config.needs_context_embeds`.
        """
        counts = [h.shape[0] for h in hidden]
        if not sum(counts):
            return
        rows_N, at_N = [], []
        for row, count in zip(rows, counts, strict=True):
            at = cache.reserve(row, count)
            rows_N += [row] * count
            at_N += range(at, at + count)
        device = self.fc.weight.device
        rows_N, at_N = torch.tensor(rows_N, device=device), torch.tensor(at_N, device=device)
        context_ND = self._context(torch.cat(list(hidden)), None if embeds is None else torch.cat(list(embeds)))
        cos, sin = (t[0] for t in self.rotary(context_ND, at_N[None]))
        for i, layer in enumerate(self.layers):
            cache.write(i, rows_N, at_N, *layer.self_attn.keys_values(context_ND, cos, sin))
        for row, count, features in zip(rows, counts, hidden, strict=True):
            cache.lengths[row] += count
            if count and self.config.conditioning == "input_fusion":
                cache.last_feature[row] = features[-1]

    @torch.no_grad()
    def decode_block(self, block_embeds_BKD: Tensor, cache: DrafterCache, rows: Sequence[int]) -> Tensor:
        """One block behind the context of each of `rows`, which may stand at different positions.

        Returns:
            hidden_BKD after the final norm, as `forward` gives for the same blocks. The cache's context is unchanged.
        """
        x = block_embeds_BKD.to(self.fc.weight.dtype)
        if self.config.conditioning == "input_fusion":
            nothing = x.new_zeros(self.config.num_taps, self.config.hidden_size)  # a block at position 0
            x = self._fuse(x, torch.stack([cache.last_feature.get(row, nothing).to(x.dtype) for row in rows]))
        view = BlockView(cache, rows, x.shape[1], x.device)
        cos, sin = self.rotary(x, view.positions_BK)
        for i, layer in enumerate(self.layers):
            attn = layer.self_attn
            h = layer.input_layernorm(x)
            q = attn.queries(h, cos, sin)
            held = cache.write(i, view.rows_B1, view.positions_BK, *attn.keys_values(h, cos, sin))
            k, v = view.keys_values(held)
            attended = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                attn_mask=view.mask(attn.causal, attn.window), enable_gqa=True,
            )  # fmt: skip
            x = layer.finish(x, attended.transpose(1, 2))
        return self._outputs(x)

    def decode(
        self,
        block_embeds_BKD: Tensor,
        new_hidden_SLD: Tensor,
        cache: DrafterCache,
        start: int,
        *,
        new_embeds_SD: Tensor | None = None,
    ) -> Tensor:
        """One drafting step of sequences that all stand at `start`: `append_context`, then `decode_block`.

        Args:
            block_embeds_BKD: inputs of the block that begins at position `start`; fewer than K slots are allowed.
            new_hidden_SLD: features [S, L, D] or [B, S, L, D] of positions cache.length .. start - 1 (may be empty,
                when the same block is drafted again).
            cache: from `new_cache`; afterwards holds `start` positions.
            start: position of the anchor.
            new_embeds_SD: token embeddings of the same positions, where `config.needs_context_embeds`.

        Raises:
            ValueError: the new features do not reach from the cache's length to `start`.
        """
        rows = range(block_embeds_BKD.shape[0])
        self._append_even(cache, rows, start, new_hidden_SLD, new_embeds_SD)
        return self.decode_block(block_embeds_BKD, cache, rows)

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
        """Greedy drafts int64 [B, K - 1] for positions start + 1 .. of sequences that all stand at `start`.

        `new_ids_S` are the context tokens of `new_hidden_SLD` (needed where `config.needs_context_embeds`); `length`
        is the number of block slots including the anchor, K by default. The rest as in `decode`.
        """
        rows = range(anchor_ids_B.shape[0])
        embeds = F.embedding(new_ids_S, embedding_VD) if self.config.needs_context_embeds else None
        self._append_even(cache, rows, start, new_hidden_SLD, embeds)
        return self.propose(anchor_ids_B, cache, rows, embedding_VD, head_VD, length=length).argmax(-1)

    @torch.no_grad()
    def propose(
        self,
        anchor_ids_B: Tensor,
        cache: DrafterCache,
        rows: Sequence[int],
        embedding_VD: Tensor,
        head_VD: Tensor,
        *,
        length: int | None = None,
    ) -> Tensor:
        """logits_BNV of the N = length - 1 tokens behind each row's anchor, which stands right behind its context.

        One pass; or N for an autoregressive drafter, which reads its own greedy choices.
        """
        K = length or self.config.block_size
        if self.config.drafting == "block":
            inputs = self.block_inputs(anchor_ids_B, embedding_VD)[:, :K]
            return _logits(self.decode_block(inputs, cache, rows)[:, 1:], head_VD)
        tokens_Bn, logits = anchor_ids_B[:, None], []
        for _ in range(K - 1):
            inputs = F.embedding(tokens_Bn, embedding_VD)
            spare = torch.cat([inputs, torch.zeros_like(inputs[:, :1])], dim=1)  # `_outputs` shifts the state there
            hidden_B1D = self.decode_block(spare, cache, rows)[:, -1:]
            logits.append(_logits(hidden_B1D, head_VD))
            tokens_Bn = torch.cat([tokens_Bn, logits[-1].argmax(-1)], dim=1)
        return torch.cat(logits, dim=1)

    def _append_even(self, cache: DrafterCache, rows: Sequence[int], start: int, hidden: Tensor, embeds) -> None:
        """`append_context` up to `start` for rows that stand at one position."""
        hidden_BSLD = hidden if hidden.ndim == 4 else hidden[None]
        at, new = cache.length, hidden_BSLD.shape[1]
        if at + new != start:
            raise ValueError(
                f"the cache holds {at} positions and {new} new ones came, but the block starts at {start}; pass the "
                f"features of positions {at}..{start - 1}"
            )
        if embeds is not None:
            embeds = list(embeds if embeds.ndim == 3 else embeds[None])
        self.append_context(cache, rows, list(hidden_BSLD), embeds)

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


def _logits(hidden_BND: Tensor, head_VD: Tensor) -> Tensor:
    """One matrix product: over a slice such as [:, 1:], torch would run a batched one, 25 times slower on a CPU."""
    return (hidden_BND.flatten(0, 1).to(head_VD.dtype) @ head_VD.T).unflatten(0, hidden_BND.shape[:2])


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
