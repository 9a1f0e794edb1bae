"""The drafter as a proposer of blocks: one context cache per sequence, one head matmul for all.

Legend: B sequences, S context tokens, L taps, D hidden size, K block size, N = K - 1 drafts, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from features.target import FrozenHead
from trainer.drafter.model import Drafter


class DrafterProposer:
    """Drafts with `drafter` and the target's embedding and head (`eval.decode.Proposer`).

    Sequences of a batch stand at different positions, so each has its own cache and the drafter's few layers run per
    sequence; embedding and head, the larger part for small targets (SmolLM2: 28 M of 40 M weights), run once per batch.
    """

    def __init__(self, drafter: Drafter, head: FrozenHead):
        self.drafter, self.head = drafter.eval(), head
        self.block_size = drafter.config.block_size
        self.open(0, 0)

    def open(self, slots: int, capacity: int) -> None:
        self.caches = [self.drafter.new_cache() for _ in range(slots)]
        self.pending: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(slots)]

    def extend(self, slot: int, start: int, hidden_SLD: Tensor, token_ids_S: Tensor) -> None:
        if start == 0:
            self.caches[slot], self.pending[slot] = self.drafter.new_cache(), []
        self.pending[slot].append((hidden_SLD, token_ids_S))

    @torch.no_grad()
    def propose(self, slots: list[int], anchors_B: Tensor, starts: list[int]) -> Tensor:
        if self.drafter.config.drafting == "autoregressive":
            return self._autoregressive(slots, anchors_B, starts)
        embeds_BKD = self.drafter.block_inputs(anchors_B, self.head.embedding_VD)
        return self._logits(self._hidden(slots, embeds_BKD, starts)[:, 1:])

    def _autoregressive(self, slots: list[int], anchors_B: Tensor, starts: list[int]) -> Tensor:
        """K - 1 passes; the state that predicts the next draft comes out at a spare last slot (`Drafter._outputs`)."""
        tokens_Bn, logits = anchors_B[:, None], []
        for _ in range(self.block_size - 1):
            embeds = F.embedding(tokens_Bn, self.head.embedding_VD)
            embeds = torch.cat([embeds, torch.zeros_like(embeds[:, :1])], dim=1)
            logits.append(self._logits(self._hidden(slots, embeds, starts)[:, -1:]))
            tokens_Bn = torch.cat([tokens_Bn, logits[-1].argmax(-1)], dim=1)
        return torch.cat(logits, dim=1)

    def _hidden(self, slots: list[int], embeds_BnD: Tensor, starts: list[int]) -> Tensor:
        """One pass over each sequence's block; features that came since the last pass enter its cache."""
        rows = []
        for i, slot in enumerate(slots):
            cache, pending = self.caches[slot], self.pending[slot]
            if pending:
                hidden = torch.cat([h for h, _ in pending]) if len(pending) > 1 else pending[0][0]
                ids = torch.cat([t for _, t in pending])
                self.pending[slot] = []
                self.shape_tail = hidden.shape[1:]
            else:  # the same block again
                hidden = embeds_BnD.new_zeros(0, *self.shape_tail)
                ids = torch.zeros(0, dtype=torch.long, device=embeds_BnD.device)
            context_embeds = (
                F.embedding(ids, self.head.embedding_VD) if self.drafter.config.needs_context_embeds else None
            )
            rows.append(
                self.drafter.decode(embeds_BnD[i : i + 1], hidden, cache, starts[i], new_embeds_SD=context_embeds)
            )
        return torch.cat(rows)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(self.head.head_VD.dtype), self.head.head_VD)
