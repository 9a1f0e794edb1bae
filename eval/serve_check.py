"""`make serve-check`: what others make of an exported drafter, against their own plain decoding and our own loop.

Exports the drafter of a run in both layouts (z-lab's and speculators'), serves each with its target in vLLM (built
once, `eval.engines_env`), and demands in fp32, one request at a time: the emitted tokens equal vLLM's plain decoding
and ours, accepted drafts per position equal our live decoding's, mean acceptance length within 1 %. The authors' own
loop (`dflash` on PyPI) decodes the same prompts and must make the same answers in the same cycles.
Writes <run>/serve-check.json.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from eval import engines_env
from eval.config import EvalConfig
from eval.decode import DecodeSettings, decode
from eval.engines import Sampling, run_vllm
from eval.engines_measure import check_engine, compare, table
from eval.peer import Agreement, agreement, authors_generate
from eval.prompts import HELDOUT
from eval.session import (
    Renderer,
    checkpoint_folder,
    load_drafters,
    load_matching_target,
    load_suites,
    newest_run,
    open_store,
)
from features.target_source import target_folder
from infra.cli import main as run_command
from infra.config import read_toml
from infra.errors import EngineError
from infra.provenance import provenance, write_json
from trainer.drafter import peers

LAYOUTS = ("zlab", "speculators")
TOLERANCE = 0.01
"""of the mean acceptance length"""


def serve_check(run: Path, cfg: EvalConfig) -> tuple[dict[str, Any], Agreement]:
    """Layout -> figures, as under `suites.<name>.engine` of a report (docs/evaluation.md); and the authors' loop.

    Raises:
        EngineError, ResourceError: vLLM or dflash fails or cannot be installed.
    """
    target = load_matching_target(cfg, {"drafter": checkpoint_folder(run)})
    drafter = load_drafters(cfg, target, {"drafter": checkpoint_folder(run)})["drafter"]
    check_engine(cfg, drafter)
    (suite,) = load_suites(cfg, open_store(cfg, target) if HELDOUT in cfg.suites else None)
    renderer = Renderer(target, cfg.thinking)
    prompts = [renderer.prompt_ids(p, 0, []) for p in suite.prompts]
    ours = decode(target, drafter.proposer, prompts, DecodeSettings(max_new_tokens=cfg.max_new_tokens))
    sampling = Sampling(cfg.max_new_tokens, 0.0, 0, tuple(sorted(target.stop_ids)), concurrency=1)
    folder, k = target_folder(target.config), drafter.model.config.block_size - 1
    plain, version = run_vllm(folder, None, 0, {"s": prompts}, sampling, "float32")
    out, authors = {}, None
    with tempfile.TemporaryDirectory(prefix="flashdraft-serve-") as tmp:
        for layout in LAYOUTS:
            exported = Path(tmp) / layout
            _export(run, layout, exported)
            drafted, _ = run_vllm(folder, exported, k, {"s": prompts}, sampling, "float32")
            out[layout] = {"name": f"{version}, {layout}", **compare(drafted["s"], ours, target, plain["s"], 0.0)}
            if layout == "zlab":  # the authors' own
                theirs = authors_generate(folder, exported, prompts, sampling.max_new_tokens, target.stop_ids)
                authors = agreement(ours, theirs, sampling.max_new_tokens, k + 1)
    assert authors is not None
    return out, authors


def verdict(figures: dict[str, Any]) -> list[str]:
    """What is not as it must be, in words; empty where all is."""
    ours, check, wrong = figures["ours"], figures["lossless"], []
    if check["identical"] != check["checked"]:
        wrong.append(f"{check['checked'] - check['identical']} of {check['checked']} tokens differ from plain decoding")
    if figures["answers_equal_to_ours"] != figures["answers"]:
        wrong.append(f"{figures['answers'] - figures['answers_equal_to_ours']} answers differ from ours")
    if figures["accepted_per_position"] != ours["accepted_per_position"]:
        wrong.append(f"accepted {figures['accepted_per_position']}, ours {ours['accepted_per_position']}")
    if not ours["cycles"] or abs(figures["tau_pooled"] / ours["tau_pooled"] - 1) > TOLERANCE:
        wrong.append(f"acceptance length {figures['tau_pooled']}, ours {ours['tau_pooled']}")
    return wrong


def _export(run: Path, layout: str, out: Path) -> None:
    command = [sys.executable, "-m", "trainer", "export", str(run), "--format", layout, "--out", str(out)]
    done = subprocess.run([*command, "--dtype", "float32"], capture_output=True, text=True)
    if done.returncode:
        raise EngineError(f"the drafter of {run} could not be exported for vLLM ({done.stderr.strip()[-400:]})")


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m eval.serve_check", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--run", default="", help="run folder; default: the newest of the model")
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--suite", default=HELDOUT, help="name, file of prompts, or heldout")
    p.add_argument("--store", default="", help="feature store of the suite heldout")
    p.add_argument("--limit", type=int, default=8, help="prompts")
    p.add_argument("--max-new-tokens", type=int, default=64)
    args = p.parse_args(argv)
    print(f"vLLM in {engines_env.folder()}", flush=True)
    engines_env.install()
    peers.install("dflash")
    run = Path(args.run) if args.run else newest_run(args.model)
    recipe = run / "config.toml"
    cfg = EvalConfig(
        model=read_toml(recipe)["model"] if recipe.is_file() else args.model, drafter=str(run), suites=(args.suite,),
        store=args.store, limit=args.limit, max_new_tokens=args.max_new_tokens, engine="vllm", dtype="float32",
    )  # fmt: skip
    layouts, authors = serve_check(run, cfg)
    print(table({"suites": {f"{args.suite} ({layout})": {"engine": f} for layout, f in layouts.items()}}))
    wrong = {layout: verdict(figures) for layout, figures in layouts.items()}
    print(
        f"dflash {authors.equal_answers}/{authors.answers} answers and {authors.equal_cycles}/{authors.cycles} cycles "
        f"as ours, τ {authors.tau_theirs} against {authors.tau_ours}"
    )
    record = {"layouts": layouts, "authors_loop": dataclasses.asdict(authors), "wrong": wrong}
    write_json(run / "serve-check.json", {**record, "provenance": provenance()})
    for layout, sentences in wrong.items():
        if sentences:
            print(f"flashdraft: {layout} in vLLM: {'; '.join(sentences)}", file=sys.stderr)
    if not authors.whole:
        print(f"flashdraft: the authors' loop decodes otherwise: {authors}", file=sys.stderr)
    print(f"written to {run / 'serve-check.json'}")
    return int(any(wrong.values()) or not authors.whole)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
