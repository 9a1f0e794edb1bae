"""Stage `sft`: weighted cross-entropy on the target's own answers (`trainer.loop` has the loop)."""

import sys
from collections.abc import Collection
from pathlib import Path

from infra.cli import main
from trainer.config import SftConfig
from trainer.engine import World
from trainer.loop import Stage, fit, run_stage
from trainer.objective import Objective


def train(cfg: SftConfig, world: World, *, allow_changed: Collection[str] = ()) -> Path:
    """Train and return the folder of the best drafter; raises what `trainer.loop.fit` raises."""
    return fit(
        cfg,
        world,
        lambda p: Stage(Objective(cfg.loss, p.drafter.config), patience=cfg.train.patience),
        allow_changed=allow_changed,
    )


if __name__ == "__main__":
    main(lambda: run_stage(SftConfig, train, sys.argv[1:]))
