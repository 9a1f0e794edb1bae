"""Replay: the exact acceptance length of a drafter on a known text, from stored features, without the target.

At temperature 0 (and with exact verification at any temperature) the emitted text does not depend on the drafter: the
target decides every token, the drafter only how many come per pass. So on a text that the target wrote,

    N(p) = number of leading drafts of the block anchored at p that equal the text

is all there is to know; one pass over all anchors p gives it, and walking p <- p + min(N(p), b - 1) + 1 gives the
cycles that live decoding with verify length b would have made, for every b at once. No block depends on another, so
those of a document run side by side.

Two things make it cheap. Slots are looked at in order and only while all earlier drafts stood, so the head (most of the
work for a large vocabulary) runs on Σ (N(p) + 1) rows instead of A·(K - 1). And the target never runs.

Legend: S tokens of a text, L taps, D hidden size, A anchors of one pass, K block size, V vocabulary.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eval.metrics import Cycles
from features.target import FrozenHead
from infra.errors import DataError
from trainer.drafter.model import Drafter


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


@torch.no_grad()
def matches(drafter: Drafter, head: FrozenHead, text: Text, *, chunk: int = 256) -> np.ndarray:
    """N(p) for every anchor of the text's answers: int64 [S], -1 where p is no anchor.

    Drafts past the end of an answer do not count: N(p) <= end - 1 - p, as in `Cycles`.

    Args:
        chunk: anchors per pass; memory is chunk·K rows of the drafter's widest layer, and time hardly depends on it.
    """
    S = len(text.token_ids_S)
    device = head.head_VD.device
    ids_S = text.token_ids_S.to(device=device, dtype=torch.long)
    hidden_SLD = text.hidden_SLD.to(device)
    if hidden_SLD.shape[0] < S - 1:
        raise DataError(f"{text.name} has {S} tokens but {hidden_SLD.shape[0]} rows of features; extract them again")
    found_S = np.full(S, -1, np.int64)
    for first, end in text.answers:
        if not 0 < first < end <= S:
            raise DataError(f"{text.name}: an answer at {first}..{end} does not lie inside {S} tokens behind a prompt")
        for p in range(first, end - 1, chunk):
            anchors_A = torch.arange(p, min(p + chunk, end - 1), device=device)
            found_S[p : p + len(anchors_A)] = _matches(drafter, head, ids_S, hidden_SLD, anchors_A, end).cpu().numpy()
    return found_S


def _matches(
    drafter: Drafter, head: FrozenHead, ids_S: Tensor, hidden_SLD: Tensor, anchors_A: Tensor, end: int
) -> Tensor:
    K, seen = drafter.config.block_size, int(anchors_A[-1])  # rows before the last anchor are context
    slots_K = torch.arange(K, device=ids_S.device)
    places_AK = anchors_A[:, None] + slots_K
    labels_AK = ids_S[places_AK.clamp_max(len(ids_S) - 1)]
    embeds = F.embedding(ids_S[:seen], head.embedding_VD) if drafter.config.needs_context_embeds else None
    hidden_AKD = drafter(
        hidden_SLD[:seen], torch.arange(seen, device=ids_S.device), drafter.block_inputs(labels_AK, head.embedding_VD),
        torch.zeros_like(anchors_A), anchors_A, anchors_A, context_embeds_SD=embeds,
    )  # fmt: skip
    found_A = torch.zeros_like(anchors_A)
    alive_a = torch.arange(len(anchors_A), device=ids_S.device)
    for k in range(1, K):
        alive_a = alive_a[places_AK[alive_a, k] < end]
        if not len(alive_a):
            break
        drafts_a = F.linear(hidden_AKD[alive_a, k].to(head.head_VD.dtype), head.head_VD).argmax(-1)
        alive_a = alive_a[drafts_a == labels_AK[alive_a, k]]
        found_A[alive_a] = k
    return found_A


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
    drafter: Drafter, head: FrozenHead, texts: Iterable[Text], *, verify_lengths: Sequence[int] = (), chunk: int = 256
) -> dict[int, list[Cycles]]:
    """Cycles of every text for each verify length (default: K alone): `{b: [Cycles of text 0, ...]}`."""
    lengths = tuple(verify_lengths) or (drafter.config.block_size,)
    out: dict[int, list[Cycles]] = {b: [] for b in lengths}
    was_training = drafter.training
    drafter.eval()
    for text in texts:
        found_S = matches(drafter, head, text, chunk=chunk)
        for b in lengths:
            out[b].append(walk(found_S, text.answers, b))
    drafter.train(was_training)
    return out
