"""Replay: the exact acceptance length of a drafter on a known text, from stored features, without the target.

At temperature 0 (and with exact verification at any temperature) the emitted text does not depend on the drafter: the
target decides every token, the drafter only how many come per pass. So on a text that the target wrote,

    N(p) = number of leading drafts of the block anchored at p that equal the text

is all there is to know; one pass over all anchors p gives it, and walking p <- p + min(N(p), b - 1) + 1 gives the
cycles that live decoding with verify length b would have made, for every b at once. No block depends on another, so
those of a document, and of several short ones, run side by side.

Two things make it cheap. Slots are looked at in order and only while all earlier drafts stood, so the head (most of the
work for a large vocabulary) runs on Σ (N(p) + 1) rows instead of A·(K - 1). And the target never runs.

Legend: S tokens of a text, L taps, D hidden size, A anchors of one pass, K block size, V vocabulary.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eval.metrics import Cycles
from features.target import FrozenHead
from infra.errors import DataError
from trainer.drafter.model import Drafter

CHUNK = 256
"""anchors per pass: more bring nothing on a CPU"""


@dataclasses.dataclass(frozen=True)
class Text:
    """A text with its features.

    Attributes:
        token_ids_S: int64 or int32.
        hidden_SLD: features of positions 0 .. S-1 or 0 .. S-2 (the last token's is never needed).
        answers: spans [first, end) of tokens that the target wrote. The first token of a span comes from prefill.
        name: for error messages.
    """

    token_ids_S: Tensor
    hidden_SLD: Tensor
    answers: tuple[tuple[int, int], ...]
    name: str = "text"


def answer_spans(loss_mask_S: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Maximal runs of ones: [0,0,1,1,1,0,1] -> ((2, 5), (6, 7))."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(loss_mask_S) != 0, [0]]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def matches(drafter: Drafter, head: FrozenHead, text: Text, *, chunk: int = CHUNK) -> np.ndarray:
    """N(p) for every anchor of the text's answers: int64 [S], -1 where p is no anchor; see `matches_of`."""
    return next(matches_of(drafter, head, [text], chunk=chunk))[1]


@torch.no_grad()
def matches_of(
    drafter: Drafter, head: FrozenHead, texts: Iterable[Text], *, chunk: int = CHUNK
) -> Iterator[tuple[Text, np.ndarray]]:
    """Each text with its `matches`, in order.

    Short texts share passes: each of them alone would leave the matrix products small and read the whole head (113 MB
    for SmolLM2) for a few rows.

    Drafts past the end of an answer do not count: N(p) <= end - 1 - p, as in `Cycles`.

    Args:
        chunk: anchors per pass; memory is chunk·K rows of the drafter's widest layer.
    Raises:
        DataError: features are missing, or an answer does not lie in its text.
    """
    device = head.head_VD.device
    waiting: deque[_Found] = deque()
    together: list[_Anchors] = []
    count = 0
    for text in texts:
        S = len(text.token_ids_S)
        if text.hidden_SLD.shape[0] < S - 1:
            raise DataError(
                f"{text.name} has {S} tokens but {text.hidden_SLD.shape[0]} rows of features; extract them again"
            )
        ids_S = text.token_ids_S.to(device=device, dtype=torch.long)
        new = _Found(text, ids_S, text.hidden_SLD.to(device), np.full(S, -1, np.int64))
        waiting.append(new)
        for first, end in text.answers:
            if not 0 < first < end <= S:
                raise DataError(
                    f"{text.name}: an answer at {first}..{end} does not lie inside {S} tokens behind a prompt"
                )
            p = first
            while p < end - 1:
                taken = min(chunk - count, end - 1 - p)
                together.append(_Anchors(new, p, p + taken, end))
                new.left += 1
                p, count = p + taken, count + taken
                if count == chunk:
                    _match(drafter, head, together)
                    together, count = [], 0
        while waiting and (waiting[0] is not new) and not waiting[0].left:
            done = waiting.popleft()
            yield done.text, done.found_S
    if together:
        _match(drafter, head, together)
    for done in waiting:
        yield done.text, done.found_S


@dataclasses.dataclass(eq=False)
class _Found:
    """What is known of one text, and in how many passes still to come it takes part."""

    text: Text
    ids_S: Tensor
    hidden_SLD: Tensor
    found_S: np.ndarray
    left: int = 0


class _Anchors(NamedTuple):
    """Anchors [first, last) of an answer that ends at `end`."""

    text: _Found
    first: int
    last: int
    end: int


def _match(drafter: Drafter, head: FrozenHead, parts: Sequence[_Anchors]) -> None:
    """N(p) of these anchors into their texts' `found_S`."""
    K, device = drafter.config.block_size, head.head_VD.device
    rows_of: dict[_Found, int] = {}  # rows before a text's last anchor are context
    for part in parts:
        rows_of[part.text] = max(rows_of.get(part.text, 0), part.last - 1)
    starts = dict(zip(rows_of, itertools.accumulate(rows_of.values(), initial=0), strict=False))
    whole = [(t.ids_S[:n], t.hidden_SLD[:n], torch.arange(n, device=device)) for t, n in rows_of.items()]
    ids_S, hidden_SLD, positions_S = (torch.cat(x) for x in zip(*whole, strict=True))
    anchors, labels, ends, begins = [], [], [], []
    slots_K = torch.arange(K, device=device)
    for text, first, last, end in parts:
        at_A = torch.arange(first, last, device=device)
        anchors.append(at_A)
        labels.append(text.ids_S[(at_A[:, None] + slots_K).clamp_max(len(text.ids_S) - 1)])
        ends.append(torch.full_like(at_A, end))
        begins.append(torch.full_like(at_A, starts[text]))
    anchors_A, labels_AK, ends_A, begins_A = (torch.cat(x) for x in (anchors, labels, ends, begins))
    embeds = F.embedding(ids_S, head.embedding_VD) if drafter.config.needs_context_embeds else None
    hidden_AKD = drafter(
        hidden_SLD, positions_S, drafter.block_inputs(labels_AK, head.embedding_VD),
        begins_A, begins_A + anchors_A, anchors_A, context_embeds_SD=embeds,
    )  # fmt: skip
    found_A = torch.zeros_like(anchors_A)
    alive_a = torch.arange(len(anchors_A), device=device)
    for k in range(1, K):
        alive_a = alive_a[anchors_A[alive_a] + k < ends_A[alive_a]]
        if not len(alive_a):
            break
        drafts_a = F.linear(hidden_AKD[alive_a, k].to(head.head_VD.dtype), head.head_VD).argmax(-1)
        alive_a = alive_a[drafts_a == labels_AK[alive_a, k]]
        found_A[alive_a] = k
    lengths = [part.last - part.first for part in parts]
    for part, found_a in zip(parts, found_A.cpu().split(lengths), strict=True):
        part.text.found_S[part.first : part.last] = found_a.numpy()
        part.text.left -= 1


def walk(found_S: np.ndarray, answers: Iterable[tuple[int, int]], b: int) -> Cycles:
    """The cycles of live decoding with verify length b: from the first token of each answer to its end.

    Example: answer 3..9 (six tokens; the first from prefill), N(3) = 2, N(6) = 1, b = 4:
    cycle at 3 emits 2 + 1, cycle at 6 emits 1 + 1, and 8 is the last token.
    """
    parts = []
    for first, end in answers:
        starts, p = [], first
        while p < end - 1:
            starts.append(p)
            p += min(int(found_S[p]), b - 1) + 1
        parts.append(Cycles.build(starts, b, found_S[starts] if starts else [], end))
    return Cycles.concat(parts)


def replay(
    drafter: Drafter, head: FrozenHead, texts: Iterable[Text], *, verify_lengths: Sequence[int] = (), chunk: int = CHUNK
) -> dict[int, list[Cycles]]:
    """Cycles of every text for each verify length (default: K alone): `{b: [Cycles of text 0, ...]}`."""
    lengths = tuple(verify_lengths) or (drafter.config.block_size,)
    out: dict[int, list[Cycles]] = {b: [] for b in lengths}
    was_training = drafter.training
    drafter.eval()
    for text, found_S in matches_of(drafter, head, texts, chunk=chunk):
        for b in lengths:
            out[b].append(walk(found_S, text.answers, b))
    drafter.train(was_training)
    return out
