"""A small corpus, a small store and a small recipe, for checks that are about machines."""

import json
import sys
from pathlib import Path

RECIPE = [
    "data.anchors_per_document=6",
    "data.global_batch=4",
    "data.documents_per_micro_batch=2",
    "drafter.num_hidden_layers=1",
    "drafter.init=random",
    "train.save_every=4",
    "train.eval_every=1000",
    "train.eval_documents=4",
    "train.log_every=4",
]


def corpus(folder: Path, rows: int, where: str = "", shard_tokens: int = 512) -> Path:
    """A corpus with answers of mixed lengths and its TOML; nothing to regenerate."""
    lines = [
        json.dumps(
            {"prompt": f"Question {i}: {'why ' * (i % 7)}?", "response": f"Answer {i}. " + "because " * (i * 5 % 17)}
        )
        for i in range(rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    toml = folder / "kept.toml"
    toml.write_text(
        f'heldout_share = 0.1\n[sources.rows]\nkind = "files"\npaths = ["{where or folder / "rows.jsonl"}"]\n'
        f'[regenerate]\nengine = "none"\n[prefill]\nshard_tokens = {shard_tokens}\nstorage_dtype = "fp32"\n'
        "batch_tokens = 600\n"
    )
    return toml


def records(run: Path) -> dict[int, float]:
    """Step -> loss of a run."""
    if not (run / "metrics.jsonl").is_file():
        return {}
    lines = (json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines() if x)
    return {r["step"]: r["loss"] for r in lines}


# Writes a store without Ray, from the rows of `corpus`: argv is the corpus file and the root of the stores.
WRITE_STORE = """
import sys
from features.target import load_target
from features.plan import corpus_digest, make_plan
from features.writer import create_store
from pipeline.config import resolve
from pipeline.documents import build_documents
from pipeline.front import TargetFront
from pipeline.prefill import documents_of, features_of, shard_row
from pipeline.run import feature_spec
cfg = resolve("tiny", sys.argv[1], ["data_root=data-writer", "ray.address=none"])
front, target = TargetFront(cfg.target), load_target(cfg.target)
documents, _ = build_documents(cfg, front)
writer = create_store(sys.argv[2], feature_spec(cfg, front, documents), make_plan(documents, cfg.prefill.shard_tokens))
rows_of = {d: i for i, d in enumerate(documents["document"].to_pylist())}
for shard in writer.missing_shards():
    rows = documents_of(shard_row(writer, shard, rows_of, documents))
    writer.write_shard(shard, features_of(target, rows, cfg.prefill.batch_tokens))
writer.finish()
print(writer.uri)
"""


def write_store(hosts, name: str, folder: Path, rows: int = 60) -> str:
    """URI of a finished local store, made on host `name`."""
    toml = corpus(folder, rows)
    return hosts.python(name, WRITE_STORE, str(toml), str(folder / "store"), timeout=300).strip().splitlines()[-1]


def trainer(store: str, *overrides: str, nproc: int = 1, options: tuple[str, ...] = ()) -> list[str]:
    head = [sys.executable, "-m", "trainer", "--model", "tiny", "--recipe", "sft-fast", "--nproc", str(nproc), *options]
    return [*head, *RECIPE, f"data.store={store}", *overrides]
