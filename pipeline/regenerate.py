"""Every assistant turn written anew by the target; users' turns stay.

Turn by turn over all conversations: the first answers of all, then the second ones after the target's own first, and so
on. Assistant turns that call tools stay as they are, since the tools' results that follow answer those very calls;
they are context and not supervised.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from features.target import load_target
from features.target_config import TargetConfig
from infra.progress import Progress
from pipeline.config import FeaturesConfig, RegenerateConfig
from pipeline.conversation import Conversation, Reject, content_key
from pipeline.front import TargetFront
from pipeline.generate import Generator, Request
from pipeline.pool import Work, run_until_done
from pipeline.prefill import actor_device
from pipeline.render import Answer, BadSample, Renderer
from pipeline.responses import SCHEMA, Responses, repetition, statistics

MIN_CHUNK = 16  # prompts: fewer in one task would leave most of the batch empty


@dataclass
class Dialogue:
    """A conversation on its way: `messages` with the target's answers so far, `answers` by index."""

    conversation: Conversation
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    read: int = 0  # turns of the conversation used
    waiting: Request | None = None

    def advance(self) -> bool:
        """Take over turns up to the next one that the target must write; False when there is none."""
        turns = self.conversation.messages
        while self.read < len(turns):
            turn = turns[self.read]
            asked = bool(self.messages) and self.messages[-1]["role"] in ("user", "tool")
            if asked and turn["role"] == "assistant" and "tool_calls" not in turn:
                self.read += 1
                return True
            self.messages.append(turn)
            self.read += 1
        return bool(self.messages) and self.messages[-1]["role"] in ("user", "tool")

    def answer(self, row: dict[str, Any], stop_ids: frozenset[int]) -> None:
        ids, finished = row["token_ids"], row["finish_reason"] == "stop"
        if finished and ids and ids[-1] not in stop_ids:
            ids = None  # some servers leave the stop token out: then the text is rendered and tokenised again
        self.answers[len(self.messages)] = Answer(row["text"], ids, finished)
        self.messages.append({"role": "assistant", "content": row["text"]})


def regenerate(
    cfg: FeaturesConfig, front: TargetFront, renderer: Renderer, conversations: list[Conversation]
) -> tuple[list[Dialogue], list[Reject], dict[str, Any]]:
    """Dialogues with the target's answers, what had to be left out, and figures on the answers.

    Raises:
        FlashdraftError: the target cannot be loaded, or servers and actors fail for good.
    """
    responses = Responses(cfg.work_folder.parent, _identity(cfg, front))
    dialogues = [Dialogue(c) for c in conversations]
    open_, rejects, used = dialogues, [], {}
    round_ = 0
    while open_:
        round_ += 1
        asking = [d for d in open_ if d.advance()]
        requests: dict[str, Request] = {}
        for d in asking:
            try:
                d.waiting = _request(d, renderer, cfg)
                requests[d.waiting.key] = d.waiting
            except BadSample as e:
                d.waiting = None
                rejects.append(_reject(d.conversation, str(e)))
        asking = [d for d in asking if d.waiting]
        failed = _answer_all(cfg, front, asking, list(requests.values()), responses, round_)
        open_ = []
        for d in asking:
            key = d.waiting.key
            if key in failed:
                rejects.append(_reject(d.conversation, failed[key]))
                continue
            used[key] = responses[key]
            d.answer(used[key], front.stop_ids)
            open_.append(d)
    gone = {r.key for r in rejects}
    figures = statistics(used.values())
    return [d for d in dialogues if d.conversation.key not in gone], rejects, figures


def _request(d: Dialogue, renderer: Renderer, cfg: FeaturesConfig) -> Request:
    ids = renderer.prompt_ids(tuple(d.messages), d.conversation.tools)
    room = cfg.target.max_length - len(ids)
    if room < cfg.render.min_supervised:
        raise BadSample(
            f"the prompt of {len(ids)} tokens leaves no room for an answer within max_length {cfg.target.max_length}"
        )
    return Request(content_key(d.messages, d.conversation.tools), ids, min(room, cfg.regenerate.max_new_tokens))


def _answer_all(
    cfg: FeaturesConfig,
    front: TargetFront,
    asking: list[Dialogue],
    requests: list[Request],
    responses: Responses,
    round_: int,
) -> dict[str, str]:
    """Have every request's answer in `responses`; returns key -> reason for those that failed."""
    missing = [r for r in requests if r.key not in responses]
    if not missing:
        return {}
    failed: dict[str, str] = {}
    what = "regenerate" if round_ == 1 else f"regenerate turn {round_}"
    with Progress(len(requests), what, "answers", start=len(requests) - len(missing)) as progress:
        tokens = 0

        def keep(rows: list[dict[str, Any]]) -> None:
            nonlocal tokens
            responses.add(rows)
            tokens += sum(len(r["token_ids"] or ()) for r in rows)
            rate = tokens / max(time.monotonic() - progress.began, 1e-9)
            progress.update(len(rows), **{"tokens/s": rate}, failed=len(failed))

        if cfg.regenerate.engine == "openai":
            from pipeline.http_engine import answer_over_http

            by_key = {d.waiting.key: d for d in asking}
            asked = [(r, by_key[r.key].messages, by_key[r.key].conversation.tools) for r in missing]
            for rows, errors in answer_over_http(cfg.regenerate, cfg.target.chat_template_args, asked):
                failed |= errors
                keep(
                    [
                        r | {"repetition": repetition(r["token_ids"] or front.tokenizer(r["text"])["input_ids"])}
                        for r in rows
                    ]
                )
        else:
            for rows in _on_actors(cfg, requests, responses):
                keep(rows)
    return failed


def _on_actors(cfg: FeaturesConfig, requests: list[Request], responses: Responses) -> Iterator[list[dict[str, Any]]]:
    chunks = chunked(requests, cfg.regenerate.batch_size)

    def missing() -> list[pa.Table]:
        tasks = [[r for r in chunk if r.key not in responses] for chunk in chunks]
        return [_task(t) for t in tasks if t]

    arguments = {
        "target": cfg.target.model_dump(mode="json"),
        "regenerate": cfg.regenerate.model_dump(mode="json"),
    }
    for table in run_until_done(missing, Writer, arguments, cfg.ray):
        yield table.to_pylist()


def chunked(requests: list[Request], batch_size: int) -> list[list[Request]]:
    """Tasks of about two batches each, a multiple of four of them so that 2 or 4 actors get equal shares.

    Made from all requests, the answered ones too: a task is kept as a whole or not at all, so after a kill the same
    prompts meet in the same batches and the answers have the same bits.
    """
    ordered = sorted(requests, key=lambda r: (-len(r.prompt_ids), r.key))
    n = -(-len(ordered) // (2 * batch_size))
    n = max(min(-(-n // 4) * 4, len(ordered) // MIN_CHUNK), 1)
    bounds = [len(ordered) * i // n for i in range(n + 1)]
    return [ordered[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def _task(requests: list[Request]) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([[r.key for r in requests]]),
            "prompt_ids": pa.array([[r.prompt_ids for r in requests]], pa.list_(pa.list_(pa.int32()))),
            "max_new_tokens": pa.array([[r.max_new_tokens for r in requests]], pa.list_(pa.int32())),
        }
    )


class Writer(Work):
    """The actor: holds the target once; one call answers the prompts of one task."""

    def __init__(self, target: dict[str, Any], regenerate: dict[str, Any], threads: int, cwd: str):
        super().__init__(threads, cwd)
        loaded = load_target(TargetConfig.model_validate(target), device=actor_device())
        self.generator = Generator(loaded, RegenerateConfig.model_validate(regenerate))

    def run(self, row: pa.Table) -> pa.Table:
        columns = (row[name][0].as_py() for name in ("key", "prompt_ids", "max_new_tokens"))
        responses = self.generator.generate([Request(*r) for r in zip(*columns, strict=True)])
        rows = [vars(r) | {"repetition": repetition(r.token_ids)} for r in responses]
        return pa.Table.from_pylist(rows, schema=SCHEMA)


def _identity(cfg: FeaturesConfig, front: TargetFront) -> dict[str, Any]:
    target = {
        "dtype": cfg.target.dtype,
        "chat_template_args": cfg.target.chat_template_args,
        "max_length": cfg.target.max_length,
    }
    return front.source_identity() | target | cfg.regenerate.identity()


def _reject(c: Conversation, reason: str) -> Reject:
    return Reject(c.source, c.file, c.line, "regenerate", reason, c.key)
