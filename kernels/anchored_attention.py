"""Anchored attention in Triton: each block's queries over its context range, then over the block itself.

Legend: A blocks, K block size, S packed context rows, H query heads, G key/value heads, R = H / G, E head dim,
M = K * R query rows of one (block, key/value head).

The definition is `trainer.drafter.attention` (`dense`); here, no mask tensor and no [S + A*K] concatenation exist. One
program owns one (block, key/value head): its M rows share every key they load, so the context is read once per key
head and not once per query head (K = 16 and R = 4: 64 rows, one tensor-core tile).

    forward         context tiles with an online softmax, then the own block    -> out, log-sum-exp
    backward, block the same walk -> grad_q; the own block's grad_k, grad_v belong to this program alone
    backward, rows  one program per tile of context rows -> grad_k, grad_v from the blocks that may see the tile

Blocks are visited in the order of their last row; a block sees tile [n0, n1) only if end > n0, so the third kernel
starts at the first such block, and stops behind the last one with start < n1: for a packed row that is exactly the
blocks of the documents in the tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _context_hidden(rows, slots, start, end, WINDOW: tl.constexpr):
    """[M, N]: context row j is not visible to the query at slot k."""
    hidden = (rows[None, :] < start) | (rows[None, :] >= end)
    if WINDOW > 0:
        hidden = hidden | (end + slots[:, None] - rows[None, :] >= WINDOW)
    return hidden


@triton.jit
def _own_hidden(slots, keys, K: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """[M, KP]: slot i of the own block is not visible to the query at slot k."""
    hidden = (keys[None, :] >= K) | (slots[:, None] < 0)
    if CAUSAL:
        hidden = hidden | (keys[None, :] > slots[:, None])
    if WINDOW > 0:
        hidden = hidden | (slots[:, None] - keys[None, :] >= WINDOW)
    return hidden


@triton.jit
def _query_rows(
    g, K: tl.constexpr, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, MP: tl.constexpr, EP: tl.constexpr
):
    """Row m = slot * R + r of a key head: its slot, offset in the block's [K, H] and existence; both also as [MP, EP]
    offsets and mask of [K, H, E].

    Offsets inside a block or tile are int32, and only their bases int64: tiles of int64 offsets cost 64 registers.
    """
    R: tl.constexpr = H // G
    m = tl.arange(0, MP)
    e = tl.arange(0, EP)
    slot = m // R
    flat = slot * H + g * R + m % R
    ok = m < K * R
    return slot, flat, ok, flat[:, None] * E + e[None, :], ok[:, None] & (e[None, :] < E)


@triton.jit
def _own_rows(g, K: tl.constexpr, G: tl.constexpr, E: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr):
    """Slots of the own block, and the offsets and mask [KP, EP] of their keys."""
    i = tl.arange(0, KP)
    e = tl.arange(0, EP)
    return i, (i * G + g)[:, None] * E + e[None, :], (i[:, None] < K) & (e[None, :] < E)


@triton.jit
def _context_tile(
    kc_ptr, vc_ptr, first, end, g, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Context rows first .. first + N - 1, their keys and values [N, EP] (zero from `end` on)."""
    e = tl.arange(0, EP)
    rows = first + tl.arange(0, N)
    base = tl.cast(first, tl.int64) * (G * E)
    at = (tl.arange(0, N) * G + g)[:, None] * E + e[None, :]
    ok = (rows[:, None] < end) & (e[None, :] < E)
    return rows, tl.load(kc_ptr + base + at, mask=ok, other=0.0), tl.load(vc_ptr + base + at, mask=ok, other=0.0)


@triton.jit
def _forward_kernel(
    q_ptr, kc_ptr, vc_ptr, kb_ptr, vb_ptr, out_ptr, lse_ptr, start_ptr, end_ptr, scale,
    K: tl.constexpr, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    MP: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    a = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    start = tl.load(start_ptr + a).to(tl.int32)
    end = tl.load(end_ptr + a).to(tl.int32)
    q_ptr += a * (K * H * E)
    out_ptr += a * (K * H * E)
    lse_ptr += a * (K * H)
    kb_ptr += a * (K * G * E)
    vb_ptr += a * (K * G * E)
    slot, flat, row_ok, q_at, q_ok = _query_rows(g, K, H, G, E, MP, EP)
    # an invalid block has end < 0: nothing is visible, and its output stays zero
    if end < 0:
        tl.store(out_ptr + q_at, tl.zeros([MP, EP], tl.float32).to(out_ptr.dtype.element_ty), mask=q_ok)
        tl.store(lse_ptr + flat, tl.zeros([MP], tl.float32), mask=row_ok)
    else:
        q = tl.load(q_ptr + q_at, mask=q_ok, other=0.0)
        # the own block first: every query sees its own slot, so the running maximum is finite from here on
        i, own_at, own_ok = _own_rows(g, K, G, E, KP, EP)
        k_own = tl.load(kb_ptr + own_at, mask=own_ok, other=0.0)
        v_own = tl.load(vb_ptr + own_at, mask=own_ok, other=0.0)
        s_own = tl.dot(q, tl.trans(k_own), input_precision="ieee") * scale
        s_own = tl.where(_own_hidden(slot, i, K, CAUSAL, WINDOW), -float("inf"), s_own)
        top = tl.max(s_own, axis=1)
        p_own = tl.exp(s_own - top[:, None])
        total = tl.sum(p_own, axis=1)
        acc = tl.dot(p_own.to(v_own.dtype), v_own, input_precision="ieee")
        lo = start
        if WINDOW > 0:
            lo = tl.maximum(start, end - WINDOW + 1)
        for first in range(lo, end, N):
            rows, k, v = _context_tile(kc_ptr, vc_ptr, first, end, g, G, E, EP, N)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            s = tl.where(_context_hidden(rows, slot, start, end, WINDOW), -float("inf"), s)
            new = tl.maximum(top, tl.max(s, axis=1))
            p = tl.exp(s - new[:, None])
            shrink = tl.exp(top - new)
            total = total * shrink + tl.sum(p, axis=1)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = new
        tl.store(out_ptr + q_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_ok)
        tl.store(lse_ptr + flat, top + tl.log(total), mask=row_ok)


@triton.jit
def _backward_block_kernel(
    q_ptr, kc_ptr, vc_ptr, kb_ptr, vb_ptr, lse_ptr, grad_ptr, delta_ptr,
    gq_ptr, gkb_ptr, gvb_ptr, start_ptr, end_ptr, scale,
    K: tl.constexpr, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    MP: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    a = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    start = tl.load(start_ptr + a).to(tl.int32)
    end = tl.load(end_ptr + a).to(tl.int32)
    q_ptr += a * (K * H * E)
    grad_ptr += a * (K * H * E)
    gq_ptr += a * (K * H * E)
    lse_ptr += a * (K * H)
    delta_ptr += a * (K * H)
    kb_ptr += a * (K * G * E)
    vb_ptr += a * (K * G * E)
    gkb_ptr += a * (K * G * E)
    gvb_ptr += a * (K * G * E)
    slot, flat, row_ok, q_at, q_ok = _query_rows(g, K, H, G, E, MP, EP)
    i, own_at, own_ok = _own_rows(g, K, G, E, KP, EP)
    if end < 0:
        tl.store(gq_ptr + q_at, tl.zeros([MP, EP], tl.float32).to(gq_ptr.dtype.element_ty), mask=q_ok)
        zero = tl.zeros([KP, EP], tl.float32).to(gkb_ptr.dtype.element_ty)
        tl.store(gkb_ptr + own_at, zero, mask=own_ok)
        tl.store(gvb_ptr + own_at, zero, mask=own_ok)
    else:
        q = tl.load(q_ptr + q_at, mask=q_ok, other=0.0)
        grad = tl.load(grad_ptr + q_at, mask=q_ok, other=0.0)
        lse = tl.load(lse_ptr + flat, mask=row_ok, other=0.0)
        delta = tl.load(delta_ptr + flat, mask=row_ok, other=0.0)
        k_own = tl.load(kb_ptr + own_at, mask=own_ok, other=0.0)
        v_own = tl.load(vb_ptr + own_at, mask=own_ok, other=0.0)
        s_own = tl.dot(q, tl.trans(k_own), input_precision="ieee") * scale
        hidden = _own_hidden(slot, i, K, CAUSAL, WINDOW) | (row_ok == 0)[:, None]
        p_own = tl.where(hidden, 0.0, tl.exp(s_own - lse[:, None]))
        gvb = tl.dot(tl.trans(p_own).to(grad.dtype), grad, input_precision="ieee")
        ds_own = p_own * (tl.dot(grad, tl.trans(v_own), input_precision="ieee") - delta[:, None]) * scale
        gkb = tl.dot(tl.trans(ds_own).to(q.dtype), q, input_precision="ieee")
        tl.store(gvb_ptr + own_at, gvb.to(gvb_ptr.dtype.element_ty), mask=own_ok)
        tl.store(gkb_ptr + own_at, gkb.to(gkb_ptr.dtype.element_ty), mask=own_ok)
        gq = tl.dot(ds_own.to(k_own.dtype), k_own, input_precision="ieee")
        lo = start
        if WINDOW > 0:
            lo = tl.maximum(start, end - WINDOW + 1)
        for first in range(lo, end, N):
            rows, k, v = _context_tile(kc_ptr, vc_ptr, first, end, g, G, E, EP, N)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            p = tl.where(_context_hidden(rows, slot, start, end, WINDOW), 0.0, tl.exp(s - lse[:, None]))
            ds = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None]) * scale
            gq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
        tl.store(gq_ptr + q_at, gq.to(gq_ptr.dtype.element_ty), mask=q_ok)


@triton.jit
def _backward_rows_kernel(
    q_ptr, kc_ptr, vc_ptr, lse_ptr, grad_ptr, delta_ptr, gkc_ptr, gvc_ptr,
    start_ptr, end_ptr, order_ptr, first_ptr, last_ptr, S, scale,
    K: tl.constexpr, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    MP: tl.constexpr, EP: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    g = tl.program_id(1)
    e = tl.arange(0, EP)
    rows = tile * N + tl.arange(0, N)
    base = tile.to(tl.int64) * (N * G * E)
    at = (tl.arange(0, N) * G + g)[:, None] * E + e[None, :]
    ok = (rows[:, None] < S) & (e[None, :] < E)
    k = tl.load(kc_ptr + base + at, mask=ok, other=0.0)
    v = tl.load(vc_ptr + base + at, mask=ok, other=0.0)
    slot, flat, row_ok, q_at, q_ok = _query_rows(g, K, H, G, E, MP, EP)
    gk = tl.zeros([N, EP], tl.float32)
    gv = tl.zeros([N, EP], tl.float32)
    for n in range(tl.load(first_ptr + tile), tl.load(last_ptr + tile)):
        a = tl.load(order_ptr + n)
        start = tl.load(start_ptr + a).to(tl.int32)
        end = tl.load(end_ptr + a).to(tl.int32)
        q = tl.load(q_ptr + a * (K * H * E) + q_at, mask=q_ok, other=0.0)
        grad = tl.load(grad_ptr + a * (K * H * E) + q_at, mask=q_ok, other=0.0)
        lse = tl.load(lse_ptr + a * (K * H) + flat, mask=row_ok, other=0.0)
        delta = tl.load(delta_ptr + a * (K * H) + flat, mask=row_ok, other=0.0)
        # scores the other way round, [N, M]: both products below then take them as they are
        s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        hidden = (rows[:, None] < start) | (rows[:, None] >= end) | (row_ok == 0)[None, :]
        if WINDOW > 0:
            hidden = hidden | (end + slot[None, :] - rows[:, None] >= WINDOW)
        p = tl.where(hidden, 0.0, tl.exp(s - lse[None, :]))
        gv += tl.dot(p.to(grad.dtype), grad, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(grad), input_precision="ieee") - delta[None, :]) * scale
        gk += tl.dot(ds.to(q.dtype), q, input_precision="ieee")
    tl.store(gkc_ptr + base + at, gk.to(gkc_ptr.dtype.element_ty), mask=ok)
    tl.store(gvc_ptr + base + at, gv.to(gvc_ptr.dtype.element_ty), mask=ok)


def anchored_attention(
    q_AKHE: Tensor,
    k_ctx_SGE: Tensor,
    v_ctx_SGE: Tensor,
    k_blk_AKGE: Tensor,
    v_blk_AKGE: Tensor,
    start_A: Tensor,
    end_A: Tensor,
    valid_A: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """[A, K, H, E], differentiable in the five tensors; see `trainer.drafter.attention.anchored_attention`.

    Args:
        start_A, end_A: int64, context rows [start, end) of each block. Rows of documents must not interleave.
        valid_A: bool; invalid blocks give zeros and no gradient.
    """
    end = torch.where(valid_A, torch.maximum(end_A, start_A), -1)
    return _Attention.apply(q_AKHE, k_ctx_SGE, v_ctx_SGE, k_blk_AKGE, v_blk_AKGE, start_A, end, causal, window or 0)


def _shape(q: Tensor, k_ctx: Tensor, causal: bool, window: int) -> dict:
    _, K, H, E = q.shape
    G = k_ctx.shape[1]
    pad = lambda n: max(16, triton.next_power_of_2(n))  # noqa: E731  (tl.dot wants at least 16)
    return {
        "K": K, "H": H, "G": G, "E": E, "MP": pad(K * (H // G)), "KP": pad(K), "EP": pad(E), "CAUSAL": causal,
        "WINDOW": window,
    }  # fmt: skip


# Context rows per tile and warps, for 64 query rows and head dim 128: the largest that compile without register spills
# on sm_80, sm_90 and sm_100 (tests/kernels/test_triton_compiled.py; 64 backward rows spill 100-460 bytes everywhere).
FORWARD = {"N": 64, "num_warps": 4, "num_stages": 2}
BACKWARD_BLOCK = {"N": 32, "num_warps": 4, "num_stages": 2}
BACKWARD_ROWS = {"N": 32, "num_warps": 4, "num_stages": 2}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k_ctx, v_ctx, k_blk, v_blk, start, end, causal, window):
        q, k_ctx, v_ctx, k_blk, v_blk = (t.contiguous() for t in (q, k_ctx, v_ctx, k_blk, v_blk))
        A, K, H, E = q.shape
        G = k_ctx.shape[1]
        out = torch.empty_like(q)
        lse = torch.empty(A, K, H, device=q.device, dtype=torch.float32)
        shape = _shape(q, k_ctx, causal, window)
        _forward_kernel[(A, G)](q, k_ctx, v_ctx, k_blk, v_blk, out, lse, start, end, E**-0.5, **shape, **FORWARD)
        ctx.save_for_backward(q, k_ctx, v_ctx, k_blk, v_blk, out, lse, start, end)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k_ctx, v_ctx, k_blk, v_blk, out, lse, start, end = ctx.saved_tensors
        shape = dict(ctx.shape)
        S, G, E = k_ctx.shape
        scale = E**-0.5
        grad = grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1)
        gq, gkc, gvc, gkb, gvb = (torch.empty_like(t) for t in (q, k_ctx, v_ctx, k_blk, v_blk))
        _backward_block_kernel[(q.shape[0], G)](
            q, k_ctx, v_ctx, k_blk, v_blk, lse, grad, delta, gq, gkb, gvb, start, end, scale, **shape, **BACKWARD_BLOCK
        )
        N = BACKWARD_ROWS["N"]
        order, first, last = tile_ranges(start, end, S, N)
        del shape["KP"], shape["CAUSAL"]
        _backward_rows_kernel[(triton.cdiv(S, N), G)](
            q, k_ctx, v_ctx, lse, grad, delta, gkc, gvc, start, end, order, first, last, S, scale,
            **shape, **BACKWARD_ROWS,
        )  # fmt: skip
        return gq, gkc, gvc, gkb, gvb, None, None, None, None


def tile_ranges(start_A: Tensor, end_A: Tensor, S: int, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks by their last row, and which of them may see each tile of N rows: order[first[t]:last[t]].

    Blocks without context have end <= start and sort wherever; their masks are empty. No synchronisation with the host.
    """
    sorted_end, order = torch.sort(end_A, stable=True)
    edge = torch.arange(0, S, N, device=end_A.device)
    first = torch.searchsorted(sorted_end, edge, right=True)  # end > n0
    # starts never fall along the order of a packed row; the running maximum makes that true for contextless blocks too
    highest = torch.cummax(torch.where(sorted_end > 0, start_A[order], 0), 0).values
    last = torch.searchsorted(highest, edge + N, right=False)  # start < n1
    return order, first, torch.maximum(first, last)
