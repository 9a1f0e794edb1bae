"""Anchored attention: the queries of a block see the context before their anchor, then the whole of their own block.

Legend: A blocks (anchors), K block size, S packed context rows of several documents, H query heads, G key/value heads,
R = H / G, E head dim.

    allowed(query k of block a, context row j)  =  valid[a]  and  start[a] <= j < end[a]
    allowed(query k of block a, slot i of a)    =  valid[a]  (causal layers: and i <= k)

Row `end[a]` of the packed context is the anchor's own, so a sliding window counts rows: j is visible where
end[a] + k - j < window, in the block where k - i < window. Example: anchors at rows 5 and 6 of one document, K = 4:
block 0 sees context rows 0..4, block 1 rows 0..5, neither sees the other's slots, however much they overlap.

Four executions of that one rule:

- `dense`   the definition: SDPA with an [A*K, S + A*K] boolean mask, any dtype. At S 3072, A 512, K 16 the mask alone
            is 92 MB and 86 % of it is False.
- `cpu`     exact without the mask: the context part and the block part are computed apart and merged by log-sum-exp.
            The backward of a softmax over the union needs only the merged output and log-sum-exp, so each part's
            backward kernel gets those and the gradients add up exactly (the argument of ring attention).
- `flex`    FlexAttention with a block mask (CUDA; it has no backward on CPU).
- `triton`  our own kernel (`kernels.anchored_attention`).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Execution = Literal["auto", "dense", "cpu", "flex", "triton"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Blocks per call of the CPU kernel. More blocks: fewer calls, but a wider ragged edge (keys that only some of the
# blocks see). 512 blocks on 3072 rows have 6 rows between neighbours: 32 blocks share all but ~190 of ~1,500 keys.
_CHUNK_BLOCKS = 32
# Below this many shared keys one masked call is cheaper than an unmasked and a masked one.
_MIN_SHARED = 64


@dataclass(frozen=True)
class _Chunk:
    """Blocks `first:last` (in sorted order) of one document; all see rows [start, shared), some up to `stop`."""

    first: int
    last: int
    start: int
    shared: int
    stop: int


class ContextRanges:
    """Which context rows each block sees, and what the executions derive from it once for all layers of a forward.

    Args:
        start_A, end_A: int64, rows [start, end) of the packed context; start == end (no context) is legal.
        valid_A: bool; an invalid block gets zero output and causes zero gradient. None: all valid.
    """

    def __init__(self, start_A: Tensor, end_A: Tensor, valid_A: Tensor | None = None):
        if start_A.shape != end_A.shape or start_A.ndim != 1:
            raise ValueError(
                f"context ranges have shapes {tuple(start_A.shape)} and {tuple(end_A.shape)}; give two [A]"
            )
        self.start_A = start_A
        self.end_A = end_A
        self.valid_A = torch.ones_like(start_A, dtype=torch.bool) if valid_A is None else valid_A
        self.masks: dict = {}  # block masks of FlexAttention, by (shape, causal, window)

    @cached_property
    def order_N(self) -> Tensor:
        """Blocks that see any context, sorted by their last row (so by document, then anchor)."""
        index = torch.nonzero(self.valid_A & (self.end_A > self.start_A)).flatten()
        return index[torch.argsort(self.end_A[index], stable=True)]

    @cached_property
    def is_sorted(self) -> bool:
        """Whether `order_N` is simply 0..A-1, as the stream delivers full batches: then nothing needs gathering."""
        n = self.order_N.numel()
        return n == self.start_A.numel() and bool((self.order_N == torch.arange(n, device=self.order_N.device)).all())

    @cached_property
    def chunks(self) -> list[_Chunk]:
        starts = self.start_A[self.order_N].tolist()
        ends = self.end_A[self.order_N].tolist()
        out, first = [], 0
        while first < len(ends):
            last = first + 1
            while last < len(ends) and last - first < _CHUNK_BLOCKS and starts[last] == starts[first]:
                last += 1
            out.append(_Chunk(first, last, starts[first], ends[first], ends[last - 1]))
            first = last
        return out

    @cached_property
    def sorted_end_N(self) -> Tensor:
        return self.end_A[self.order_N]


def anchored_attention(
    q_AKHE: Tensor,
    k_ctx_SGE: Tensor,
    v_ctx_SGE: Tensor,
    k_blk_AKGE: Tensor,
    v_blk_AKGE: Tensor,
    ranges: ContextRanges,
    *,
    causal: bool = False,
    window: int | None = None,
    execution: Execution = "auto",
) -> Tensor:
    """Softmax attention of every block over its context and itself, scaled by E^-1/2. Returns [A, K, H, E].

    Differentiable in all five tensors. `auto` is `cpu` for CPU tensors and `triton` on CUDA.
    Invalid blocks: zeros, and zero gradient.
    """
    if execution == "auto":
        execution = "triton" if q_AKHE.is_cuda else "cpu"
    if execution == "cpu":
        return _TwoParts.apply(q_AKHE, k_ctx_SGE, v_ctx_SGE, k_blk_AKGE, v_blk_AKGE, ranges, causal, window)
    if execution == "triton":
        from kernels.anchored_attention import anchored_attention as triton_attention

        return triton_attention(
            q_AKHE, k_ctx_SGE, v_ctx_SGE, k_blk_AKGE, v_blk_AKGE,
            ranges.start_A, ranges.end_A, ranges.valid_A, causal=causal, window=window,
        )  # fmt: skip
    if execution == "flex":
        return _flex(q_AKHE, k_ctx_SGE, v_ctx_SGE, k_blk_AKGE, v_blk_AKGE, ranges, causal, window)
    return _dense(q_AKHE, k_ctx_SGE, v_ctx_SGE, k_blk_AKGE, v_blk_AKGE, ranges, causal, window)


def dense_mask(ranges: ContextRanges, S: int, K: int, *, causal: bool, window: int | None) -> Tensor:
    """The rule of the module's docstring as a boolean [A*K, S + A*K]; True = visible."""
    device = ranges.start_A.device
    A = ranges.start_A.numel()
    block = torch.arange(A * K, device=device) // K
    slot = torch.arange(A * K, device=device) % K
    start, end, valid = (t[block][:, None] for t in (ranges.start_A, ranges.end_A, ranges.valid_A))
    row = torch.arange(S, device=device)[None]
    context = (row >= start) & (row < end)
    own = block[:, None] == block[None]
    if causal:
        own &= slot[None] <= slot[:, None]
    if window is not None:
        context &= end + slot[:, None] - row < window
        own &= slot[:, None] - slot[None] < window
    return torch.cat([context, own], dim=1) & valid


def _dense(q, k_ctx, v_ctx, k_blk, v_blk, ranges, causal, window):
    A, K, H, E = q.shape
    mask = dense_mask(ranges, k_ctx.shape[0], K, causal=causal, window=window)
    k = torch.cat([k_ctx, k_blk.flatten(0, 1)]).transpose(0, 1)[None]
    v = torch.cat([v_ctx, v_blk.flatten(0, 1)]).transpose(0, 1)[None]
    # a row that sees nothing would be NaN: let it see everything, then zero what comes out
    alive = mask.any(1)
    out = F.scaled_dot_product_attention(
        q.flatten(0, 1).transpose(0, 1)[None], k, v, attn_mask=mask | ~alive[:, None], enable_gqa=True
    )
    return (out[0].transpose(0, 1) * alive[:, None, None]).view(A, K, H, E)


def _rows(x_AKHE: Tensor, G: int) -> Tensor:
    """[A, K, H, E] -> [G, A*K*R, E]: the R query heads of one key head become rows beside each other."""
    A, K, H, E = x_AKHE.shape
    return x_AKHE.reshape(A * K, G, H // G, E).permute(1, 0, 2, 3).reshape(G, A * K * (H // G), E)


def _unrows(x_GNE: Tensor, A: int, K: int, H: int) -> Tensor:
    G, _, E = x_GNE.shape
    return x_GNE.view(G, A * K, H // G, E).permute(1, 0, 2, 3).reshape(A, K, H, E)


def _bias(ends_c: Tensor, lo: int, hi: int, K: int, R: int, window: int | None, dtype: torch.dtype):
    """Additive mask [c*K*R, hi - lo] for context rows lo..hi-1, and the rows that see none of them (None: no such)."""
    row = torch.arange(lo, hi, device=ends_c.device)
    if window is None:
        hidden = (row >= ends_c[:, None]).repeat_interleave(K * R, 0)
        empty = None
    else:
        slot = torch.arange(K, device=ends_c.device)
        end = ends_c[:, None, None]
        hidden = ((row >= end) | (end + slot[:, None] - row >= window)).flatten(0, 1).repeat_interleave(R, 0)
        empty = hidden.all(1)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf), empty


def _context_calls(ranges: ContextRanges, K: int, R: int, window: int | None, dtype: torch.dtype):
    """The calls of the flash kernel: (row slice, first key, last key, mask or None, rows that see nothing or None)."""
    per = K * R
    for c in ranges.chunks:
        ends = ranges.sorted_end_N[c.first : c.last]
        if window is not None and c.stop + K - 1 - c.start >= window:
            lo = max(c.start, c.shared - window + 1)
            if lo >= c.stop:  # window 1: a query sees only itself (and the kernel divides by the number of keys)
                continue
            yield slice(c.first * per, c.last * per), lo, c.stop, *_bias(ends, lo, c.stop, K, R, window, dtype)
            continue
        if c.shared - c.start < _MIN_SHARED and c.stop > c.shared:
            bias = _bias(ends, c.start, c.stop, K, R, None, dtype)
            yield slice(c.first * per, c.last * per), c.start, c.stop, *bias
            continue
        yield slice(c.first * per, c.last * per), c.start, c.shared, None, None
        if c.stop > c.shared:  # the ragged edge; blocks that end at `shared` see none of it and must stay out
            skip = int((ends == c.shared).sum())
            bias = _bias(ends[skip:], c.shared, c.stop, K, R, None, dtype)
            yield slice((c.first + skip) * per, c.last * per), c.shared, c.stop, *bias


def _own_mask(K: int, R: int, causal: bool, window: int | None, device) -> Tensor | None:
    """What slot i of the own block is hidden from query slot k: bool [K*R, K], or None when nothing is."""
    if not causal and (window is None or window >= K):
        return None
    slot = torch.arange(K, device=device)
    distance = slot[:, None] - slot[None]
    hidden = torch.zeros(K, K, dtype=torch.bool, device=device)
    if causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= distance >= window
    return hidden.repeat_interleave(R, 0)


class _TwoParts(torch.autograd.Function):
    """The `cpu` execution. Everything is laid out as [G, rows, E], rows = (block, slot, query head of the group)."""

    @staticmethod
    def forward(ctx, q_AKHE, k_ctx_SGE, v_ctx_SGE, k_blk_AKGE, v_blk_AKGE, ranges, causal, window):
        A, K, H, E = q_AKHE.shape
        G = k_ctx_SGE.shape[1]
        R = H // G
        scale = E**-0.5
        q = _rows(q_AKHE, G)
        k_ctx, v_ctx = k_ctx_SGE.transpose(0, 1), v_ctx_SGE.transpose(0, 1)

        # part 2 first: the block itself, [A, G, K*R, K] scores
        qb = q.view(G, A, K * R, E)
        kb, vb = (t.permute(2, 0, 1, 3).contiguous() for t in (k_blk_AKGE, v_blk_AKGE))
        scores = torch.matmul(qb, kb.transpose(-1, -2)).mul_(scale)
        own = _own_mask(K, R, causal, window, q.device)
        if own is not None:
            scores.masked_fill_(own, -math.inf)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse_own = torch.logsumexp(scores.to(wide), -1)
        out = torch.matmul(torch.exp(scores.to(wide) - lse_own[..., None]).to(q.dtype), vb).to(wide).view(G, -1, E)
        lse = lse_own.view(G, -1)

        # part 1: the context, merged in
        gather = None if ranges.is_sorted else _row_index(ranges.order_N, K * R)
        qs, acc, acc_lse = (q, out, lse) if gather is None else (q[:, gather], out[:, gather], lse[:, gather])
        for rows, lo, hi, bias, empty in _context_calls(ranges, K, R, window, q.dtype):
            part, part_lse = _flash(
                qs[None, :, rows], k_ctx[None, :, lo:hi], v_ctx[None, :, lo:hi], 0.0, False, attn_mask=bias, scale=scale
            )
            part, part_lse = part[0].to(wide), part_lse[0].to(wide)
            if empty is not None:  # the kernel returns garbage for rows whose keys are all masked
                part = part.masked_fill(empty[:, None], 0.0)
                part_lse = part_lse.masked_fill(empty, -math.inf)
            old = acc_lse[:, rows]
            new = torch.logaddexp(old, part_lse)
            acc[:, rows] = acc[:, rows] * torch.exp(old - new)[..., None] + part * torch.exp(part_lse - new)[..., None]
            acc_lse[:, rows] = new
        if gather is not None:
            out[:, gather], lse[:, gather] = acc, acc_lse

        out = out.to(q.dtype)
        dead = ~ranges.valid_A.repeat_interleave(K * R) if not bool(ranges.valid_A.all()) else None
        ctx.save_for_backward(q, k_ctx_SGE, v_ctx_SGE, kb, vb, out, lse)
        ctx.extra = (ranges, causal, window, gather, dead, A, K, H)
        result = out if dead is None else out.masked_fill(dead[:, None], 0.0)
        return _unrows(result, A, K, H)

    @staticmethod
    def backward(ctx, grad_AKHE):
        q, k_ctx_SGE, v_ctx_SGE, kb, vb, out, lse = ctx.saved_tensors
        ranges, causal, window, gather, dead, A, K, H = ctx.extra
        G, _, E = q.shape
        R = H // G
        scale = E**-0.5
        wide = lse.dtype
        grad = _rows(grad_AKHE, G)
        if dead is not None:
            grad = grad.masked_fill(dead[:, None], 0.0)

        # part 2: probabilities under the merged log-sum-exp
        qb, gb = q.view(G, A, K * R, E), grad.view(G, A, K * R, E)
        delta = (grad.to(wide) * out.to(wide)).sum(-1).view(G, A, K * R, 1)
        p = torch.matmul(qb, kb.transpose(-1, -2)).to(wide).mul_(scale).sub_(lse.view(G, A, K * R, 1)).exp_()
        own = _own_mask(K, R, causal, window, q.device)
        if own is not None:
            p.masked_fill_(own, 0.0)
        ds = (torch.matmul(gb, vb.transpose(-1, -2)).to(wide).sub_(delta)).mul_(p).mul_(scale).to(q.dtype)
        grad_vb = torch.matmul(p.to(q.dtype).transpose(-1, -2), gb)
        grad_kb = torch.matmul(ds.transpose(-1, -2), qb)
        grad_q = torch.matmul(ds, kb).view(G, -1, E)

        # part 1
        k_ctx, v_ctx = k_ctx_SGE.transpose(0, 1), v_ctx_SGE.transpose(0, 1)
        grad_k = torch.zeros(k_ctx.shape, dtype=wide)
        grad_v = torch.zeros(v_ctx.shape, dtype=wide)
        take = (lambda t: t) if gather is None else (lambda t: t[:, gather])
        qs, gs, os, ls = take(q), take(grad), take(out), take(lse)
        grad_qs = grad_q if gather is None else torch.zeros_like(qs)
        for rows, lo, hi, bias, _ in _context_calls(ranges, K, R, window, q.dtype):
            gq, gk, gv = _flash_backward(
                gs[None, :, rows], qs[None, :, rows], k_ctx[None, :, lo:hi], v_ctx[None, :, lo:hi],
                os[None, :, rows], ls[None, :, rows], 0.0, False, attn_mask=bias, scale=scale,
            )  # fmt: skip
            grad_qs[:, rows] += gq[0]
            grad_k[:, lo:hi] += gk[0]
            grad_v[:, lo:hi] += gv[0]
        if gather is not None:
            grad_q[:, gather] += grad_qs
        back = (1, 2, 0, 3)
        return (
            _unrows(grad_q, A, K, H),
            grad_k.to(q.dtype).transpose(0, 1), grad_v.to(q.dtype).transpose(0, 1),
            grad_kb.permute(back), grad_vb.permute(back),
            None, None, None,
        )  # fmt: skip


def _row_index(order_N: Tensor, per: int) -> Tensor:
    """Rows of sorted blocks: block 3 with 32 rows each -> 96..127."""
    return (order_N[:, None] * per + torch.arange(per, device=order_N.device)).flatten()


def _flex(q, k_ctx, v_ctx, k_blk, v_blk, ranges, causal, window):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    A, K, H, E = q.shape
    S = k_ctx.shape[0]
    start, end, valid = ranges.start_A, ranges.end_A, ranges.valid_A

    def allowed(b, h, i, j):
        block, slot = i // K, i % K
        context = (j < S) & (j >= start[block]) & (j < end[block])
        key_slot = (j - S) % K
        own = (j >= S) & ((j - S) // K == block)
        if causal:
            own = own & (key_slot <= slot)
        if window is not None:
            context = context & (end[block] + slot - j < window)
            own = own & (slot - key_slot < window)
        return valid[block] & (context | own)

    key = (S, K, causal, window)
    if key not in ranges.masks:
        build = torch.compile(create_block_mask, dynamic=False) if q.is_cuda else create_block_mask
        ranges.masks[key] = build(allowed, None, None, A * K, S + A * K, device=q.device)
    run = _compiled_flex() if q.is_cuda else flex_attention
    out = run(
        q.flatten(0, 1).transpose(0, 1)[None],
        torch.cat([k_ctx, k_blk.flatten(0, 1)]).transpose(0, 1)[None],
        torch.cat([v_ctx, v_blk.flatten(0, 1)]).transpose(0, 1)[None],
        block_mask=ranges.masks[key],
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).reshape(A, K, H, E)


_FLEX = None


def _compiled_flex():
    """FlexAttention compiled once per process: shapes of a training run are fixed."""
    global _FLEX
    if _FLEX is None:
        from torch.nn.attention.flex_attention import flex_attention

        _FLEX = torch.compile(flex_attention, dynamic=False)
    return _FLEX
