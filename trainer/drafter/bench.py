"""`make bench PART=train-step`: forward, backward and AdamW of one training step, ours against the peers' from PyPI.

All sides get the same drafter weights, features, anchors and optimizer (AdamW, fused); each runs in a process of its
own with its own packages and pinned threads. Memory is the peak resident set above the state before the first step.
Installs the peers where absent (`trainer.drafter.peers`). Writes runs/bench/train-step.json.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from infra.cli import main as run_command
from trainer.drafter import peers
from trainer.drafter.config import DrafterConfig
from trainer.drafter.init import init_random
from trainer.drafter.model import Drafter

# context rows, anchors, vocabulary, repeats, what is reported
CASES = {
    "S 512, 64 anchors, V 8192": (512, 64, 8192, 7, ("seconds",)),
    "S 3072, 512 anchors, V 8192": (3072, 512, 8192, 2, ("seconds",)),
    "S 3072, 512 anchors, V 49152": (3072, 512, 49152, 1, ("peak_bytes",)),
}
TINY = {"S 96, 4 anchors, V 512": (96, 4, 512, 2, ("seconds", "peak_bytes"))}
OPPONENTS = ("speculators", "specforge")


def write_case(path: Path, S: int, A: int, V: int, repeats: int) -> None:
    cfg = DrafterConfig(
        vocab_size=V,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        block_size=16,
        mask_token_id=V - 1,
        target_layer_ids=(1, 5, 9, 13, 17),
        num_target_layers=20,
    )
    g = torch.Generator().manual_seed(0)
    drafter = Drafter(cfg)
    init_random(drafter)
    data = {f"w.{k}": v for k, v in drafter.state_dict().items()}
    data["hidden"] = torch.randn(S, 5 * 256, generator=g)
    data["ids"] = torch.randint(0, V - 1, (S,), generator=g)
    data["loss_mask"] = torch.ones(S, dtype=torch.int64)
    data["anchors"] = torch.randperm(S - 16, generator=g)[:A].sort().values
    data["embedding"] = torch.randn(V, 256, generator=g) * 0.02
    data["head"] = torch.randn(V, 256, generator=g) * 256**-0.5
    options = {"config": cfg.to_zlab_json("float32"), "gamma": 7.0, "repeats": repeats}
    save_file({k: v.detach().contiguous() for k, v in data.items()}, path, metadata={"json": json.dumps(options)})


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tiny", action="store_true", help="a smoke test of seconds; its figures mean nothing")
    p.add_argument("--threads", type=int, default=1, help="CPU threads of every process")
    p.add_argument("--out", default="runs/bench/train-step.json")
    p.add_argument("--opponents", default=",".join(OPPONENTS))
    args = p.parse_args(argv)
    opponents = args.opponents.split(",")
    for name in opponents:
        peers.install(name)
    rows = []
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp) / "case.safetensors"
        for what, (S, A, V, repeats, measures) in (TINY if args.tiny else CASES).items():
            write_case(path, S, A, V, repeats)
            sides = {
                name: json.loads(peers.run(name, "timing", str(path), "-", threads=args.threads).splitlines()[-1])
                for name in ("ours", *opponents)
            }
            for measure in measures:
                best = min(opponents, key=lambda n: sides[n][measure])
                ours, theirs = sides["ours"][measure], sides[best][measure]
                rows.append(
                    {
                        "what": f"training step, {what}{', peak memory' if measure == 'peak_bytes' else ''}",
                        "unit": "s" if measure == "seconds" else "B",
                        "ours": ours,
                        "opponent": theirs,
                        "opponent_name": f"{best} sdpa (better of {' and '.join(opponents)})",
                        "ratio": theirs / max(ours, 1e-12),
                    }
                )
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
