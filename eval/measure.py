"""One suite: decode every prompt plainly and with each drafter, in turns, and compare.

Per prompt the target alone comes first, then each drafter on the same token ids, so that drifting machine load meets
all alike. The plain text is the reference of the lossless check and, with one more pass of the target for its features,
of the replay.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from eval.decode import DecodeSettings, Trace, decode, plain_decode
from eval.metrics import Cycles, acceptance_summary, repeated_ngrams, tau_macro, tau_pooled
from eval.prompts import LoadedSuite, Prompt
from eval.replay import Text, replay
from eval.session import LoadedDrafter, Renderer
from features.target import Target

SAMPLES = 4
"""answers per suite kept whole for the pages"""


@dataclasses.dataclass
class Answer:
    """One decoded turn: plainly, and by drafter label."""

    prompt: int
    turn: int
    plain: Trace
    drafted: dict[str, Trace]
    replayed: dict[str, dict[int, Cycles]]
    """label -> verify length -> cycles, on the plain text"""
    divergence: dict[str, dict[str, Any]]
    """label -> where and how closely the texts part; absent where they are equal"""


@dataclasses.dataclass
class SuiteMeasurement:
    suite: LoadedSuite
    answers: list[Answer]


def measure(
    target: Target,
    drafters: dict[str, LoadedDrafter],
    suite: LoadedSuite,
    settings: DecodeSettings,
    renderer: Renderer,
    *,
    do_replay: bool = True,
    on_answers: Callable[[float], None] = lambda n: None,
) -> SuiteMeasurement:
    """Decode a suite. `on_answers` hears of finished answers, for the progress bar: each counts in equal parts for
    plain decoding and for every drafter.

    With a batch size above 1, prompts go in groups of four batches: sequences leave and join inside a group, and plain
    and drafted decoding take turns between groups.
    """
    out = SuiteMeasurement(suite, [])
    size = 1 if settings.batch_size == 1 else 4 * settings.batch_size
    for first in range(0, len(suite.prompts), size):
        group = list(range(first, min(first + size, len(suite.prompts))))
        history: dict[int, list[list[int]]] = {i: [] for i in group}
        for turn in range(max(_turns(suite.prompts[i]) for i in group)):
            members = [i for i in group if turn < _turns(suite.prompts[i])]
            prompts = [renderer.prompt_ids(suite.prompts[i], turn, history[i]) for i in members]
            seeded = dataclasses.replace(settings, seed=settings.seed + 1_000 * first + turn)
            part = len(members) / (1 + len(drafters))
            plain, drafted = plain_decode(target, prompts, seeded), {}
            on_answers(part)
            for label, d in drafters.items():
                drafted[label] = decode(target, d.proposer, prompts, seeded)
                on_answers(part)
            for row, i in enumerate(members):
                history[i].append(plain[row].answer_ids)
                answer = Answer(i, turn, plain[row], {label: t[row] for label, t in drafted.items()}, {}, {})
                out.answers.append(_checked(target, drafters, answer, settings, do_replay))
    return out


def _turns(prompt: Prompt) -> int:
    return 1 if prompt.token_ids is not None else len(prompt.turns)


def _checked(
    target: Target, drafters: dict[str, LoadedDrafter], answer: Answer, settings: DecodeSettings, do_replay: bool
) -> Answer:
    """The answer with its divergences and replays: one pass of the target over the plain text serves both."""
    apart = {} if settings.verification == "rejection" else _divergences(answer)
    if not (apart or do_replay):
        return answer
    ids = torch.tensor(answer.plain.text_ids, device=target.device)
    P = len(answer.plain.prompt_ids)
    out = target.forward(ids[None, :-1], logits="none")
    for label, at in apart.items():
        logits = target.logits(out.last_hidden_BSD[0, P + at - 1])
        answer.divergence[label] = {"position": at, **logit_gap(logits, settings.temperature)}
    if do_replay and settings.verification == "exact":
        text = Text(ids, out.hidden_BSLD[0], ((P, len(ids)),))
        for label, d in drafters.items():
            lengths = tuple(range(2, d.model.config.block_size + 1))
            replayed = replay(d.model, d.proposer.head, [text], verify_lengths=lengths)
            answer.replayed[label] = {b: cycles[0] for b, cycles in replayed.items()}
    return answer


def _divergences(answer: Answer) -> dict[str, int]:
    """label -> index of the first differing token of the answer."""
    plain, out = answer.plain.answer_ids, {}
    for label, trace in answer.drafted.items():
        mine = trace.answer_ids
        if mine != plain:
            shared = min(len(mine), len(plain))
            out[label] = next((i for i in range(shared) if mine[i] != plain[i]), shared)
    return out


def logit_gap(logits_V: torch.Tensor, temperature: float) -> dict[str, Any]:
    """How close the two best logits are, and whether floating-point noise of that dtype explains a flip.

    The noise level: 8 units in the last place of the top logit (bf16 at 16..32: a unit is 0.125, the level 1.0), about
    what other summation orders change in a model of tens of layers. In fp32 nothing is tolerated: units there are 2^-20
    and no flip was ever seen. When sampling, the gap says nothing; nothing is tolerated either.
    """
    top = logits_V.float().topk(2).values.tolist()
    gap = top[0] - top[1]
    if logits_V.dtype == torch.float32 or temperature > 0:
        return {"gap": gap, "noise": 0.0, "tolerated": False}
    digits = {torch.bfloat16: 7, torch.float16: 10}[logits_V.dtype]
    noise = 8 * 2.0 ** (math.floor(math.log2(max(abs(top[0]), 1e-6))) - digits)
    return {"gap": gap, "noise": noise, "tolerated": gap <= noise}


def lossless(measurement: SuiteMeasurement, label: str, settings: DecodeSettings) -> dict[str, Any]:
    """`identical == checked` says that not one token changed.

    checked: tokens of the plain answers. After a tolerated divergence the two texts answer different questions, so
    the tokens from there on are in neither count but in `untested`.
    """
    if settings.verification == "rejection":
        return {"checked": 0, "identical": 0, "rule": "same distribution, not same tokens: see the χ² tests"}
    checked = identical = untested = 0
    divergences = []
    for answer in measurement.answers:
        n = max(len(answer.plain.answer_ids), len(answer.drafted[label].answer_ids))
        apart = answer.divergence.get(label)
        same = n if apart is None else apart["position"]
        identical += same
        checked += same if apart is not None and apart["tolerated"] else n
        untested += n - same if apart is not None and apart["tolerated"] else 0
        if apart is not None:
            divergences.append({"prompt": measurement.suite.prompts[answer.prompt].id, "turn": answer.turn, **apart})
    return {"checked": checked, "identical": identical, "untested": untested, "divergences": divergences}


def summarise(measurement: SuiteMeasurement, label: str, block_size: int, settings: DecodeSettings) -> dict[str, Any]:
    """The report of one suite and drafter (docs/evaluation.md lists the fields), JSON-able."""
    prompts = measurement.suite.prompts
    answers = measurement.answers
    by_prompt = [[a for a in answers if a.prompt == i] for i in range(len(prompts))]
    cycles = [Cycles.concat([Cycles.of_trace(a.drafted[label]) for a in group]) for group in by_prompt]
    out = acceptance_summary(cycles, block_size, [p.category for p in prompts])
    traces = [a.drafted[label] for a in answers]
    uncut = [[c.matched + 1 for a in group for c in a.drafted[label].cycles] for group in by_prompt]
    out["tau_pooled_uncut"] = tau_pooled([sum(u) for u in uncut], [len(u) for u in uncut])
    out["tau_macro_uncut"] = tau_macro([sum(u) for u in uncut], [len(u) for u in uncut])
    out["lossless"] = lossless(measurement, label, settings)
    out |= _speed(measurement, label, out["tau_pooled"])
    out["repeated_4grams"] = repeated_ngrams(t.answer_ids for t in traces)
    out["answers"] = len(answers)
    out["answers_stopped"] = sum(t.stopped for t in traces)
    if all(label in a.replayed for a in answers) and answers:
        out |= _replayed(measurement, label, settings.verify_length or block_size)
    out["prompts"] = [
        {
            "id": prompt.id,
            "category": prompt.category,
            "prompt_tokens": sum(len(a.plain.prompt_ids) for a in group),
            "tokens": int(c.emitted.sum()),
            "cycles": len(c),
            "ms_per_token": _per_token([a.drafted[label] for a in group]),
            "plain_ms_per_token": _per_token([a.plain for a in group]),
        }
        for prompt, group, c in zip(prompts, by_prompt, cycles, strict=True)
    ]
    return out


def _per_token(traces: list[Trace]) -> float | None:
    """Milliseconds per token after the first, prefill left out."""
    tokens = sum(len(t.answer_ids) - 1 for t in traces)
    return 1e3 * sum(t.seconds for t in traces) / tokens if tokens else None


def _speed(measurement: SuiteMeasurement, label: str, tau: float) -> dict[str, Any]:
    """Measured per-token times, and the cost identity (T_draft + T_verify) / τ beside them."""
    traces = [a.drafted[label] for a in measurement.answers]
    mine, plain = _per_token(traces), _per_token([a.plain for a in measurement.answers])
    steps = [c for t in traces for c in t.cycles]
    draft = sum(c.draft_ms for c in steps) / len(steps) if steps else None
    verify = sum(c.verify_ms for c in steps) / len(steps) if steps else None
    return {
        "speedup": plain / mine if mine and plain else None,
        "ms_per_token": mine,
        "plain_ms_per_token": plain,
        "tokens_per_s": 1e3 / mine if mine else None,
        "plain_tokens_per_s": 1e3 / plain if plain else None,
        "draft_ms": draft,
        "verify_ms": verify,
        "predicted_ms_per_token": (draft + verify) / tau if steps else None,
        "concurrency": sum(c.concurrency for c in steps) / len(steps) if steps else None,
    }


def _replayed(measurement: SuiteMeasurement, label: str, b: int) -> dict[str, Any]:
    """Replay on the plain texts: τ for every verify length, and whether it makes live decoding's very cycles."""
    answers = measurement.answers
    by_length = {}
    for length in answers[0].replayed[label]:
        together = Cycles.concat([a.replayed[label][length] for a in answers])
        by_length[str(length)] = tau_pooled([int(together.emitted.sum())], [len(together)])
    equal = sum(
        (r.start.tolist(), r.accepted.tolist()) == (c.start.tolist(), c.accepted.tolist())
        for r, c in ((a.replayed[label][b], Cycles.of_trace(a.drafted[label])) for a in answers)
    )
    return {"replay_tau_pooled": by_length[str(b)], "replay_equal_answers": equal, "tau_by_verify_length": by_length}
