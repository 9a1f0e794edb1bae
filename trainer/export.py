"""`python -m trainer export runs/demo --format zlab|speculators`: a folder that a server loads, with a card.

z-lab's layout is what SGLang and vLLM read as `method: dflash`; speculators' carries the target's embedding and head.
"""

import argparse
import json
from pathlib import Path

import torch

from features.target import load_frozen_head
from features.target_config import TargetConfig, load_target_config
from features.target_source import target_folder
from infra.config import read_toml
from infra.errors import CheckpointError
from trainer.drafter.checkpoint import load_drafter, save_drafter
from trainer.drafter.export import export_speculators
from trainer.drafter.model import Drafter


def export(run: Path, layout: str, out: Path, dtype: torch.dtype) -> Path:
    """Write the best drafter of a run in a server's layout.

    Raises:
        CheckpointError: the run has no drafter yet, or one with an ablation switch that no server can run.
    """
    folder = run / "drafter"
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"run {str(run)!r} has no drafter yet; finish its training with make train")
    drafter = load_drafter(folder, dtype=torch.float32)
    if not drafter.config.published:
        raise CheckpointError(
            f"the drafter of {str(run)!r} has conditioning {drafter.config.conditioning!r} and drafting "
            f"{drafter.config.drafting!r}, which no server runs; export one with kv_injection and block drafting"
        )
    recipe = read_toml(run / "config.toml")
    target = load_target_config(recipe["model"])
    name = getattr(target.source, "repo", target.name)
    if layout == "zlab":
        save_drafter(drafter, out, dtype=dtype)
    else:
        head = load_frozen_head(target)
        architectures = json.loads((target_folder(target) / "config.json").read_text())["architectures"]
        export_speculators(
            drafter, out, embedding_VD=head.embedding_VD, head_VD=head.head_VD, target_name=name,
            target_architectures=architectures, dtype=dtype,
        )  # fmt: skip
    (out / "README.md").write_text(card(run, recipe, target, name, drafter, layout, out))
    return out


def card(run: Path, recipe: dict, target: TargetConfig, name: str, drafter: Drafter, layout: str, out: Path) -> str:
    """What the folder is: target, features, recipe, τ per suite as far as evaluated, and the commands that serve it."""
    cfg = drafter.config
    record = json.loads((run / "provenance.json").read_text())
    parameters = sum(p.numel() for p in drafter.parameters())
    lines = [
        f"# A DFlash drafter for {name}",
        "",
        f"{cfg.num_hidden_layers} layers, {parameters / 1e6:.0f} M parameters, blocks of {cfg.block_size}, target "
        f"layers {list(cfg.target_layer_ids)}, mask token {cfg.mask_token_id}. Trained by flashdraft from features "
        f"`{record['store_fingerprint'][:12]}` (answers written by the target, chat template arguments "
        f"{target.chat_template_args or 'none'}; serve with the same).",
        "",
        "## Acceptance length",
        "",
        *_taus(run / "report.json"),
        "",
        "## Serving",
        "",
        "```bash",
        f"vllm serve {name} --speculative-config "
        f'\'{{"method": "dflash", "model": "{out}", "num_speculative_tokens": {cfg.block_size - 1}}}\'',
    ]
    if layout == "zlab":
        lines.append(
            f"python -m sglang.launch_server --model-path {name} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {out} --speculative-num-draft-tokens {cfg.block_size}"
        )
    lines += ["```", "", "## Recipe", "", "```toml", (run / "config.toml").read_text().strip(), "```", ""]
    return "\n".join(lines)


def _taus(report: Path) -> list[str]:
    if not report.is_file():
        return ["Not evaluated yet (`make eval`)."]
    suites = json.loads(report.read_text())["suites"]
    rows = ["| suite | τ pooled | τ macro | cycles |", "|---|---|---|---|"]
    rows += [f"| {n} | {s['tau_pooled']:.3f} | {s['tau_macro']:.3f} | {s['cycles']} |" for n, s in suites.items()]
    return rows


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m trainer export", description="Write a drafter in a server's layout.")
    p.add_argument("run", help="run folder, runs/demo")
    p.add_argument("--format", default="zlab", choices=["zlab", "speculators"])
    p.add_argument("--out", default="", help="default: <run>/export-<format>")
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = p.parse_args(argv)
    run = Path(args.run)
    out = Path(args.out or run / f"export-{args.format}")
    print(f"written to {export(run, args.format, out, getattr(torch, args.dtype))}")
    return 0
