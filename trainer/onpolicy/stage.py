"""Stage `rl-onpolicy`: decode with the real target, train on what it said, in rounds (docs/rl.md).

Where a block of a batch was really drafted and verified, forward KL at the accepted positions and reverse KL at the
rejected ones come to the closed-form objective, which every block has.

Legend: A blocks, K block size, T kept tokens of the target.
"""

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from features.stream import AnchorBatch
from infra.cli import main
from kernels.acceptance_loss import Drafted
from trainer.engine import World
from trainer.loop import Parts, Stage, fit, run_stage, stream_config
from trainer.onpolicy.config import OnPolicyConfig, RolloutConfig
from trainer.onpolicy.rollouts import Rollouts, RolloutStream
from trainer.rl import RlObjective, check_text, load_reference
from trainer.rl_config import RlSection


def train(cfg: OnPolicyConfig, world: World, *, allow_changed: Collection[str] = ()) -> Path:
    """Fine-tune and return the folder of the best drafter.

    Raises:
        ResourceError: Ray does not answer, or every rollout actor has died. Besides what `trainer.rl.train` raises.
    """
    made: list[Rollouts] = []
    try:
        return fit(cfg, world, lambda parts: stage(cfg, parts, made), allow_changed=allow_changed)
    finally:
        for rollouts in made:
            rollouts.close()


def stage(cfg: OnPolicyConfig, parts: Parts, made: list[Rollouts]) -> Stage:
    check_text(parts.store, cfg.rl, vocabulary=len(parts.head.head_VD))
    reference = load_reference(cfg, parts) if cfg.rl.kl else None
    rollouts = Rollouts(cfg, parts.store, parts.world, parts.run.path, cfg.train.steps or 0)
    made.append(rollouts)
    blocks = stream_config(cfg, parts.drafter.config.block_size, cfg.rl.visited_share)
    return Stage(
        OnPolicyObjective(cfg, parts, reference, rollouts),
        refreshed=(rollouts,),
        stream=lambda step: RolloutStream(rollouts, blocks, parts.world, step),
        patience=cfg.rl.patience,
    )


class OnPolicyObjective(RlObjective):
    """The closed form, and the divergences from the target behind verified drafts."""

    def __init__(self, cfg: OnPolicyConfig, parts: Parts, reference, rollouts: Rollouts):
        super().__init__(cfg, parts, reference, None, None)
        self.rollouts, self.settings = rollouts, cfg.rollout
        self.recorded = 0

    def drafted(self, batch: AnchorBatch) -> Drafted | None:
        r, K = self.settings, self.drafter.block_size
        A = len(batch.anchor_valid_A)
        ids_AKT = np.zeros((A, K, r.top_k), np.int64)
        ids_AKT[:] = np.arange(r.top_k)  # distinct at slots without a record, where all weights are 0
        logprobs_AKT = np.full((A, K, r.top_k), -np.inf, np.float32)
        forward_AK, reverse_AK = np.zeros((A, K), np.float32), np.zeros((A, K), np.float32)
        decay_K = r.reverse_decay ** np.maximum(np.arange(K) - 1, 0)
        cycles = self.rollouts.part(*self.rollouts.source(batch.step)).cycles
        at, documents = batch.anchor_position_A.tolist(), batch.anchor_document_A.tolist()
        for a, (d, start) in enumerate(zip(documents, at, strict=True)):
            cycle = cycles.get((batch.documents[d], start)) if d >= 0 else None
            if cycle is None:
                continue
            n = len(cycle["drafts"])
            ids_AKT[a, 1 : n + 1] = np.reshape(cycle["topk_ids"], (n, -1))
            logprobs_AKT[a, 1 : n + 1] = np.reshape(cycle["topk_logprobs"], (n, -1))
            accepted = min(cycle["accepted"], n)
            forward_AK[a, 1 : accepted + 1] = r.forward_weight / (K - 1)
            reverse_AK[a, accepted + 1 : n + 1] = (r.reverse_weight * decay_K / (K - 1))[accepted + 1 : n + 1]
            self.recorded += 1
        device = batch.labels_AK.device
        tensors = (torch.from_numpy(x).to(device) for x in (ids_AKT, logprobs_AKT, forward_AK, reverse_AK))
        return Drafted(*tensors)

    def metrics(self) -> dict[str, float]:
        out = super().metrics() | {"recorded_blocks": float(self.recorded)}
        self.recorded = 0
        taus = [(key, p.tau) for key, p in self.rollouts.parts.items()]
        if taus:
            newest = max(key[0] for key, _ in taus)
            out["rollout_tau"] = float(np.mean([tau for key, tau in taus if key[0] == newest]))
        return out


def for_study(shared: dict[str, Any], rl: RlSection) -> OnPolicyConfig:
    """A row of `trainer.study`: rounds of a fifth of its steps."""
    batch, steps = shared["data"].global_batch, shared["train"].steps
    rollout = RolloutConfig(
        steps_per_round=max(steps // 5, 1), prompts_per_round=8 * batch, parts=2, batch_size=32, max_new_tokens=200
    )
    return OnPolicyConfig(rl=rl, rollout=rollout, **shared)


if __name__ == "__main__":
    main(lambda: run_stage(OnPolicyConfig, train, sys.argv[1:]))
