"""Milliseconds of a draft against its length: flat for a block drafter, a staircase for an autoregressive one.

The shape of the DFlash paper's Fig. 3, for the target's dimensions on this machine, with random weights (cost does not
depend on them). The head is included: it is what a longer block really adds.

    python -m eval draft-cost --model smollm2-135m
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from eval.proposer import DrafterProposer
from features.target import FrozenHead, load_frozen_head
from features.target_config import load_target_config
from features.target_source import target_folder
from infra.provenance import provenance, write_json
from trainer.drafter.config import DrafterConfig
from trainer.drafter.init import init_random
from trainer.drafter.model import Drafter

BLOCKS = (4, 8, 16)
KINDS = {"1 layer": 1, "3 layers": 3, "5 layers": 5, "autoregressive, 1 layer": 1}


@torch.inference_mode()
def measure(
    shape: Any, head: FrozenHead, taps: tuple[int, ...], mask: int, context: int, repeats: int
) -> dict[str, Any]:
    """Kind -> block size -> median milliseconds of drafting one block behind `context` cached tokens.

    Kinds and block sizes take turns in every round; the first round is not recorded.
    """
    device, dtype = head.head_VD.device, head.head_VD.dtype
    proposers: dict[tuple[str, int], DrafterProposer] = {}
    generator = torch.Generator().manual_seed(0)
    ids_S = torch.randint(head.head_VD.shape[0], (context,), generator=generator).to(device)
    hidden_SLD = torch.randn(context, len(taps), head.head_VD.shape[1], generator=generator).to(device, dtype)
    for kind, layers in KINDS.items():
        for K in BLOCKS:
            config = DrafterConfig.for_target(
                shape,
                block_size=K,
                mask_token_id=mask,
                target_layer_ids=taps,
                num_hidden_layers=layers,
                drafting="autoregressive" if kind.startswith("auto") else "block",
            )
            drafter = Drafter(config)
            init_random(drafter)
            proposer = DrafterProposer(drafter.to(device, dtype), head)
            proposer.open(1, context)
            proposer.extend(0, 0, hidden_SLD, ids_S)
            proposers[kind, K] = proposer
    times: dict[tuple[str, int], list[float]] = {key: [] for key in proposers}
    for round_ in range(repeats + 1):
        for key, proposer in proposers.items():
            began = time.perf_counter()
            proposer.propose([0], ids_S[:1], [context]).argmax(-1).tolist()
            if round_:  # the first draft of each also fills its cache
                times[key].append(1e3 * (time.perf_counter() - began))
    return {kind: {K: statistics.median(times[kind, K]) for K in BLOCKS} for kind in KINDS}


def figure(result: dict[str, dict[int, float]], title: str) -> Figure:
    fig = Figure(figsize=(5.6, 3.8), layout="constrained")
    ax = fig.subplots()
    for kind, row in result.items():
        ax.plot(list(row), list(row.values()), "s--" if kind.startswith("auto") else "o-", label=kind)
    ax.set(xlabel="block size K (anchor and K − 1 drafts)", ylabel="ms per draft", title=title, xticks=BLOCKS)
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    return fig


def run(argv: list[str]) -> int:
    from transformers import AutoConfig

    p = argparse.ArgumentParser(prog="python -m eval draft-cost", description="draft milliseconds against block size")
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--context", type=int, default=256, help="tokens before the anchor")
    p.add_argument("--repeats", type=int, default=9)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", default="runs/draft-cost")
    args = p.parse_args(argv)
    config = load_target_config(args.model)
    shape = AutoConfig.from_pretrained(target_folder(config)).get_text_config()
    head = load_frozen_head(config, args.device)
    result = measure(shape, head, config.tap_layer_ids, config.mask_token_id, args.context, args.repeats)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{config.name}.json", {"ms": result, "context": args.context, "provenance": provenance()})
    figure(result, f"drafting for {config.name}").savefig(out / f"{config.name}.png", dpi=110)
    width = max(map(len, result))
    print(" " * width, *(f"K = {K:<6}" for K in BLOCKS))
    for kind, row in result.items():
        print(kind.ljust(width), *(f"{ms:7.2f} ms" for ms in row.values()))
    print(f"written to {out / f'{config.name}.json'}")
    return 0
