"""Qwen3's norm and MLP with less kept for the backward pass: the same outputs bit by bit, and the same gradients.

As transformers writes them, autograd keeps every intermediate. At 8,192 rows (512 blocks of 16), D = 4096 and an MLP
of 12,288 in bf16, one layer's MLP keeps 805 MB besides its input, each of its two norms 201 MB, the whole layer 1.8 GB.
What the matrix products do not need is computed again in the backward pass instead, elementwise: the MLP keeps 403 MB,
a norm its input of 67 MB, the layer 0.9 GB.

Legend: N rows, D hidden size, I intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm


class _RMSNorm(torch.autograd.Function):
    """n = x / rms(x) in fp32, rounded, times the weight. With g = dL/dn: dL/dx = (g - n mean(n g)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight_D, inverse)
        return weight_D * (wide * inverse).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, inverse = ctx.saved_tensors
        normed = x.float() * inverse
        grad_weight = grad_x = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed.to(x.dtype)).flatten(0, -2).sum(0).to(weight_D.dtype)
        if ctx.needs_input_grad[0]:
            wide = (grad * weight_D).float()
            mean = (wide * normed).mean(-1, keepdim=True)
            grad_x = wide.sub_(normed.mul_(mean)).mul_(inverse).to(x.dtype)
        return grad_x, grad_weight, None


class RMSNorm(Qwen3RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(hidden_states)
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping the two alone."""

    @staticmethod
    def forward(ctx: Any, gate_NI: Tensor, up_NI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NI, up_NI)
        return F.silu(gate_NI) * up_NI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NI: Tensor) -> tuple[Tensor, Tensor]:
        gate_NI, up_NI = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad_NI * up_NI, gate_NI)
        return grad_gate, F.silu(gate_NI).mul_(grad_NI)


class MLP(Qwen3MLP):
    """down(silu(gate(x)) * up(x)), as in every Qwen3 and Llama layer."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        product = _SwiGLU.apply(gate, up)
        kept, where, size = (gate.detach(), up.detach()), product.data_ptr(), product.numel()

        # `down_proj` would keep its input for its weight's gradient. It stays a module of its own, called as one, so
        # that ZeRO-3 finds its weight; a hook on what autograd keeps puts the two factors in the product's place
        # (and must not hold the product itself: autograd keeps the hooks).
        def pack(t: Tensor) -> Tensor | torch.Size:
            return t.shape if t.data_ptr() == where and t.numel() == size and t.is_contiguous() else t

        def unpack(t: Tensor | torch.Size) -> Tensor:
            return t if isinstance(t, Tensor) else (F.silu(kept[0]) * kept[1]).view(t)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.down_proj(product)
