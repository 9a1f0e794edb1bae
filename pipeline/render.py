"""From conversations to token ids and loss masks, with the target's own chat template.

A rendered conversation is a sequence of segments: text that the template or another person wrote, and text that the
target emits. Only the second is supervised. Each segment is tokenised by itself, as at inference, where the prompt is
tokenised and the answer's tokens follow; where the target wrote the answer, its own tokens are taken.

                    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n | Hello!<|im_end|> | \\n
    loss_mask        0 ...                                                 0 | 1 ...          1 | 0
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from features.target_config import TargetConfig

Messages = tuple[dict[str, Any], ...]
EMPTY_THINKING = re.compile(r"(<think>\s*</think>\s*)?")


class BadSample(Exception):
    """The conversation cannot become a document; the message is the reason in the rejects table."""


@dataclass(frozen=True)
class Rendered:
    """One document.

    Attributes:
        token_ids_S: int32. loss_mask_S: uint8, 1 where the target emits the token.
        prompt_length: tokens before the first supervised one.
    """

    token_ids_S: np.ndarray
    loss_mask_S: np.ndarray
    prompt_length: int


@dataclass(frozen=True)
class _Segment:
    text: str
    supervised: bool
    ids: list[int] | None = None


class Renderer:
    """The chat template of one target.

    Args:
        template: Jinja text; `args` are passed to it (`enable_thinking`, `date_string`, ...).
        stop_ids: tokens that end an answer.
    """

    def __init__(
        self, cfg: TargetConfig, tokenizer: Any, template: str, stop_ids: frozenset[int], min_supervised: int = 2
    ):
        self.cfg, self.tokenizer, self.template, self.stop_ids = cfg, tokenizer, template, stop_ids
        self.min_supervised = min_supervised
        self.has_generation_tags = "{% generation" in template or "{%- generation" in template

    def prompt(self, messages: Messages, tools: Any = None) -> str:
        """The text after which the target answers.

        Raises:
            BadSample: the template refuses the turns.
        """
        return self._apply(messages, tools, add_generation_prompt=True)[0]

    def prompt_ids(self, messages: Messages, tools: Any = None) -> list[int]:
        return self._tokens(self.prompt(messages, tools))

    def conversation(
        self, messages: Messages, tools: Any = None, answers: dict[int, "Answer"] | None = None
    ) -> Rendered:
        """One document of the whole conversation.

        Args:
            answers: by index of the turn, what the target wrote there; other assistant turns are then context only.
                None: every assistant turn is supervised with the corpus's text.

        Raises:
            BadSample: the template changes earlier turns when later ones are added, or nothing / everything /
                fewer than `min_supervised` tokens are supervised, or no two consecutive ones.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and (answers is None or i in answers)]
        if not turns:
            raise BadSample("no assistant turn")
        last = turns[-1]
        final = (answers or {}).get(last)
        emitted = final is not None and final.ids is not None
        # what the target emitted last needs no rendering: it follows the prompt
        full, tagged = (
            (self.prompt(messages[:last], tools), []) if emitted else self._apply(messages[: last + 1], tools, False)
        )
        segments: list[_Segment] = []
        done = 0
        for i in turns:
            prompt = self.prompt(messages[:i], tools)
            if not full.startswith(prompt) or len(prompt) < done:
                raise BadSample(
                    f"the template's text before turn {i} is no prefix of the whole conversation's; "
                    "use render.rows = 'turn'"
                )
            segments.append(_Segment(full[done : len(prompt)], False))
            done = len(prompt)
            if i == last and emitted:
                segments.append(_Segment("", True, final.ids))
                break
            after = full if i == last else self._apply(messages[: i + 1], tools, False)[0]
            if not full.startswith(after) or len(after) <= len(prompt):
                raise BadSample(
                    f"the template's text of turn {i} changes when later turns follow; use render.rows = 'turn'"
                )
            segments += self._answer_segments(
                i, messages[i], full[len(prompt) : len(after)], len(prompt), tagged, (answers or {}).get(i)
            )
            done = len(after)
        segments.append(_Segment(full[done:], False))
        return self._join(segments, len(messages))

    def turns(
        self, messages: Messages, tools: Any = None, answers: dict[int, "Answer"] | None = None
    ) -> list[Rendered]:
        """One document per assistant turn, as at inference: earlier turns as the template then shows them."""
        indices = [i for i, m in enumerate(messages) if m["role"] == "assistant" and (answers is None or i in answers)]
        if not indices:
            raise BadSample("no assistant turn")
        rows = []
        for i in indices:
            only = _texts(messages[: i + 1], i) if answers is None else {i: answers[i]}
            rows.append(self.conversation(messages[: i + 1], tools, only))
        return rows

    def _answer_segments(
        self,
        i: int,
        message: dict[str, Any],
        text: str,
        start: int,
        tagged: list[tuple[int, int]],
        answer: "Answer | None",
    ) -> list[_Segment]:
        """`text` is what the template writes for turn `i`, after the generation prompt, `start` characters in."""
        content, reasoning = message["content"], message.get("reasoning_content") or ""
        if not content.strip() and not reasoning.strip() and "tool_calls" not in message:
            raise BadSample(f"turn {i} of the assistant is empty")
        if answer is not None and answer.ids is not None:
            segments = self._emitted_segments(answer, text)
            if segments:
                return segments
        elif self.has_generation_tags and tagged:
            return _by_tags(text, start, tagged)
        if reasoning.strip() and reasoning.strip() in text:
            skip = 0  # think markers around a given reasoning are the target's own
        elif "tool_calls" in message and not content.strip():
            skip = len(EMPTY_THINKING.match(text)[0])
        else:
            skip = max(text.find(content.strip()), 0)  # what the template puts before it, as an empty think block
        if answer is not None and not answer.finished:
            end = skip + len(content.strip())  # the marker after an answer that was cut off is the template's
            return [_Segment(text[:skip], False), _Segment(text[skip:end], True), _Segment(text[end:], False)]
        ids = self._tokens(text[skip:])
        stops = [n for n, t in enumerate(ids) if t in self.stop_ids]
        if not stops and content.strip() and "tool_calls" not in message:
            end = text.rfind(content.strip()) + len(content.strip())  # what follows is the template's
            return [_Segment(text[:skip], False), _Segment(text[skip:end], True), _Segment(text[end:], False)]
        end = stops[-1] + 1 if stops else len(ids)
        return [_Segment(text[:skip], False), _Segment("", True, ids[:end]), _Segment("", False, ids[end:])]

    def _emitted_segments(self, answer: "Answer", text: str) -> list[_Segment] | None:
        """An earlier answer in the target's own tokens; None where the template shows it changed (trimmed, say)."""
        at = text.find(answer.text)
        if at < 0:
            return None
        rest = text[at + len(answer.text) :]
        if answer.finished:
            stop = self.tokenizer.decode(answer.ids[-1:])
            if not rest.startswith(stop):
                return None
            rest = rest[len(stop) :]
        # an end-of-turn marker after an answer that was cut off is the template's: not supervised
        return [_Segment(text[:at], False), _Segment("", True, answer.ids), _Segment(rest, False)]

    def _join(self, segments: list[_Segment], turns: int) -> Rendered:
        ids: list[int] = []
        mask: list[int] = []
        for s in segments:
            new = s.ids if s.ids is not None else self._tokens(s.text)
            ids += new
            mask += [int(s.supervised)] * len(new)
        limit = self.cfg.max_length
        whole = len(ids)
        token_ids, loss_mask = np.array(ids[:limit], np.int32), np.array(mask[:limit], np.uint8)
        supervised = int(loss_mask.sum())
        if supervised == 0:
            raise BadSample(
                "no supervised token" + (f" within max_length {limit} of its {whole} tokens" if whole > limit else "")
            )
        if supervised == len(loss_mask) and turns > 1:
            raise BadSample("every token is supervised although there are other turns; the template hides them")
        if supervised < self.min_supervised:
            raise BadSample(f"{supervised} supervised tokens, {self.min_supervised} are the minimum")
        if not (loss_mask[1:] & loss_mask[:-1]).any():
            raise BadSample("no two consecutive supervised tokens")
        return Rendered(token_ids, loss_mask, int(loss_mask.argmax()))

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _apply(self, messages: Messages, tools: Any, add_generation_prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        """(text, spans of characters within generation tags)."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {k: str(v) for k, v in self.tokenizer.special_tokens_map.items() if isinstance(v, str)}
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=self.has_generation_tags,
                **(special | self.cfg.chat_template_args),
            )
        except Exception as e:  # a template raises what it likes: jinja2's errors, TypeError on a missing field, ...
            raise BadSample(f"the chat template refuses the turns: {str(e).strip() or type(e).__name__}") from None
        return texts[0], [tuple(s) for s in spans[0]] if self.has_generation_tags and spans else []


@dataclass(frozen=True)
class Answer:
    """What the target wrote in one turn.

    Attributes:
        text: without special tokens. ids: as emitted, with the stop token; None where a server gave only text.
        finished: ended by a stop token rather than by the limit.
    """

    text: str
    ids: list[int] | None
    finished: bool


def _texts(messages: Messages, i: int) -> dict[int, Answer]:
    return {i: Answer(messages[i]["content"], None, True)}


def _by_tags(text: str, start: int, tagged: list[tuple[int, int]]) -> list[_Segment]:
    segments, at = [], 0
    for a, b in tagged:
        a, b = max(a - start, 0), min(b - start, len(text))
        if a < b:
            segments += [_Segment(text[at:a], False), _Segment(text[a:b], True)]
            at = b
    return [*segments, _Segment(text[at:], False)]
