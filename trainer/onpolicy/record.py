"""What one decoding run shows beyond its text: features, drafts, and what the target said of them. No Ray here.

`Recorder` stands between `eval.decode` and the drafter, `Watched` between it and the target. The features of the text
come out of the verification passes themselves, so a rollout costs no further pass of the target.

Legend: B sequences, S tokens, L taps, D hidden size, b verified positions, V vocabulary, T kept tokens of the target.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.decode import DecodeSettings, Proposer, Trace, decode
from features.document import DocumentFeatures
from features.target import Target


@dataclasses.dataclass
class Verified:
    """One verification pass seen from one sequence: drafts at start+1 .. start+b-1."""

    start: int
    drafts: list[int]
    topk_ids: np.ndarray
    """int32 [b-1, T]: the target's likeliest tokens at each drafted position, given the drafts before it"""
    topk_logprobs: np.ndarray
    """float16 [b-1, T]"""


@dataclasses.dataclass
class Episode:
    prompt: list[int]
    hidden: list[Tensor]
    cycles: list[Verified]
    logprob: dict[int, float]
    """log p of the text's token, by position"""
    last: tuple[Tensor, Tensor] | None = None
    """[b, V] log-probabilities and [b, L, D] features of the latest pass, until it is known what stood"""


class Recorder:
    """A proposer that hands on to another and keeps episodes."""

    def __init__(self, proposer: Proposer, top_k: int):
        self.proposer, self.top_k, self.block_size = proposer, top_k, proposer.block_size
        self.by_slot: dict[int, Episode] = {}
        self.finished: list[Episode] = []
        self.waiting: list[tuple[int, int]] = []  # slot and start of each row of the pass that comes next

    def open(self, slots: int, capacity: int) -> None:
        self.proposer.open(slots, capacity)

    def extend(self, slot: int, start: int, hidden_SLD: Tensor, token_ids_S: Tensor) -> None:
        if start == 0:
            self._finish(slot)
            self.by_slot[slot] = Episode(token_ids_S.tolist(), [], [], {})
        self.by_slot[slot].hidden.append(hidden_SLD.cpu())
        self.proposer.extend(slot, start, hidden_SLD, token_ids_S)

    def propose(self, slots: list[int], anchors_B: Tensor, starts: list[int]) -> Tensor:
        for slot, anchor, start in zip(slots, anchors_B.tolist(), starts, strict=True):
            self._resolve(self.by_slot[slot], anchor, start)
        self.waiting = list(zip(slots, starts, strict=True))
        return self.proposer.propose(slots, anchors_B, starts)

    def verified(self, block_Bb: Tensor, out: Any) -> None:
        """The pass that `propose` announced."""
        logprob_BbV = torch.log_softmax(out.logits_BSV.float(), -1)
        top = logprob_BbV[:, :-1].topk(min(self.top_k, logprob_BbV.shape[-1]), -1)
        ids, logprobs = top.indices.int().cpu().numpy(), top.values.half().cpu().numpy()
        for row, (slot, start) in enumerate(self.waiting):
            episode = self.by_slot[slot]
            episode.cycles.append(Verified(start, block_Bb[row, 1:].tolist(), ids[row], logprobs[row]))
            episode.last = (logprob_BbV[row], out.hidden_BSLD[row])
        self.waiting = []

    def close(self) -> list[Episode]:
        """All episodes; the recorder is empty again."""
        for slot in list(self.by_slot):
            self._finish(slot)
        done, self.finished = self.finished, []
        return done

    def _resolve(self, episode: Episode, next_token: int, next_start: int) -> None:
        """Log-probabilities of the tokens that the latest pass put into the text: its drafts that stood, and one."""
        if episode.last is None:
            return
        cycle, (logprob_bV, _) = episode.cycles[-1], episode.last
        stood = next_start - cycle.start - 1
        for i, token in enumerate([*cycle.drafts[:stood], next_token]):
            episode.logprob[cycle.start + 1 + i] = float(logprob_bV[i, token])
        episode.last = None

    def _finish(self, slot: int) -> None:
        if slot in self.by_slot:
            self.finished.append(self.by_slot.pop(slot))


class Watched:
    """A target whose verification passes are shown to a recorder."""

    def __init__(self, target: Target, recorder: Recorder):
        self.target, self.recorder = target, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def forward(self, ids_BS: Tensor, **options: Any) -> Any:
        out = self.target.forward(ids_BS, **options)
        if self.recorder.waiting and len(ids_BS) == len(self.recorder.waiting):
            self.recorder.verified(ids_BS, out)
        return out


@dataclasses.dataclass
class Rollout:
    """One answer: a document of the rollout store, and its cycles."""

    features: DocumentFeatures
    token_ids_S: np.ndarray
    loss_mask_S: np.ndarray
    prompt_length: int
    cycles: list[Verified]
    accepted: list[int]
    """drafts of each cycle that stood, uncut by the answer's end"""


def roll_out(
    target: Target, proposer: Proposer, prompts: Sequence[Sequence[int]], settings: DecodeSettings, top_k: int
) -> list[Rollout]:
    """Decode the prompts speculatively; one rollout per distinct prompt whose answer has at least two tokens."""
    from features.plan import document_id

    recorder = Recorder(proposer, top_k)
    traces = decode(Watched(target, recorder), recorder, prompts, settings)  # type: ignore[arg-type]
    episodes = {tuple(e.prompt): e for e in recorder.close()}
    out: dict[str, Rollout] = {}
    for trace in traces:
        episode = episodes[tuple(trace.prompt_ids)]
        if len(trace.answer_ids) < 2 or not trace.cycles:
            continue
        text = np.array(trace.text_ids, np.int32)
        mask = np.zeros(len(text), np.uint8)
        mask[len(trace.prompt_ids) :] = 1
        hidden_SLD = _features(episode, trace)
        logprob_S = np.zeros(len(text), np.float32)
        for at, value in episode.logprob.items():
            if at < len(text):
                logprob_S[at] = value
        document = document_id(text, mask)
        features = DocumentFeatures(document, text, mask, hidden_SLD, logprob_S)
        accepted = [c.matched for c in trace.cycles]
        out[document] = Rollout(features, text, mask, len(trace.prompt_ids), episode.cycles, accepted)
    return list(out.values())


def _features(episode: Episode, trace: Trace) -> Tensor:
    """[S, L, D]. The last token is never context of a block that has something to predict: its row is zero."""
    text = trace.text_ids
    parts = list(episode.hidden)
    if episode.last is not None:
        cycle, (logprob_bV, hidden_bLD) = trace.cycles[-1], episode.last
        for i, token in enumerate(text[cycle.start + 1 :]):
            episode.logprob[cycle.start + 1 + i] = float(logprob_bV[i, token])
        parts.append(hidden_bLD[: len(text) - 1 - cycle.start].cpu())
    hidden = torch.cat(parts)[: len(text) - 1]
    return torch.cat([hidden, hidden.new_zeros(len(text) - len(hidden), *hidden.shape[1:])])
