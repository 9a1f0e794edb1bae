"""Answers written by the target through transformers, many at once.

Legend: B places for answers, V vocabulary, S cached columns, G key/value heads, E head dim.

Each row's text lies at the right end of the columns, so that all rows write the same column next:

    column    0 1 2 3 4 5 6 | 7
    row 0     p p p p t t t | t      p prompt, t written, . padding (masked)
    row 1     . . p p t t t | t
    row 2     . . . . p p t | t      joined two tokens ago in a place that was free
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from features.target import Target
from infra.provenance import sha256_hex
from pipeline.config import RegenerateConfig

REFILL = 6  # free places before waiting prompts join: their prefill costs about two steps


@dataclass(frozen=True)
class Request:
    """A prompt to be answered: `key` is the digest of its turns, `max_new_tokens` what the length limits leave."""

    key: str
    prompt_ids: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Response:
    """An answer.

    Attributes:
        text: decoded without special tokens.
        token_ids: as emitted, stop token included; None from a server that returns only text.
        finish_reason: "stop", "length", or what a server said.
    """

    key: str
    text: str
    token_ids: list[int] | None
    finish_reason: str


class SlabLayer(DynamicLayer):
    """Keys and values [B, G, S, E] as views of larger buffers.

    transformers' own layer concatenates at every token: for SmolLM2 at batch 48 and 300 tokens that copies 0.7 GB per
    token, more than the pass itself reads.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [t.new_empty(*t.shape[:2], 0, t.shape[3]) for t in (key_states, value_states)]
        for n, new in enumerate((key_states, value_states)):
            if self.buffers[n].shape[2] < end:
                grown = new.new_empty(*new.shape[:2], end + end // 2 + 32, new.shape[3])
                grown[:, :, :begin] = self.buffers[n][:, :, :begin]
                self.buffers[n] = grown
            self.buffers[n][:, :, begin:end] = new
        self._show(end)
        return self.keys, self.values

    def place(self, other: "SlabLayer", rows: Tensor) -> None:
        """Put the rows of `other` into places `rows`, at the right end of the columns."""
        end, width = self.get_seq_length(), other.get_seq_length()
        for mine, theirs in zip(self.buffers, (other.keys, other.values), strict=True):
            mine[rows, :, end - width : end] = theirs

    def cut(self, rows: Tensor | None, first: int) -> None:
        """Keep these rows (None: all) and forget the columns before `first`."""
        end = self.get_seq_length()
        for n, buffer in enumerate(self.buffers):
            kept = buffer[:, :, first:end] if rows is None else buffer[rows, :, first:end]
            grown = buffer.new_empty(*kept.shape[:2], end - first + 64, kept.shape[3])
            grown[:, :, : end - first] = kept
            self.buffers[n] = grown
        self._show(end - first)

    def _show(self, end: int) -> None:
        self.keys, self.values = (b[:, :, :end] for b in self.buffers)


class Generator:
    """Writes answers greedily or by sampling; a finished answer makes room for a waiting prompt.

    A row's tokens do not depend on the other rows: padding is masked, positions count real tokens, and draws come from
    a generator seeded by (seed, key, step). What remains is the rounding of matrix products (about 1e-6 in fp32), which
    can only turn a choice between two tokens that close; the same requests in the same call give the same bits.
    """

    def __init__(self, target: Target, cfg: RegenerateConfig):
        self.target, self.cfg = target, cfg
        # sliding or recurrent layers keep transformers' own cache, whose rows can only be cut, not refilled
        self.slabs = all(type(layer) is DynamicLayer for layer in target.new_cache().layers)

    @torch.inference_mode()
    def generate(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Responses in the order in which they finish. Long prompts go first: they fit, and all later ones do."""
        waiting = sorted(requests, key=lambda r: (-len(r.prompt_ids), r.key))
        self.places: list[Request | None] = []
        self.tokens: list[list[int]] = []
        while waiting or any(self.places):
            free = [n for n, r in enumerate(self.places) if r is None]
            if waiting and not any(self.places):
                self._begin(waiting[: self.cfg.batch_size])
                del waiting[: self.cfg.batch_size]
            elif waiting and self.slabs and len(free) >= min(REFILL, len(self.places)):
                new = waiting[: len(free)]
                del waiting[: len(free)]
                self._join(new, free[: len(new)])
            else:
                self._step()
            yield from self._finished()
            if any(self.places):
                self._compact(waiting=bool(waiting))

    def _prefill(self, new: list[Request]) -> tuple[Any, Tensor, Tensor]:
        """(cache, mask_BS, next_B) of prompts, padded on the left."""
        width = max(len(r.prompt_ids) for r in new)
        ids_BS = torch.zeros(len(new), width, dtype=torch.long)
        mask_BS = torch.zeros(len(new), width, dtype=torch.long)
        for row, r in enumerate(new):
            ids_BS[row, width - len(r.prompt_ids) :] = torch.tensor(r.prompt_ids)
            mask_BS[row, width - len(r.prompt_ids) :] = 1
        ids_BS, mask_BS = ids_BS.to(self.target.device), mask_BS.to(self.target.device)
        position_BS = (mask_BS.cumsum(1) - 1).clamp_min(0)
        cache = self.target.new_cache()
        if self.slabs:
            cache.layers = [SlabLayer() for _ in cache.layers]
        out = self.target.forward(
            ids_BS, attention_mask=mask_BS, position_ids=position_BS, cache=cache, logits="last", taps=False
        )
        return cache, mask_BS, self._choose(out.logits_BSV[:, -1], list(new), [[] for _ in new])

    def _begin(self, new: list[Request]) -> None:
        self.cache, self.mask_BS, self.next_B = self._prefill(new)
        self.places, self.tokens = list(new), [[t] for t in self.next_B.tolist()]

    def _join(self, new: list[Request], free: list[int]) -> None:
        cache, mask_BS, next_B = self._prefill(new)
        rows, width = torch.tensor(free), mask_BS.shape[1]  # on the CPU, which indexes every GPU's cache
        assert width <= self.mask_BS.shape[1], "prompts are sorted, so a later one is never longer than the columns"
        for mine, theirs in zip(self.cache.layers, cache.layers, strict=True):
            mine.place(theirs, rows)
        self.mask_BS[rows] = 0
        self.mask_BS[rows, self.mask_BS.shape[1] - width :] = mask_BS
        self.next_B[rows] = next_B
        for row, request, token in zip(free, new, next_B.tolist(), strict=True):
            self.places[row], self.tokens[row] = request, [token]

    def _step(self) -> None:
        position_B1 = self.mask_BS.sum(1, keepdim=True)
        self.mask_BS = torch.cat([self.mask_BS, torch.ones_like(self.mask_BS[:, :1])], dim=1)
        out = self.target.forward(
            self.next_B[:, None],
            attention_mask=self.mask_BS,
            position_ids=position_B1,
            cache=self.cache,
            logits="last",
            taps=False,
        )
        self.next_B = self._choose(out.logits_BSV[:, -1], self.places, self.tokens)
        for tokens, token in zip(self.tokens, self.next_B.tolist(), strict=True):
            tokens.append(token)

    def _choose(self, logits_BV: Tensor, places: list[Request | None], tokens: list[list[int]]) -> Tensor:
        chosen_B = logits_BV.argmax(dim=-1)
        if self.cfg.temperature > 0:
            probs_BV = sampling_probs(logits_BV.float(), self.cfg.temperature, self.cfg.top_k, self.cfg.top_p)
            for row, request in enumerate(places):
                if request is not None:
                    seed = int(sha256_hex(f"{self.cfg.seed}/{request.key}/{len(tokens[row])}")[:15], 16)
                    generator = torch.Generator().manual_seed(seed)
                    chosen_B[row] = torch.multinomial(probs_BV[row].cpu(), 1, generator=generator)
        return chosen_B

    def _finished(self) -> Iterator[Response]:
        stop = self.target.stop_ids
        for row, request in enumerate(self.places):
            tokens = self.tokens[row]
            if request is not None and (tokens[-1] in stop or len(tokens) >= request.max_new_tokens):
                self.places[row], self.tokens[row] = (
                    None,
                    [],
                )  # the place goes on being computed until it is taken or cut
                text = self.target.tokenizer.decode(tokens, skip_special_tokens=True)
                yield Response(request.key, text, tokens, "stop" if tokens[-1] in stop else "length")

    def _compact(self, waiting: bool) -> None:
        """Drop columns that are padding in all live rows, and free places that nobody will take, when it pays: a cut
        copies the cache, which costs about as much as one step."""
        live = [n for n, r in enumerate(self.places) if r is not None]
        columns = self.mask_BS.shape[1]
        first = columns - int(self.mask_BS[live].sum(1).max())
        cut_rows = len(live) <= 0.8 * len(self.places) and not (waiting and self.slabs)
        if not cut_rows and not (self.slabs and first >= max(64, columns // 3)):
            return
        rows = torch.tensor(live) if cut_rows else None
        for layer in self.cache.layers:
            if self.slabs:
                layer.cut(rows, first)
            else:
                layer.batch_select_indices(rows)
        if cut_rows:
            self.mask_BS, self.next_B = self.mask_BS[rows], self.next_B[rows]
            self.places, self.tokens = [self.places[n] for n in live], [self.tokens[n] for n in live]
        if self.slabs:
            self.mask_BS = self.mask_BS[:, first:].contiguous()


def sampling_probs(logits_BV: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities after temperature, then top-k, then top-p (the smallest set of tokens that reaches p), fp32."""
    logits_BV = logits_BV / temperature
    if 0 < top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    probs_BV = logits_BV.softmax(-1)
    if top_p < 1:
        sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV  # probability of all tokens that are likelier
        sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, 0.0)
        probs_BV = torch.zeros_like(probs_BV).scatter(-1, order_BV, sorted_BV)
        probs_BV = probs_BV / probs_BV.sum(-1, keepdim=True)
    return probs_BV
