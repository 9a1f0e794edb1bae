"""The drafter's cache while decoding: keys and values of the context, one row per sequence.

Sequences of a batch stand at different positions. Each owns a row of every layer's buffers and a length; what a pass
accepts is appended at the row's length, and cropping or reusing a row is an integer.

Legend: B rows in a pass, N new context positions of all rows together, C capacity of a row, K block slots, L taps,
D hidden size, G key/value heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DrafterCache:
    """Grows by itself, in rows and in capacity (by doubling).

    A block's keys are written behind its row's context, where the next append overwrites them: `lengths` alone says
    what is context.
    """

    def __init__(self, num_layers: int, rows: int = 1, capacity: int = 0):
        self.lengths = [0] * rows
        """context positions held, by row"""
        self.capacity = capacity
        self.buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self.last_feature: dict[int, Tensor] = {}
        """by row, the target's feature [L, D] right before the anchor (conditioning = input_fusion)"""

    @property
    def length(self) -> int:
        """Positions held, where all rows stand at the same one."""
        assert len(set(self.lengths)) == 1, f"rows of lengths {self.lengths} have no common one"
        return self.lengths[0]

    def crop(self, length: int) -> None:
        """Forget positions >= length, in every row."""
        self.lengths = [min(n, length) for n in self.lengths]

    def reserve(self, row: int, count: int) -> int:
        """Room for `count` positions behind the context of `row`, whose length it returns; the buffers grow at the
        next write."""
        self.lengths += [0] * (row + 1 - len(self.lengths))
        end = self.lengths[row] + count
        if end > self.capacity:
            self.capacity = max(256, 2 * end)
        return self.lengths[row]

    def write(self, layer: int, rows: Tensor, at: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values [..., G, E] at (rows, at), int64 [...]; returns the layer's buffers [rows, C, G, E]."""
        held = self.buffers[layer]
        if held is None or held[0].shape[:2] != (len(self.lengths), self.capacity):
            self.buffers[layer] = held = self._grown(held, keys)
        held[0][rows, at], held[1][rows, at] = keys, values
        return held

    def _grown(self, held: tuple[Tensor, Tensor] | None, like: Tensor) -> tuple[Tensor, Tensor]:
        shape = (len(self.lengths), self.capacity, *like.shape[-2:])
        # zeros, not empty: hidden positions are multiplied by probability 0, and 0 * NaN would be NaN
        new = (like.new_zeros(shape), like.new_zeros(shape))
        if held is not None:
            for old, grown in zip(held, new, strict=True):
                grown[: old.shape[0], : old.shape[1]] = old
        return new


class BlockView:
    """One block per row behind its context: where its keys go and which it sees; the same for every layer."""

    def __init__(self, cache: DrafterCache, rows: Sequence[int], K: int, device: torch.device):
        starts = [cache.reserve(row, K) for row in rows]
        self.end = max(starts) + K
        self.even = len(set(starts)) == 1
        self.rows_B1 = torch.tensor(rows, device=device)[:, None]
        self.positions_BK = torch.tensor(starts, device=device)[:, None] + torch.arange(K, device=device)
        first, count = rows[0], len(rows)
        # rows that follow each other are a view of the buffer, others a copy
        self.pick = (
            slice(first, first + count) if list(rows) == list(range(first, first + count)) else self.rows_B1[:, 0]
        )
        self._masks: dict[tuple[bool, int | None], Tensor | None] = {}

    def keys_values(self, held: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, end, G, E] each."""
        return held[0][self.pick, : self.end], held[1][self.pick, : self.end]

    def mask(self, causal: bool, window: int | None) -> Tensor | None:
        """bool [B, 1, K, end], True = visible; None where every query sees every key."""
        key = (causal, window)
        if key not in self._masks:
            self._masks[key] = None if self.even and not causal and window is None else self._mask(causal, window)
        return self._masks[key]

    def _mask(self, causal: bool, window: int | None) -> Tensor:
        key = torch.arange(self.end, device=self.positions_BK.device)
        query_BK1 = self.positions_BK[:, :, None]
        mask_BKS = key <= (query_BK1 if causal else self.positions_BK[:, -1:, None])
        if window is not None:
            mask_BKS = mask_BKS & (query_BK1 - key < window)
        return mask_BKS.expand(-1, self.positions_BK.shape[1], -1)[:, None]
