"""The drafter as a proposer of blocks: one row of its cache per sequence, one pass for all sequences of a batch.

Legend: B sequences, S context tokens, L taps, D hidden size, K block size, N = K - 1 drafts, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from features.target import FrozenHead
from trainer.drafter.model import Drafter


class DrafterProposer:
    """Drafts with `drafter` and the target's embedding and head (`eval.decode.Proposer`)."""

    def __init__(self, drafter: Drafter, head: FrozenHead):
        self.drafter, self.head = drafter.eval(), head
        self.block_size = drafter.config.block_size
        self.open(0, 0)

    def open(self, slots: int, capacity: int) -> None:
        self.cache = self.drafter.new_cache(slots, capacity)
        self.pending: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """by slot, features and tokens that the cache does not hold yet"""

    def extend(self, slot: int, start: int, hidden_SLD: Tensor, token_ids_S: Tensor) -> None:
        if start == 0:
            self.cache.lengths[slot], self.pending[slot] = 0, []
        self.pending.setdefault(slot, []).append((hidden_SLD, token_ids_S))

    @torch.no_grad()
    def propose(self, slots: list[int], anchors_B: Tensor, starts: list[int]) -> Tensor:
        self._append([slot for slot in slots if slot in self.pending])
        held = [self.cache.lengths[slot] for slot in slots]
        assert held == starts, f"the cache's rows hold {held} positions, the blocks start at {starts}"
        return self.drafter.propose(anchors_B, self.cache, slots, self.head.embedding_VD, self.head.head_VD)

    def _append(self, slots: list[int]) -> None:
        pieces = [self.pending.pop(slot) for slot in slots]
        hidden = [torch.cat([h for h, _ in new]) for new in pieces]
        embeds = None
        if self.drafter.config.needs_context_embeds:
            embeds = [F.embedding(torch.cat([t for _, t in new]), self.head.embedding_VD) for new in pieces]
        self.drafter.append_context(self.cache, slots, hidden, embeds)
