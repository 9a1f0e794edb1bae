"""`python -m trainer --launcher ray`: the stages' own loop under Ray Train, where KubeRay and Ray Jobs run it.

Ray Train places the ranks and describes them in the environment as torchrun does (RANK, WORLD_SIZE, MASTER_ADDR);
DeepSpeed joins the process group that is there. A lost node ends the attempt; the next one goes on from the last
checkpoint of the run's folder, which every node must see.
"""

import importlib
import os
from pathlib import Path
from typing import Any

from infra import errors
from infra.errors import FlashdraftError, TrainingError
from trainer.config import SftConfig

BETWEEN_NODES_S = 600.0  # ranks wait for one another at most so long when they form the group


def launch_ray(
    module: str, cfg: SftConfig, ranks: int, *, cpu: bool, allow_changed: tuple[str, ...], retries: int = 3
) -> int:
    """Train on `ranks` workers of the cluster at $RAY_ADDRESS (without it, of this machine).

    Args:
        module: of the stage, with a function `train(cfg, world, *, allow_changed)`.
        cpu: ranks without GPUs; otherwise each has one, and the launch waits until the cluster has so many.
        retries: further attempts after a worker or its node was lost.

    Raises:
        FlashdraftError: what the stage raised on a rank; these are not tried again.
        TrainingError: workers were lost more than `retries` times.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    cwd = Path.cwd()
    outcome = cwd / "runs" / cfg.run_name / "ray"
    outcome.mkdir(parents=True, exist_ok=True)
    refusal = outcome / "refusal"
    refusal.unlink(missing_ok=True)
    if not ray.is_initialized():
        ray.init(log_to_driver=True)
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={
            "module": module,
            "cfg": cfg,
            "cwd": str(cwd),
            "allow_changed": allow_changed,
            "refusal": str(refusal),
        },
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=not cpu),
        torch_config=TorchConfig(backend="gloo" if cpu else "nccl", timeout_s=int(BETWEEN_NODES_S)),
        run_config=RunConfig(
            name="attempts", storage_path=str(outcome), failure_config=FailureConfig(max_failures=retries)
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as e:
        first = " ".join(str(e).split())[:600]
        raise TrainingError(
            f"the ranks of {cfg.run_name} were lost {retries + 1} times ({first}); look at the nodes, then give the "
            "same command again: it goes on from the last checkpoint"
        ) from None
    if refusal.is_file():
        kind, _, sentence = refusal.read_text().partition("\n")
        raise getattr(errors, kind, FlashdraftError)(sentence)
    return 0


def run_rank(config: dict[str, Any]) -> None:
    """One rank. What the user must mend is written down instead of raised: Ray would try it again."""
    os.chdir(config["cwd"])
    from trainer.engine import init_world

    world = init_world(BETWEEN_NODES_S)
    try:
        stage = importlib.import_module(config["module"])
        stage.train(config["cfg"], world, allow_changed=config["allow_changed"])
    except FlashdraftError as e:
        Path(config["refusal"]).write_text(f"{type(e).__name__}\n{e}")  # every rank finds the same
