"""A serving engine on the prompts of an evaluation: its counters, its texts and ours, side by side."""

from typing import Any

from eval.config import EvalConfig
from eval.decode import DecodeSettings, Trace
from eval.engines import EngineResult, Sampling, Server, run_vllm
from eval.measure import SuiteMeasurement
from eval.session import LoadedDrafter
from features.target import Target
from features.target_source import target_folder
from infra.errors import CheckpointError, ConfigError


def check_engine(cfg: EvalConfig, drafter: LoadedDrafter) -> None:
    """Before anything is decoded: can the engine do what our loop is asked to do?

    Raises:
        ConfigError: a verify length, which engines do not know, or rejection sampling.
        CheckpointError: an ablation that no engine computes.
    """
    if cfg.verify_length or cfg.verification == "rejection":
        what = "verify_length" if cfg.verify_length else "verification = 'rejection'"
        raise ConfigError(f"{what} cannot be compared with engine {cfg.engine!r}, which does not know it; leave it out")
    if not drafter.model.config.published:
        raise CheckpointError(
            f"the drafter in {str(drafter.folder)!r} is an ablation ({drafter.model.config.conditioning}, "
            f"{drafter.model.config.drafting} drafting) that no engine serves; evaluate it without engine"
        )


def measure_engine(
    cfg: EvalConfig,
    target: Target,
    drafter: LoadedDrafter,
    label: str,
    measured: dict[str, SuiteMeasurement],
    settings: DecodeSettings,
) -> dict[str, dict[str, Any]]:
    """Suite -> the key `engine` of its report (docs/evaluation.md); `label` names our traces of this drafter.

    Raises:
        EngineError, ResourceError: see `eval.engines`.
    """
    prompts = {name: [a.plain.prompt_ids for a in m.answers] for name, m in measured.items()}
    sampling = Sampling(
        settings.max_new_tokens, settings.temperature, settings.seed, tuple(sorted(target.stop_ids)),
        settings.batch_size,
    )  # fmt: skip
    plain: dict[str, EngineResult] = {}
    if cfg.engine == "vllm":
        folder, dtype = target_folder(target.config), str(target.dtype).removeprefix("torch.")
        draft_tokens = drafter.model.config.block_size - 1
        plain, _ = run_vllm(folder, None, 0, prompts, sampling, dtype)
        drafted, name = run_vllm(folder, drafter.folder, draft_tokens, prompts, sampling, dtype)
    else:
        server = Server(cfg.engine)
        drafted = {suite: server.run(p, sampling) for suite, p in prompts.items()}
        name = f"{server.kind} at {server.url}"
    out = {}
    for suite, m in measured.items():
        ours = [a.drafted[label] for a in m.answers]
        out[suite] = {"name": name, **compare(drafted[suite], ours, target, plain.get(suite), settings.temperature)}
    return out


def compare(
    engine: EngineResult, ours: list[Trace], target: Target, plain: EngineResult | None, temperature: float
) -> dict[str, Any]:
    """An engine's figures, with ours on the same prompts counted as engines count (past the end of an answer too)."""
    matched = [c.matched for t in ours for c in t.cycles]
    emitted = sum(c.emitted for t in ours for c in t.cycles)
    width = max((len(c.drafts) for t in ours for c in t.cycles), default=0)
    mine = {
        "cycles": len(matched),
        "tokens": emitted,
        "tau_pooled": emitted / len(matched) if matched else None,
        "tau_pooled_uncut": 1 + sum(matched) / len(matched) if matched else None,
        "accepted_per_position": [sum(n >= k for n in matched) for k in range(1, width + 1)],
    }
    out: dict[str, Any] = {**engine.figures(), "ours": mine, "answers": len(ours)}
    if temperature == 0:
        out["answers_equal_to_ours"] = sum(
            theirs == (trace.answer_ids if isinstance(theirs, list) else _text(target, trace.answer_ids))
            for theirs, trace in zip(engine.answers, ours, strict=True)
        )
    if plain is not None:
        out["plain_tokens_per_s"] = plain.tokens / plain.seconds
        out["speedup"] = (engine.tokens / engine.seconds) / out["plain_tokens_per_s"]
        if temperature == 0:
            pairs = list(zip(engine.answers, plain.answers, strict=True))
            out["lossless"] = {
                "checked": sum(max(len(a), len(b)) for a, b in pairs),
                "identical": sum(_shared(a, b) for a, b in pairs),
            }
    return out


def table(report: dict[str, Any]) -> str:
    """One line per suite that an engine has run; empty without."""
    lines = [("engine", "suite", "τ pooled", "ours", "accepted by position", "ours", "texts", "lossless", "speed-up")]
    for suite, s in report["suites"].items():
        e = s.get("engine")
        if not e:
            continue
        check = e.get("lossless")
        lines.append(
            (
                e["name"],
                suite,
                _number(e["tau_pooled"]),
                _number(e["ours"]["tau_pooled"]),
                " ".join(map(str, e["accepted_per_position"])) or "not counted",
                " ".join(map(str, e["ours"]["accepted_per_position"])),
                f"{e['answers_equal_to_ours']}/{e['answers']}" if "answers_equal_to_ours" in e else "–",
                f"{check['identical']}/{check['checked']}" if check else "–",
                f"{e['speedup']:.2f}×" if "speedup" in e else "–",
            )
        )
    if len(lines) == 1:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _text(target: Target, ids: list[int]) -> str:
    return target.tokenizer.decode(ids, skip_special_tokens=True)


def _shared(a: list[int], b: list[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
