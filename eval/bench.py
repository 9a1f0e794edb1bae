"""`make bench PART=replay`: tokens per second whose acceptance is known, by replay and by live decoding of a text.

Replay gives τ for every verify length at once; live decoding for one. Both run on the same machine in the same process,
taking turns, on the target's greedy answers; the best of the repeats counts.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

from eval.decode import DecodeSettings, Trace, decode, plain_decode
from eval.metrics import Cycles
from eval.prompts import Prompt
from eval.proposer import DrafterProposer
from eval.replay import Text, replay
from eval.session import Renderer, checkpoint_folder
from features.target import Target, load_target
from features.target_config import load_target_config
from infra.cli import main
from infra.provenance import provenance, write_json
from trainer.drafter.checkpoint import load_drafter
from trainer.drafter.config import DrafterConfig
from trainer.drafter.init import init_random
from trainer.drafter.model import Drafter

QUESTIONS = (
    "Explain how a bicycle stays upright.",
    "Write a Python function that returns the prime factors of a number.",
    "A farmer has 17 sheep and buys 8 more, then sells 5. How many are left? Explain each step.",
    "List ten things to do on a rainy day.",
)


def bench(model: str, drafter_path: str, tokens: int, prompts: int, repeats: int, device: str) -> list[dict]:
    target = load_target(load_target_config(model), device)
    drafter = load_drafter(checkpoint_folder(drafter_path)) if drafter_path else untrained(target)
    drafter.to(device=target.device, dtype=target.dtype)
    proposer, head = DrafterProposer(drafter, target.frozen_head()), target.frozen_head()
    renderer = Renderer(target, None)
    ids = [renderer.prompt_ids(Prompt("", turns=(QUESTIONS[i % len(QUESTIONS)],)), 0, []) for i in range(prompts)]
    settings = DecodeSettings(max_new_tokens=tokens)
    traces = plain_decode(target, ids, settings)
    texts = [features(target, t) for t in traces]
    count = sum(len(t.answer_ids) - 1 for t in traces)
    batched = DecodeSettings(max_new_tokens=tokens, batch_size=prompts)
    lengths = range(2, drafter.config.block_size + 1)
    ways = {
        "replay": lambda: replay(drafter, head, texts, verify_lengths=lengths),
        "replay with one pass of the target": lambda: replay(
            drafter, head, [features(target, t) for t in traces], verify_lengths=lengths
        ),
        "live": lambda: decode(target, proposer, ids, settings),
        "live, every verify length": lambda: [
            decode(target, proposer, ids, dataclasses.replace(settings, verify_length=b)) for b in lengths
        ],
        f"live, batch {prompts}": lambda: decode(target, proposer, ids, batched),
    }
    best, last = dict.fromkeys(ways, float("inf")), {}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            last[name] = way()
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            best[name] = min(best[name], time.perf_counter() - began)
    live = Cycles.concat([Cycles.of_trace(t) for t in last["live"]])
    replayed = Cycles.concat(last["replay"][drafter.config.block_size])
    same = live.start.tolist() == replayed.start.tolist()
    rows = []
    for ours in list(ways)[:2]:
        for opponent in list(ways)[2:]:
            rows.append(
                {
                    "what": f"τ of {count} tokens by {ours} ({model}, K = {drafter.config.block_size})",
                    "unit": "tokens/s",
                    "ours": count / best[ours],
                    "opponent": count / best[opponent],
                    "opponent_name": opponent,
                    "ratio": best[opponent] / best[ours],
                    "same_cycles": same,
                    "tau_pooled": float(live.emitted.mean()),
                }
            )
    return rows


def features(target: Target, trace: Trace) -> Text:
    ids = torch.tensor(trace.text_ids, device=target.device)
    hidden = target.forward(ids[None, :-1], logits="none").hidden_BSLD[0]
    return Text(ids, hidden, ((len(trace.prompt_ids), len(ids)),))


def untrained(target: Target) -> Drafter:
    """Three random layers: the slowest case of live decoding (τ near 1), the fastest of the head in replay."""
    cfg = target.config
    shape = DrafterConfig.for_target(
        target.text_config,
        block_size=cfg.block_size,
        mask_token_id=cfg.mask_token_id,
        target_layer_ids=cfg.tap_layer_ids,
        num_hidden_layers=3,
    )
    drafter = Drafter(shape)
    init_random(drafter)
    return drafter.eval()


def run(argv: list[str]) -> None:
    p = argparse.ArgumentParser(prog="python -m eval.bench")
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--drafter", default="", help="run or checkpoint folder; default: three random layers")
    p.add_argument("--tokens", type=int, default=96, help="per answer")
    p.add_argument("--prompts", type=int, default=4)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", default="runs/bench/replay.json")
    args = p.parse_args(argv)
    rows = bench(args.model, args.drafter, args.tokens, args.prompts, args.repeats, args.device)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, rows)
    write_json(out.with_suffix(".provenance.json"), provenance())


if __name__ == "__main__":
    main(lambda: run(sys.argv[1:]))
