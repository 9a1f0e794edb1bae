"""`make bench PART=pipeline`: prefill and regeneration against plain transformers, in one run.

    python -m pipeline.bench [model=smollm2-135m] [documents=16] [prompts=24] [new_tokens=48] [scale=8]

The sides are timed in turns (ours, opponents, ours, opponents) and the best time of each counts, so that other work on
the machine hits all. Both sides have all cores, unless OMP_NUM_THREADS says otherwise. About 7 minutes on two cores.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from features.plan import DOCUMENT_SCHEMA, document_id, make_plan
from features.target import Target, load_target
from features.writer import StoreWriter, create_store
from infra.cli import main
from infra.config import Config, apply_overrides, validate
from infra.provenance import provenance, write_json
from pipeline.config import FeaturesConfig, resolve
from pipeline.front import TargetFront
from pipeline.generate import Generator, Request
from pipeline.prefill import Prefiller, batches, default_batch_tokens, documents_of, shard_row
from pipeline.prompts import generate_prompts
from pipeline.render import Renderer
from pipeline.run import build_features, feature_spec


class BenchConfig(Config):
    model: str = "smollm2-135m"
    documents: int = 16
    """documents of 64 to 512 tokens for prefill, three times as many of 64 to 256, and four times as many of 16 to 128;
    0 leaves this part out. GSM8K, MBPP and GPTeacher with SmolLM2's answers of 64 tokens have 105 to 206 tokens."""
    prompts: int = 24
    """prompts for regeneration; 0 leaves this part out"""
    new_tokens: int = 48
    repeats: int = 2
    scale: int = 8
    """documents of the smallest corpus for the scaling through Ray, on two nodes; 0 leaves this part out"""


def run() -> int:
    bench = validate(BenchConfig, apply_overrides({}, sys.argv[1:]), "pipeline.bench")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"store_root={folder}/store", f"data_root={folder}/data", "prefill.shard_tokens=16384"]
        cfg = resolve(bench.model, "demo", overrides)
        if bench.documents or bench.prompts:
            target = load_target(cfg.target)
            longest = min(512, cfg.target.max_length)
            for times, low, high in (
                (3, longest // 8, longest // 2),
                (1, longest // 8, longest),
                (4, longest // 32, longest // 4),
            ):
                table = random_documents(times * bench.documents, target.vocab_size, low, high)
                rows += prefill_rows(bench, cfg, target, table) if bench.documents else []
            rows += [regeneration_row(bench, cfg, target)] if bench.prompts else []
            del target
        if bench.scale:
            rows += scaling_rows(bench, cfg, Path(folder))
    out = Path("runs/bench/pipeline.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, rows)
    write_json(out.with_name("pipeline.provenance.json"), provenance(config=bench.model_dump()))
    return 0


def prefill_rows(bench: BenchConfig, cfg: FeaturesConfig, target: Target, table: pa.Table) -> list[dict[str, Any]]:
    plan = make_plan(table, cfg.prefill.shard_tokens)
    spec = feature_spec(cfg, TargetFront(cfg.target), table)
    index = {d: i for i, d in enumerate(table["document"].to_pylist())}
    tokens = sum(plan["length"].to_pylist())
    with tempfile.TemporaryDirectory() as root:
        writer = create_store(root, spec, plan)
        shards = [documents_of(shard_row(writer, s, index, table)) for s in writer.missing_shards()]

    def ours() -> None:
        with tempfile.TemporaryDirectory() as root:
            writer = create_store(root, spec, plan)
            actor = actor_of(target, writer, cfg)
            for shard in writer.missing_shards():
                actor.shard(shard_row(writer, shard, index, table))

    def bare() -> None:
        for documents in shards:
            for batch in batches(documents, default_batch_tokens(target)):
                ids_BS = torch.zeros(len(batch), len(batch[0].token_ids_S), dtype=torch.long)
                for row, d in enumerate(batch):
                    ids_BS[row, : len(d.token_ids_S)] = torch.from_numpy(d.token_ids_S.astype(np.int64))
                with torch.inference_mode():
                    target.model(ids_BS, use_cache=False)

    def naive() -> None:
        for ids in table["token_ids"].to_pylist():
            with torch.inference_mode():
                target.model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)

    best = best_rates(bench.repeats, *(lambda work=work: work() or tokens for work in (ours, bare, naive)))
    lengths = pc.list_value_length(table["token_ids"])
    what = f"prefill of {pc.min(lengths)} to {pc.max(lengths)} tokens, one actor, writing included"
    return [
        result(what, "tokens/s", best[0], best[1], "transformers, same batches, nothing written"),
        result(what, "tokens/s", best[0], best[2], "output_hidden_states, batch 1, unsorted"),
    ]


def regeneration_row(bench: BenchConfig, cfg: FeaturesConfig, target: Target) -> dict[str, Any]:
    renderer = Renderer(cfg.target, target.tokenizer, target.chat_template(), target.stop_ids)
    prompts = [p.text for p in generate_prompts(bench.prompts, 0, seed=1)]
    ids = [renderer.prompt_ids(({"role": "user", "content": p},)) for p in prompts]
    ids = [i[-cfg.target.max_length // 2 :] for i in ids]
    few = ids[:: max(len(ids) // 4, 1)]  # one at a time takes long: a sample, compared per token

    def ours() -> int:
        requests = [Request(str(n), i, bench.new_tokens) for n, i in enumerate(ids)]
        return sum(len(r.token_ids) for r in Generator(target, cfg.regenerate).generate(requests))

    def alone() -> int:
        made = 0
        for i in few:
            prompt = torch.tensor([i])
            out = target.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=bench.new_tokens,
                do_sample=False,
                eos_token_id=sorted(target.stop_ids),
                pad_token_id=0,
            )
            made += out.shape[1] - prompt.shape[1]
        return made

    a, b = best_rates(bench.repeats, ours, alone)
    return result("regeneration", "tokens/s", a, b, "generate, one prompt at a time")


def scaling_rows(bench: BenchConfig, cfg: FeaturesConfig, folder: Path) -> list[dict[str, Any]]:
    """Prefill through Ray on two nodes of one CPU: 1, 2 and 4 times the corpus with one actor, 4 times with two."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    seconds, tokens, shares = {}, {}, []
    try:
        for actors, times in ((1, 1), (1, 2), (1, 4), (2, 4)):
            name = f"{folder}/scale-{actors}-{times}"
            overrides = [f"store_root={name}/store", f"data_root={name}/data", f"ray.address={cluster.address}"]
            overrides += [f"ray.actors={actors}", "ray.cpus_per_actor=1"]
            overrides += ["target.max_length=512", "prefill.shard_tokens=512"]
            made = build_features(resolve(cfg.target.name, kept_corpus(folder, bench.scale * times), overrides))
            assert made.throughput is not None
            tokens[actors, times] = made.counts["stored_tokens"]
            seconds[actors, times] = made.counts["stored_tokens"] / made.throughput
            shares = sorted(made.tokens_by_node.values())[-2:]
            print(
                f"{actors} actors, {times} x the corpus: {tokens[actors, times]:,} tokens in "
                f"{seconds[actors, times]:.1f} s, {made.throughput:,.0f} tokens/s, start of the actors included",
                flush=True,
            )
    finally:
        cluster.shutdown()

    what = "prefill through Ray"
    rate = {key: tokens[key] / seconds[key] for key in tokens}
    return [
        result(f"{what} at 2 x the corpus", "tokens/s", rate[1, 2], rate[1, 1], "at 1 x the corpus"),
        result(f"{what} at 4 x the corpus", "tokens/s", rate[1, 4], rate[1, 1], "at 1 x the corpus"),
        result(f"{what} with 2 actors on 2 nodes", "tokens/s", rate[2, 4], rate[1, 4], "1 actor"),
        result(
            f"{what}, tokens of the less busy of 2 nodes",
            "share",
            min(shares) / sum(shares) if len(shares) > 1 else 0.0,
            0.5,
            "even",
        ),
    ]


class actor_of:
    """A `Prefiller` around a loaded target, without Ray."""

    def __init__(self, target: Target, writer: StoreWriter, cfg: FeaturesConfig):
        self.actor = object.__new__(Prefiller)
        self.actor.target, self.actor.writer = target, writer
        self.actor.batch_tokens, self.actor.top_k = cfg.prefill.batch_tokens, cfg.prefill.top_k
        self.shard = self.actor.shard


def random_documents(n: int, vocab: int, low: int, high: int) -> pa.Table:
    """n documents of low to high tokens, the second half of each an answer."""
    g = np.random.default_rng(0)
    rows = []
    for _ in range(n):
        length = int(g.integers(low, high + 1))
        tokens, mask = (
            g.integers(0, vocab, length).astype(np.int32),
            (np.arange(length) >= length // 2).astype(np.uint8),
        )
        document = document_id(tokens, mask)
        rows.append((document, tokens, mask, "bench", "train", length // 2))
    return pa.Table.from_pylist(
        [dict(zip(DOCUMENT_SCHEMA.names, r, strict=True)) for r in rows], schema=DOCUMENT_SCHEMA
    )


def kept_corpus(folder: Path, rows: int) -> str:
    """A corpus whose answers are kept: `rows` documents of about 150 words."""
    words = " ".join(p.text for p in generate_prompts(60, 0, seed=2)).split()
    data = [
        {"prompt": f"Say {i}", "response": " ".join(words[i * 7 % 500 : i * 7 % 500 + 100 + i % 40])}
        for i in range(rows)
    ]
    (folder / f"kept-{rows}.jsonl").write_text("".join(json.dumps(d) + "\n" for d in data))
    toml = folder / f"kept-{rows}.toml"
    toml.write_text(
        f'[sources.kept]\nkind = "files"\npaths = ["{folder}/kept-{rows}.jsonl"]\n[regenerate]\nengine = "none"\n'
    )
    return str(toml)


def best_rates(repeats: int, *sides: Callable[[], int]) -> list[float]:
    """Tokens per second of each side, in turns, the best of `repeats`; a side returns its tokens."""
    best = [0.0] * len(sides)
    for _ in range(repeats):
        for n, work in enumerate(sides):
            began = time.perf_counter()
            made = work()
            best[n] = max(best[n], made / (time.perf_counter() - began))
    return best


def result(what: str, unit: str, ours: float, opponent: float, name: str) -> dict[str, Any]:
    return {
        "what": what,
        "unit": unit,
        "ours": ours,
        "opponent": opponent,
        "opponent_name": name,
        "ratio": ours / opponent,
    }


if __name__ == "__main__":
    main(run)
