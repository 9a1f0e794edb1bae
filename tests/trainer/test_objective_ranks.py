"""The loss is one sum over all ranks, and a bad gradient is skipped by all of them."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ranks import spawn

pytestmark = pytest.mark.spawn


def config(weighting: str = "decay", zero_stage: int = 1):
    from trainer.config import SftConfig

    return SftConfig.model_validate(
        {
            "model": "tiny",
            "data": {"global_batch": 2},
            "loss": {"weighting": weighting},
            "engine": {"dtype": "fp32", "zero_stage": zero_stage},
            "optim": {"clip": 1e9},
        }
    )


def parts(store_uri: str, cfg):
    """Drafter, head and one batch of the store."""
    from features.reader import FeatureStore
    from features.stream import AnchorStream, StreamConfig
    from features.target import load_frozen_head
    from features.target_config import load_target_config
    from trainer.drafter.config import DrafterConfig
    from trainer.drafter.init import init_random
    from trainer.drafter.model import Drafter

    target = load_target_config("tiny")
    head = load_frozen_head(target)
    drafter = Drafter(
        DrafterConfig(
            vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, block_size=8, mask_token_id=259, target_layer_ids=(1, 2, 3),
            num_target_layers=6,
        )
    )  # fmt: skip
    init_random(drafter, 0)
    store = FeatureStore.open(store_uri)
    stream = AnchorStream(store, StreamConfig(block_size=8, anchors_per_document=4, global_batch=1, shape="trimmed"))
    return drafter, head, next(iter(stream))


def keep_blocks(batch, blocks: list[int], everything: list[int]):
    """The batch with supervision in some blocks only; the step's totals are those of `everything`."""

    def mask(which: list[int]) -> torch.Tensor:
        kept = torch.zeros_like(batch.supervised_AK)
        kept[which] = batch.supervised_AK[which]
        return kept

    total = mask(everything)
    return dataclasses.replace(
        batch,
        supervised_AK=mask(blocks),
        step_supervised_K=total.sum(0),
        step_blocks=int(total.any(1).sum()),
    )


def rank_gradient(world, store_uri: str, cfg, blocks_of_rank: list[list[int]]):
    """Gradients [name -> array] after one backward, and the loss summed over ranks."""
    from deepspeed.utils import safe_get_full_grad

    from trainer.engine import build_engine
    from trainer.objective import Objective

    drafter, head, batch = parts(store_uri, cfg)
    engine = build_engine(drafter, cfg, world)
    objective = Objective(cfg.loss, drafter.config)
    batch = keep_blocks(batch, blocks_of_rank[world.rank], sorted(b for blocks in blocks_of_rank for b in blocks))
    terms = objective(engine, batch, head)
    engine.backward(terms.numerator * (world.size / objective.denominator(batch)))
    loss = float(world.sum(terms.numerator[None])[0]) / objective.denominator(batch)
    return loss, {n: safe_get_full_grad(p).numpy().copy() for n, p in engine.module.named_parameters()}


def plain_gradient(store_uri: str, cfg, blocks: list[int]):
    from trainer.objective import Objective

    drafter, head, batch = parts(store_uri, cfg)
    objective = Objective(cfg.loss, drafter.config)
    batch = keep_blocks(batch, blocks, blocks)
    loss = objective(drafter, batch, head).numerator / objective.denominator(batch)
    loss.backward()
    return float(loss.detach()), {n: p.grad.numpy() for n, p in drafter.named_parameters()}


def poisoned_step(world, store_uri: str, cfg):
    """One rank's features are infinite: (applied, parameters unchanged, applied afterwards)."""
    from trainer.engine import build_engine, whole_parameters
    from trainer.objective import Objective

    drafter, head, batch = parts(store_uri, cfg)
    engine = build_engine(drafter, cfg, world)
    objective = Objective(cfg.loss, drafter.config)

    def weights() -> list[torch.Tensor]:
        with whole_parameters(engine) as module:
            return [p.detach().clone() for p in module.parameters()]

    before = weights()

    def step(b) -> bool:
        terms = objective(engine, b, head)
        engine.backward(terms.numerator * (world.size / objective.denominator(b)))
        engine.step()
        return engine.was_step_applied()

    bad = dataclasses.replace(batch, hidden_SLD=torch.full_like(batch.hidden_SLD, torch.inf))
    first = step(bad if world.rank == 1 else batch)
    same = all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
    return first, same, step(batch)


def full_disk(world, store_uri: str, folder: str):
    """Rank 0 finds the disk full: (every rank's message, names left in the checkpoint folder)."""
    import shutil
    from collections import namedtuple

    from infra.errors import ResourceError
    from trainer import checkpoint
    from trainer.engine import build_engine

    drafter, _, _ = parts(store_uri, config())
    engine = build_engine(drafter, config(), world)
    run = Path(folder)
    saver = checkpoint.Saver(run, world, 2, background=True)
    saver.save(engine, {"step": 1})
    saver.wait()
    asked = shutil.disk_usage
    if world.is_main:
        shutil.disk_usage = lambda path: namedtuple("usage", "total used free")(10, 10, 0)
    try:
        saver.save(engine, {"step": 2})
    except ResourceError as e:
        found = checkpoint.latest(run)
        return str(e), found.name, checkpoint.read_meta(found)["step"]
    finally:
        shutil.disk_usage = asked


CASES = {
    "1+3 blocks, decay": ("decay", [[0], [1, 2, 3]]),
    "1+3 blocks, D-PACE": ("dpace", [[0], [1, 2, 3]]),
    "a rank without supervision": ("decay", [[], [0, 1, 2, 3]]),
}


def everything(world, store_uri: str, folder: str):
    """All cases in one world: starting DeepSpeed takes longer than the cases."""
    gradients = {name: rank_gradient(world, store_uri, config(w), split) for name, (w, split) in CASES.items()}
    skipping = [poisoned_step(world, store_uri, config(zero_stage=z)) for z in range(4)]
    return gradients, skipping, full_disk(world, store_uri, folder)


@pytest.fixture(scope="module")
def two_ranks(tiny_store, tmp_path_factory):
    return spawn(2, everything, tiny_store, str(tmp_path_factory.mktemp("full")))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_gradient_of_one(two_ranks, tiny_store, case):
    loss, expected = plain_gradient(tiny_store, config(CASES[case][0]), [0, 1, 2, 3])
    for gradients, *_ in two_ranks:
        got_loss, got = gradients[case]
        assert got_loss == pytest.approx(loss, rel=1e-6)
        for name, g in expected.items():
            np.testing.assert_allclose(got[name], g, rtol=1e-4, atol=1e-7, err_msg=name)


def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(two_ranks):
    for _, skipping, _ in two_ranks:
        assert skipping == [(False, True, True)] * 4  # ZeRO 0 to 3


def test_a_full_disk_ends_every_rank_and_keeps_the_checkpoint_before(two_ranks):
    for _, _, (message, name, step) in two_ranks:
        assert "no room for a checkpoint" in message and "run the same command again" in message
        assert (name, step) == ("step-00000001", 1)
