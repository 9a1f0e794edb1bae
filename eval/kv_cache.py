"""A KV cache of the target whose rows have lengths of their own.

Speculative decoding accepts another number of tokens in each row of a batch, so rows drift apart and "crop" differs
per row. Here every row has a fixed buffer and a length: new keys are written at the row's length, the mask hides what
lies beyond it, and cropping or dropping a row is an integer. transformers' `DynamicCache` would copy the whole cache
once per pass (SmolLM2: 46 kB per token and row); this one copies nothing.

Legend: B active rows, n new tokens, S capacity of a row, G key/value heads, E head dim.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from infra.errors import TargetError


class _Layer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, owner: "RowCache"):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, capacity = self.owner.rows, self.owner.capacity
        self.device = key_states.device
        # zeros, not empty: masked positions are multiplied by probability 0, and 0 * NaN would be NaN
        self.keys = key_states.new_zeros(rows, key_states.shape[1], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, count, end = self.owner.window
        if count == 1:
            at = slice(end - key_states.shape[2], end)
            self.keys[first, :, at] = key_states[0]
            self.values[first, :, at] = value_states[0]
        else:
            rows_B1, at_Bn = self.owner.write_at
            self.keys[rows_B1, :, at_Bn] = key_states.transpose(1, 2)
            self.values[rows_B1, :, at_Bn] = value_states.transpose(1, 2)
        rows = slice(first, first + count)
        return self.keys[rows, :, :end], self.values[rows, :, :end]

    def get_seq_length(self) -> int:
        return self.owner.window[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.window[2], 0

    def get_max_length(self) -> int:
        return self.owner.capacity


class RowCache(Cache):
    """Rows 0 .. `active - 1` are in use.

    A pass over rows [first, first + count) is: `prepare(first, count, n)` (gives positions and mask), the forward with
    this cache, then `lengths[row] += accepted` by the caller: nothing becomes visible before that.
    """

    def __init__(self, text_config: Any, rows: int, capacity: int):
        """
        Args:
            text_config: the target's transformers configuration (of its text model).

        Raises:
            TargetError: layers without keys and values per position (linear attention): they cannot be cropped.
        """
        num_layers = text_config.num_hidden_layers
        self.kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"])
        if self.kinds - {"full_attention", "sliding_attention"}:
            raise TargetError(
                f"a target with layers of {', '.join(sorted(self.kinds))} cannot forget rejected tokens here; evaluate "
                "it in a serving engine"
            )
        self.sliding_window = getattr(text_config, "sliding_window", None)
        self.rows, self.capacity = rows, capacity
        self.lengths = [0] * rows
        self.active = 0
        self.window = (0, 0, 0)  # first row, rows, end of the longest of them
        self.write_at: tuple[Tensor, Tensor] | None = None
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])

    def prepare(
        self, first: int, count: int, n: int, device: torch.device
    ) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """Announce a pass of `n` tokens over `count` rows.

        Returns:
            (position_ids_Bn int64, mask_B1nS bool, True = visible: query i of row b sees keys 0 .. lengths[b] + i;
            a dictionary by kind of layer where some slide)
        """
        lengths_B = torch.tensor(self.lengths[first : first + count], device=device)
        at_Bn = lengths_B[:, None] + torch.arange(n, device=device)
        end = max(self.lengths[first : first + count]) + n
        assert end <= self.capacity, f"{end} tokens in a row of {self.capacity}"
        self.window = (first, count, end)
        self.write_at = (torch.arange(first, first + count, device=device)[:, None], at_Bn)
        keys_S = torch.arange(end, device=device)
        mask_B1nS = (keys_S <= at_Bn[:, :, None])[:, None]
        if self.kinds == {"full_attention"}:
            return at_Bn, mask_B1nS
        near_B1nS = (keys_S > at_Bn[:, :, None] - self.sliding_window)[:, None]
        return at_Bn, {"full_attention": mask_B1nS, "sliding_attention": mask_B1nS & near_B1nS}

    def open_row(self) -> int:
        """The index of a new empty row at the end of the active ones."""
        assert self.active < self.rows
        self.lengths[self.active] = 0
        self.active += 1
        return self.active - 1

    def drop_row(self, row: int) -> None:
        """Forget `row`; the last active row moves into its place."""
        last = self.active - 1
        if row != last:
            length = self.lengths[row] = self.lengths[last]
            for layer in self.layers:
                layer.keys[row, :, :length] = layer.keys[last, :, :length]
                layer.values[row, :, :length] = layer.values[last, :, :length]
        self.active = last
