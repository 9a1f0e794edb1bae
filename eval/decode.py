"""Speculative decoding with a block drafter, and plain decoding, with one target pass per cycle.

One cycle of a sequence whose last token, the anchor, stands at position `start`:

    draft   the proposer fills positions start+1 .. start+K-1 in one pass, from features of positions < start
    verify  the target reads the anchor and the first b-1 drafts: b positions, which give b-1 checks and one more token
    emit    the matched drafts and the target's next token; both caches forget everything after the new anchor

The first token of an answer comes from prefill and belongs to no cycle. An answer ends at a stop token (kept, wherever
in a cycle it appears) or at `max_new_tokens`.

How a cycle counts: by the tokens it put into the answer (`emitted`). A cycle that meets the end is cut there, so
sum(emitted) = len(answer) - 1, whatever the drafter, and replay can count alike. `matched` keeps the uncut number.

Legend: B sequences, S tokens, L taps, D hidden size, K block, N = K - 1 drafts, b verified positions, V vocabulary.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from eval.kv_cache import RowCache
from eval.verify import draw, probabilities, target_tokens, verify_exact, verify_rejection
from features.target import Target
from infra.errors import ConfigError

PREFILL_TOKENS = 4096
"""prompt tokens per prefill pass, unless one prompt is longer"""


class Proposer(Protocol):
    """Whatever drafts blocks: a drafter (`eval.proposer.DrafterProposer`), or an adversary of a test."""

    block_size: int

    def open(self, slots: int, capacity: int) -> None:
        """Room for `slots` sequences of up to `capacity` tokens; forgets everything before."""

    def extend(self, slot: int, start: int, hidden_SLD: Tensor, token_ids_S: Tensor) -> None:
        """Target features and tokens of positions start .. start+S-1 of the sequence in `slot` (start 0: a new one)."""

    def propose(self, slots: list[int], anchors_B: Tensor, starts: list[int]) -> Tensor:
        """logits_BNV for the K-1 positions after each anchor."""


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    max_new_tokens: int = 256
    temperature: float = 0.0
    verification: str = "exact"
    """"exact": argmax drafts, accepted where equal to the target's token; "rejection": drafts drawn at `temperature`"""
    verify_length: int | Callable[[int], int] | None = None
    """b, 2 .. K; or a function of the number of running sequences; None = K"""
    batch_size: int = 1
    """sequences decoded at once; one that ends leaves and the next prompt joins"""
    seed: int = 0


@dataclasses.dataclass
class Cycle:
    """One draft and its verification, seen from one sequence.

    Attributes:
        start: position of the anchor.
        verify_length: b.
        matched: leading drafts that stood, whatever the answer's end.
        emitted: tokens put into the answer.
        drafts: the b - 1 verified ones.
        concurrency: sequences that shared the passes, which took draft_ms and verify_ms.
    """

    start: int
    verify_length: int
    matched: int
    emitted: int
    drafts: list[int]
    concurrency: int
    draft_ms: float
    verify_ms: float


@dataclasses.dataclass
class Trace:
    """One decoded answer. `seconds`: wall clock from the end of its prefill to its last token."""

    prompt_ids: list[int]
    answer_ids: list[int]
    cycles: list[Cycle]
    prefill_ms: float
    """of the pass, which equally long prompts may share"""
    seconds: float
    stopped: bool
    """ended by a stop token"""

    @property
    def text_ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


@dataclasses.dataclass
class _Sequence:
    index: int
    slot: int
    trace: Trace
    uniforms: Tensor | None  # [3, positions]: the target's token, the draft, its acceptance
    began: float = 0.0
    done: bool = False

    @property
    def start(self) -> int:
        return len(self.trace.prompt_ids) + len(self.trace.answer_ids) - 1

    def emit(self, tokens: list[int], stop_ids: frozenset[int], max_new_tokens: int) -> int:
        """Append up to the end of the answer; the number of tokens appended."""
        answer = self.trace.answer_ids
        for count, token in enumerate(tokens, 1):
            answer.append(token)
            self.trace.stopped = token in stop_ids
            if self.trace.stopped or len(answer) == max_new_tokens:
                self.done = True
                return count
        return len(tokens)


def decode(
    target: Target, proposer: Proposer | None, prompts: Sequence[Sequence[int]], settings: DecodeSettings
) -> list[Trace]:
    """Answers to `prompts` (token ids), in their order; without a proposer by plain decoding, one token per pass.

    With verification "exact" the answers equal plain decoding's with the same seed at any temperature, up to the
    target's floating-point noise between pass shapes (fp32: none seen).

    Raises:
        ConfigError: verify length, temperature or verification out of range, or an empty prompt.
    """
    return _Decoder(target, proposer, prompts, settings).run()


def plain_decode(target: Target, prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> list[Trace]:
    """The target alone: what speculative decoding must reproduce, and the baseline of the speed-up."""
    return decode(target, None, prompts, settings)


class _Decoder:
    def __init__(
        self, target: Target, proposer: Proposer | None, prompts: Sequence[Sequence[int]], settings: DecodeSettings
    ):
        _check(proposer, prompts, settings)
        self.target, self.proposer, self.settings = target, proposer, settings
        self.prompts = [list(p) for p in prompts]
        self.device = target.device
        self.block = proposer.block_size if proposer else 1
        # room for a last block that reaches past the end
        self.capacity = max((len(p) for p in self.prompts), default=0) + settings.max_new_tokens + self.block
        self.rows = min(settings.batch_size, len(self.prompts))
        self.cache = RowCache(target.text_config, self.rows, self.capacity)

    @torch.inference_mode()
    def run(self) -> list[Trace]:
        if self.proposer:
            self.proposer.open(self.rows, self.capacity)
        waiting = list(range(len(self.prompts)))[::-1]
        free_slots = list(range(self.rows))[::-1]
        running: list[_Sequence] = []  # in the order of the cache's rows
        finished: dict[int, Trace] = {}
        while waiting or running:
            while waiting and free_slots:
                running += self._prefill(self._next_prompts(waiting, len(free_slots)), free_slots)
            for row in reversed(range(len(running))):
                if running[row].done:
                    ended = running[row]
                    finished[ended.index] = ended.trace
                    free_slots.append(ended.slot)
                    self.cache.drop_row(row)
                    running[row] = running[-1]
                    running.pop()
            if running:
                self._cycle(running)
        return [finished[i] for i in range(len(self.prompts))]

    def _next_prompts(self, waiting: list[int], most: int) -> list[int]:
        """Indices to prefill in one pass: the next prompt, and those right behind it that are as long (no padding)."""
        length = len(self.prompts[waiting[-1]])
        most = min(most, max(1, PREFILL_TOKENS // length))
        group = [waiting.pop()]
        while waiting and len(group) < most and len(self.prompts[waiting[-1]]) == length:
            group.append(waiting.pop())
        return group

    def _prefill(self, group: list[int], free_slots: list[int]) -> list[_Sequence]:
        began = self._now()
        ids_BS = torch.tensor([self.prompts[i] for i in group], device=self.device)
        first, (count, length) = self.cache.active, ids_BS.shape
        for _ in group:
            self.cache.open_row()
        positions, mask = self.cache.prepare(first, count, length, self.device)
        out = self.target.forward(
            ids_BS,
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
            logits="last",
            taps=bool(self.proposer),
        )
        started = []
        for row, index in enumerate(group):
            self.cache.lengths[first + row] = length
            trace = Trace(self.prompts[index], [], [], 0.0, 0.0, False)
            sequence = _Sequence(index, free_slots.pop(), trace, self._uniforms(index))
            started.append(sequence)
            if self.proposer:
                self.proposer.extend(sequence.slot, 0, out.hidden_BSLD[row], ids_BS[row])
        uniform_B1 = self._window(started, 0, 1) if self.settings.temperature > 0 else None
        tokens_B1 = target_tokens(out.logits_BSV, self.settings.temperature, uniform_B1)
        for sequence, (token,) in zip(started, tokens_B1.tolist(), strict=True):
            sequence.emit([token], self.target.stop_ids, self.settings.max_new_tokens)
        ended = self._now()
        for sequence in started:
            sequence.began, sequence.trace.prefill_ms = ended, 1e3 * (ended - began)
        return started

    def _cycle(self, running: list[_Sequence]) -> None:
        """One draft and one verification pass of every running sequence."""
        began = self._now()
        b = self._verify_length(len(running))
        anchors_B = torch.tensor([s.trace.answer_ids[-1] for s in running], device=self.device)
        starts = [s.start for s in running]
        block_Bb, q_BNV = anchors_B[:, None], None
        if self.proposer:
            logits_BNV = self.proposer.propose([s.slot for s in running], anchors_B, starts)[:, : b - 1]
            drafts_BN, q_BNV = self._choose_drafts(logits_BNV, running)
            block_Bb = torch.cat([block_Bb, drafts_BN], dim=1)
        drafted = self._now()
        positions, mask = self.cache.prepare(0, len(running), b, self.device)
        out = self.target.forward(
            block_Bb, attention_mask=mask, position_ids=positions, cache=self.cache, taps=bool(self.proposer)
        )
        matched_B, next_B = self._verify(out.logits_BSV, block_Bb[:, 1:], q_BNV, running)
        block, matched, following = block_Bb.tolist(), matched_B.tolist(), next_B.tolist()
        verified = self._now()
        for row, s in enumerate(running):
            tokens = [*block[row][1 : 1 + matched[row]], following[row]]
            emitted = s.emit(tokens, self.target.stop_ids, self.settings.max_new_tokens)
            self.cache.lengths[row] = starts[row] + 1 + matched[row]  # the anchor and the matched drafts
            if self.proposer:
                if not s.done:
                    kept = slice(0, 1 + matched[row])
                    self.proposer.extend(s.slot, starts[row], out.hidden_BSLD[row, kept], block_Bb[row, kept])
                s.trace.cycles.append(
                    Cycle(starts[row], b, matched[row], emitted, block[row][1:], len(running), 0.0, 0.0)
                )
        ended = self._now()
        for s in running:
            if self.proposer:
                # appending features to the draft cache is the drafter's work
                s.trace.cycles[-1].draft_ms = 1e3 * (drafted - began + ended - verified)
                s.trace.cycles[-1].verify_ms = 1e3 * (verified - drafted)
            s.trace.seconds = ended - s.began

    def _choose_drafts(self, logits_BNV: Tensor, running: list[_Sequence]) -> tuple[Tensor, Tensor | None]:
        if self.settings.verification == "exact" or self.settings.temperature == 0:
            return logits_BNV.argmax(-1), None
        q_BNV = probabilities(logits_BNV, self.settings.temperature)
        return draw(q_BNV, self._window(running, 1, q_BNV.shape[1])), q_BNV

    def _verify(
        self, logits_BbV: Tensor, drafts_BN: Tensor, q_BNV: Tensor | None, running: list[_Sequence]
    ) -> tuple[Tensor, Tensor]:
        temperature, b = self.settings.temperature, logits_BbV.shape[1]
        uniform_Bb = self._window(running, 0, b) if temperature > 0 else None
        if q_BNV is None:
            return verify_exact(drafts_BN, target_tokens(logits_BbV, temperature, uniform_Bb))
        p_BbV = probabilities(logits_BbV, temperature)
        return verify_rejection(p_BbV, drafts_BN, q_BNV, self._window(running, 2, b - 1), uniform_Bb)

    def _verify_length(self, concurrency: int) -> int:
        if self.proposer is None:
            return 1
        rule = self.settings.verify_length
        b = self.block if rule is None else rule(concurrency) if callable(rule) else rule
        if not 2 <= b <= self.block:
            raise ConfigError(
                f"verify length {b} is not between 2 and the drafter's block size {self.block}; choose one"
            )
        return b

    def _uniforms(self, index: int) -> Tensor | None:
        """Uniforms for every position of an answer, a function of seed and prompt index: the same text in any batch."""
        if self.settings.temperature == 0:
            return None
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + index)
        n = self.settings.max_new_tokens + self.block + 1
        return torch.rand(3, n, generator=generator, dtype=torch.float64).to(self.device)

    def _window(self, running: list[_Sequence], kind: int, n: int) -> Tensor:
        """Uniforms of the n positions after each sequence's anchor; answer position i uses column i."""
        return torch.stack([s.uniforms[kind, len(s.trace.answer_ids) :][:n] for s in running])

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _check(proposer: Proposer | None, prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> None:
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {i} has no tokens; decoding needs at least one")
    if settings.verification not in ("exact", "rejection"):
        raise ConfigError(f"verification = {settings.verification!r} is unknown; use 'exact' or 'rejection'")
    if settings.temperature < 0 or settings.max_new_tokens < 1 or settings.batch_size < 1:
        raise ConfigError(
            f"temperature {settings.temperature} must be 0 or more, max_new_tokens {settings.max_new_tokens} and "
            f"batch_size {settings.batch_size} 1 or more"
        )
    b = settings.verify_length
    if proposer and isinstance(b, int) and not 2 <= b <= proposer.block_size:
        raise ConfigError(
            f"verify length {b} is not between 2 and the drafter's block size {proposer.block_size}; choose one"
        )
