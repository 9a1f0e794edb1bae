"""`python -m trainer --stage sft --model qwen3-8b [--nproc 8] [key=value ...]`: check, then launch the ranks.

`python -m trainer export runs/demo --format zlab|speculators`: the drafter in a server's layout.
"""

import argparse
import logging
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

from infra.cli import main
from infra.config import find_named, load_config, save_toml
from infra.errors import ConfigError
from trainer.config import RECIPES, SftConfig
from trainer.onpolicy.config import OnPolicyConfig
from trainer.rl_config import RlConfig

STAGES: dict[str, tuple[str, type[SftConfig]]] = {
    "sft": ("trainer.sft", SftConfig),
    "rl": ("trainer.rl", RlConfig),
    "rl-onpolicy": ("trainer.onpolicy.stage", OnPolicyConfig),
}


def parse(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m trainer", description="Train a drafter from a feature store.")
    p.add_argument("--stage", default="sft", help="sft | rl | rl-onpolicy")
    p.add_argument("--model", default="", help="target: a name in features/targets or a TOML file")
    p.add_argument("--recipe", default="", help="a name in trainer/recipes or a TOML file (default: the stage's)")
    p.add_argument("--init", default="", help="run or checkpoint to fine-tune (drafter.start_from)")
    p.add_argument("--nproc", default="auto", help="ranks on this machine: a number, or auto (one per GPU; 1 on a CPU)")
    p.add_argument("--nodes", type=int, default=1, help="machines; each runs this same command (--launcher torchrun)")
    p.add_argument("--rendezvous", default="", metavar="HOST:PORT", help="on the first of several nodes")
    p.add_argument("--peer-timeout", type=float, default=60.0, metavar="S", help="silence after which a node is lost")
    p.add_argument("--launcher", choices=["torchrun", "ray"], default="torchrun", help="ray: Ray Train at $RAY_ADDRESS")
    p.add_argument("--cpu", action="store_true", help="--launcher ray: ranks without GPUs")
    p.add_argument("--allow-changed", default="", metavar="KEYS", help="resume although these settings changed (a,b.c)")
    p.add_argument("overrides", nargs="*", help="dotted overrides, train.steps=50")
    return p.parse_intermixed_args(argv)  # options may follow overrides


def launch(argv: list[str]) -> int:
    if argv[:1] == ["export"]:
        from trainer.export import main as export

        return export(argv[1:])
    args = parse(argv)
    if args.stage not in STAGES:
        raise ConfigError(f"unknown STAGE {args.stage!r}; stages are {', '.join(STAGES)}")
    overrides = list(args.overrides)
    if args.model:
        overrides.insert(0, f'model="{args.model}"')
    if args.init:
        from eval.session import checkpoint_folder

        overrides.append(f'drafter.start_from="{checkpoint_folder(args.init)}"')
    module, config = STAGES[args.stage]
    cfg = load_config(config, find_named(RECIPES, args.recipe or args.stage, "recipe"), overrides)
    from features.target_config import load_target_config

    load_target_config(cfg.model)  # an unknown model ends here, in one sentence and not once per rank
    if args.nodes > 1 and args.launcher == "torchrun" and not args.rendezvous:
        raise ConfigError("--nodes needs --rendezvous HOST:PORT, the first node's address; add it on every node")
    if args.rendezvous and not re.fullmatch(r".+:\d+", args.rendezvous):
        raise ConfigError(f"--rendezvous {args.rendezvous!r} is not HOST:PORT; write for example worker-1:29500")
    nproc = _nproc(args.nproc)
    if args.launcher == "ray":
        from trainer.ray_launch import launch_ray

        allowed = tuple(args.allow_changed.split(","))
        return launch_ray(module, cfg, args.nodes * nproc, cpu=args.cpu, allow_changed=allowed)
    with tempfile.NamedTemporaryFile("w", suffix=".toml", prefix="flashdraft-", delete=False) as f:
        path = f.name
    save_toml(cfg, path)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    worker = ["-m", module, path, *(["--allow-changed", args.allow_changed] if args.allow_changed else [])]
    where = ["--standalone"]
    if args.rendezvous:
        where = [f"--nnodes={args.nodes}", "--rdzv_backend=c10d", f"--rdzv_endpoint={args.rendezvous}"]
        where += [f"--rdzv_id={cfg.run_name}"]
    ranks = [*where, f"--nproc_per_node={nproc}", "--shutdown_timeout=600", *worker]
    if args.nodes == 1:
        return torchrun(ranks)
    from trainer.machines import PeerWatch

    watch = PeerWatch(args.rendezvous, cfg.run_name, args.peer_timeout, socket.gethostname())
    code = torchrun(ranks)
    watch.leave(finished=code == 0)
    return code


def torchrun(args: list[str]) -> int:
    """What the command `torchrun` does, without its report when a rank fails: that rank has said why."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(args))
    except ChildFailedError as e:
        codes = [f.exitcode for f in e.failures.values()]
        return next((c for c in codes if c > 0), 1)
    except SignalException:
        return 0  # the ranks have finished their step, saved and ended
    return 0


def _nproc(text: str) -> int:
    if text == "auto":
        import torch

        return max(torch.cuda.device_count(), 1)
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--nproc {text!r} is not a positive number; give one, or auto")
    return int(text)


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main(lambda: launch(sys.argv[1:]))
