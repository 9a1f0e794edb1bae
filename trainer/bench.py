"""`make bench PART=trainer`: what the engine, the data, the losses, the replay and a checkpoint add to a bare step.

The bare step is forward, loss, backward, clipping and torch's AdamW on batches in memory; all variants train the same
drafter on the same blocks (hidden size 256, three layers, blocks of 16, 64 blocks in 512 tokens, vocabulary 8192, fp32)
in one process, taking turns; medians. The store is synthetic. Writes runs/bench/trainer.json, where ratio = bare / with
(0.91 is an overhead of 10 %) or limit / share.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from features.document import DocumentFeatures
from features.plan import DOCUMENT_SCHEMA, corpus_digest, document_id, make_plan
from features.reader import FeatureStore
from features.spec import FeatureSpec
from features.stream import AnchorBatch, AnchorStream
from features.target import FrozenHead
from features.writer import create_store
from infra.cli import main as run_command
from infra.provenance import write_json
from trainer import checkpoint
from trainer.config import SftConfig, TrainConfig
from trainer.drafter.config import DrafterConfig
from trainer.drafter.init import init_random
from trainer.drafter.model import Drafter
from trainer.engine import World, build_engine, build_optimizer, init_world
from trainer.heldout import heldout_rows, replay_heldout
from trainer.loop import Parts, stream_config
from trainer.objective import Objective
from trainer.rl import RlObjective
from trainer.rl_config import RlConfig

FULL = {"S": 512, "A": 64, "V": 8192, "D": 256, "K": 16, "layers": 3, "train": 24, "heldout": 8}
TINY = {"S": 64, "A": 4, "V": 512, "D": 64, "K": 8, "layers": 1, "train": 4, "heldout": 2}
TAPS = (1, 5, 9, 13, 17)


def synthetic_store(folder: str, n: dict[str, int]) -> str:
    """A store of random documents with random features and a random teacher; returns its URI."""
    rng, rows = np.random.default_rng(0), {}
    for i in range(n["train"] + n["heldout"]):
        ids = rng.integers(0, n["V"] - 1, n["S"]).astype(np.int32)
        mask = np.ones(n["S"], np.uint8)
        mask[:16] = 0
        split = "train" if i < n["train"] else "heldout"
        rows[document_id(ids, mask)] = (ids, mask, "random", split, 16)
    columns = zip(*((d, i.tolist(), m.tolist(), *rest) for d, (i, m, *rest) in rows.items()), strict=True)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, DOCUMENT_SCHEMA, strict=True)]
    documents = pa.Table.from_arrays(arrays, schema=DOCUMENT_SCHEMA)
    spec = FeatureSpec(
        target="synthetic", source_repo="none", source_revision="none", weights_digest="none", tokenizer_digest="none",
        chat_template_digest="none", tap_layer_ids=TAPS, hidden_size=n["D"], max_length=n["S"],
        corpus_digest=corpus_digest(documents), shard_tokens=4 * n["S"], top_k=32,
    )  # fmt: skip
    writer = create_store(folder, spec, make_plan(documents, spec.shard_tokens))
    g = torch.Generator().manual_seed(0)
    for shard in writer.missing_shards():
        features = []
        for document in writer.shard_plan(shard)["document"].to_pylist():
            ids, mask, *_ = rows[document]
            logprobs = np.log(np.linspace(0.4, 0.001, 32, dtype=np.float32) / 7)
            features.append(
                DocumentFeatures(
                    document, ids, mask, torch.randn(n["S"], len(TAPS), n["D"], generator=g).bfloat16(),
                    np.full(n["S"], -1, np.float32), rng.integers(0, n["V"], (n["S"], 32)).astype(np.int32),
                    np.tile(logprobs, (n["S"], 1)).astype(np.float16),
                )
            )  # fmt: skip
        writer.write_shard(shard, features)
    writer.finish()
    return writer.uri


def recipe(n: dict[str, int], **loss: Any) -> SftConfig:
    return SftConfig.model_validate(
        {
            "model": "synthetic",
            "data": {"global_batch": 1, "anchors_per_document": n["A"], "shape": "trimmed"},
            "engine": {"dtype": "fp32", "zero_stage": 1},
            "loss": loss,
        }
    )


def new_drafter(n: dict[str, int]) -> Drafter:
    drafter = Drafter(
        DrafterConfig(
            vocab_size=n["V"], hidden_size=n["D"], intermediate_size=3 * n["D"], num_hidden_layers=n["layers"],
            num_attention_heads=8, num_key_value_heads=8, head_dim=n["D"] // 8, block_size=n["K"],
            mask_token_id=n["V"] - 1, target_layer_ids=TAPS, num_target_layers=20,
        )
    )  # fmt: skip
    init_random(drafter, 0)
    return drafter


def torch_step(
    cfg: SftConfig, drafter: Drafter, objective: Any, batches: Iterator[AnchorBatch], head: FrozenHead
) -> Callable[[], None]:
    optimizer = build_optimizer(drafter, cfg.optim, torch.device("cpu"))

    def step() -> None:
        batch = next(batches)
        (objective(drafter, batch, head).numerator / objective.denominator(batch)).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), cfg.optim.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bare_step(n: dict[str, int], batches: Iterator[AnchorBatch], head: FrozenHead, **loss: Any) -> Callable[[], None]:
    cfg, drafter = recipe(n, **loss), new_drafter(n)
    return torch_step(cfg, drafter, Objective(cfg.loss, drafter.config), batches, head)


def rl_step(
    n: dict[str, int], batches: Iterator[AnchorBatch], head: FrozenHead, store: FeatureStore, world: World, **rl: Any
) -> Callable[[], None]:
    """As `bare_step` with the RL objective in the middle of its schedules (draft temperature 0.75)."""
    data = recipe(n).model_dump(exclude={"stage"}) | {"drafter": {"start_from": "."}, "rl": {"visited_share": 0.0} | rl}
    cfg, drafter = RlConfig.model_validate(data), new_drafter(n)
    objective = RlObjective(cfg, Parts(None, store, head, drafter, world), None, None, None)  # type: ignore[arg-type]
    objective.begin(1, 3)
    return torch_step(cfg, drafter, objective, batches, head)


def engine_step(engine: Any, n: dict[str, int], batches: Iterator[AnchorBatch], head: FrozenHead) -> Callable[[], None]:
    objective = Objective(recipe(n).loss, engine.module.config)

    def step() -> None:
        batch = next(batches)
        engine.backward(objective(engine, batch, head).numerator / objective.denominator(batch))
        engine.step()

    return step


def measure(n: dict[str, int], rounds: int, world: World, folder: Path) -> list[dict[str, Any]]:
    store = FeatureStore.open(synthetic_store(str(folder / "store"), n))
    g = torch.Generator().manual_seed(1)
    embedding, head_VD = (torch.randn(n["V"], n["D"], generator=g) * s for s in (0.02, n["D"] ** -0.5))
    head = FrozenHead(embedding, head_VD)
    stream = AnchorStream(store, stream_config(recipe(n), n["K"]))
    live = iter(stream)
    ready = list(itertools.islice(live, n["train"]))
    ahead = AnchorStream(store, stream_config(recipe(n), n["K"], lookahead=n["K"]))
    ready_ahead = list(itertools.islice(ahead, n["train"]))
    drafter = new_drafter(n)
    engine = build_engine(drafter, recipe(n), world)
    variants = {
        "bare": bare_step(n, itertools.cycle(ready), head),
        "engine": engine_step(engine, n, itertools.cycle(ready), head),
        "engine and data": engine_step(engine, n, live, head),
        "soft labels": bare_step(n, itertools.cycle(ready), head, soft_share=0.5),
        "D-PACE": bare_step(n, itertools.cycle(ready), head, weighting="dpace"),
        "RL": rl_step(n, itertools.cycle(ready), head, store, world),
        "RL, half of the blocks followed": rl_step(
            n, itertools.cycle(ready_ahead), head, store, world, follow_share=0.5
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    waited, names = 0.0, list(variants)
    for turn in range(rounds + 1):  # the first is not counted
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before, began = stream.data_wait_s, time.perf_counter()
            variants[name]()
            if turn:
                seconds[name].append(time.perf_counter() - began)
                waited += stream.data_wait_s - before
    best = {name: statistics.median(s) for name, s in seconds.items()}
    bare = best["bare"]
    rows = [
        row(f"a step with {name}", "s", value, bare, "bare step of torch")
        for name, value in best.items()
        if name != "bare"
    ]
    rows.append(
        row("waiting for data, share of the step", "1", waited / sum(seconds["engine and data"]), 0.05, "limit")
    )
    heldout = heldout_rows(store, n["heldout"])
    began = time.perf_counter()
    replay_heldout(engine, store, heldout, head, world)
    per_document = (time.perf_counter() - began) / len(heldout)
    default = TrainConfig()
    # at the defaults of the recipe sft: 64 documents a step, 64 held-out ones every 500 steps
    added = per_document * default.eval_documents / (default.eval_every * SftConfig().data.global_batch * bare)
    rows.append(row("replay of held-out documents, share of training", "1", added, 0.02, "limit"))
    for name, background in (("stall of a checkpoint", True), ("a checkpoint that training waits for", False)):
        saver, stalls = checkpoint.Saver(folder / "run", world, keep=2, background=background), []
        for i in range(5):
            began = time.perf_counter()
            saver.save(engine, {"step": i})
            stalls.append(time.perf_counter() - began)
            saver.wait()
        rows.append(row(name, "s", statistics.median(stalls), bare, "bare step of one document"))
    return rows


def row(what: str, unit: str, ours: float, opponent: float, name: str) -> dict[str, Any]:
    return {
        "what": what, "unit": unit, "ours": ours, "opponent": opponent, "opponent_name": name,
        "ratio": opponent / max(ours, 1e-12),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m trainer.bench", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--tiny", action="store_true", help="a smoke test of seconds; its figures mean nothing")
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--out", default="runs/bench/trainer.json")
    args = p.parse_args(argv)
    world = init_world()
    with tempfile.TemporaryDirectory() as tmp:
        rows = measure(TINY if args.tiny else FULL, 2 if args.tiny else args.rounds, world, Path(tmp))
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, rows)
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
