"""The store against what else one could use: `python -m features.bench [--small]`, `make bench PART=features`.

Every ratio is taken within this run, the sides in turn, the best of several rounds: absolute numbers of a shared
machine mean little. A reading consumer still holds the document before, as any training loop that reads ahead does;
without that the C allocator would hand out the same memory over and over. Writers put the same bytes into the same
file system, out of the same memory, and none waits for the disk. Writes runs/bench/features.json. Needs 4 GB of disk
and as much page cache (`--small`: 0.3 GB).

Legend: S tokens, L taps, D hidden size.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import safetensors
import safetensors.torch
import torch
import zarr

from features.commits import commit_path
from features.document import DocumentFeatures
from features.plan import DOCUMENT_SCHEMA, corpus_digest, document_id, make_plan
from features.reader import FeatureStore
from features.spec import FeatureSpec
from features.stream import AnchorStream, StreamConfig
from features.writer import StoreWriter, create_store
from infra.cli import main
from infra.provenance import provenance, write_json

TAPS = (1, 9, 17, 25, 33)
OUT = Path("runs/bench/features.json")


def corpus(tokens: int, low: int, high: int, seed: int = 0) -> pa.Table:
    """Random documents of low to high tokens, the first third of each a prompt."""
    rng, rows, total = np.random.default_rng(seed), [], 0
    while total < tokens:
        n = int(rng.integers(low, high + 1))
        ids, mask = rng.integers(0, 32_000, n, dtype=np.int32), np.ones(n, np.uint8)
        mask[: n // 3] = 0
        rows.append((document_id(ids, mask), ids, mask, "bench", "train", n // 3))
        total += n
    columns = list(zip(*rows, strict=True))
    arrays = [pa.array(c, f.type) for c, f in zip(columns, DOCUMENT_SCHEMA, strict=True)]
    return pa.table(arrays, schema=DOCUMENT_SCHEMA)


def spec_of(documents: pa.Table, D: int, **changes: Any) -> FeatureSpec:
    fields: dict[str, Any] = dict.fromkeys(
        ("source_repo", "source_revision", "weights_digest", "tokenizer_digest", "chat_template_digest"), "bench"
    )
    fields |= {"target": f"bench-{D}", "tap_layer_ids": TAPS, "hidden_size": D, "max_length": 3072}
    return FeatureSpec(**(fields | {"corpus_digest": corpus_digest(documents)} | changes))


class Filler:
    """DocumentFeatures of planned documents; the hidden states are windows of one random tensor."""

    def __init__(self, documents: pa.Table, spec: FeatureSpec):
        self.rows = {r["document"]: r for r in documents.select(["document", "token_ids", "loss_mask"]).to_pylist()}
        self.noise = torch.randn(spec.max_length + 64, spec.num_taps, spec.hidden_size).to(torch.bfloat16)

    def shard(self, writer: StoreWriter, shard: int) -> list[DocumentFeatures]:
        return [self.one(d) for d in writer.shard_plan(shard)["document"].to_pylist()]

    def one(self, document: str) -> DocumentFeatures:
        row = self.rows[document]
        n, at = len(row["token_ids"]), int(document[:4], 16) % 64
        return DocumentFeatures(
            document,
            np.array(row["token_ids"], np.int32),
            np.array(row["loss_mask"], np.uint8),
            self.noise[at : at + n],
            np.zeros(n, np.float32),
        )


def rates(amount: float, rounds: int, **sides: Callable[[], Any]) -> dict[str, float]:
    """amount / best time of each side, in turns."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
    return {name: amount / t for name, t in best.items()}


def row(what: str, unit: str, ours: float, opponent: float, name: str, ratio: float | None = None) -> dict[str, Any]:
    ratio = ours / opponent if ratio is None else ratio
    return {"what": what, "unit": unit, "ours": ours, "opponent": opponent, "opponent_name": name, "ratio": ratio}


def bench_io(folder: Path, D: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Random documents read, and whole shards written, against four other formats with the same content."""
    documents = corpus(tokens, 256, 3072)
    spec = spec_of(documents, D, shard_tokens=16_384)
    plan = make_plan(documents, spec.shard_tokens)
    filler = Filler(documents, spec)
    writer = create_store(str(folder / "store"), spec, plan)
    for shard in writer.missing_shards():
        writer.write_shard(shard, filler.shard(writer, shard))
    writer.finish()
    store, checking = FeatureStore.open(writer.uri, verify="never"), FeatureStore.open(writer.uri)
    S, L = spec.shard_tokens, spec.num_taps
    where = [(r["document"], r["shard"], r["start"], r["length"]) for r in plan.to_pylist()]
    flat = np.memmap(folder / f"flat-{D}", np.uint16, "w+", shape=(store.num_shards * S, L, D))
    for shard in range(store.num_shards):
        for document, s, a, n in where:
            if s == shard:
                f = store.read(document)
                flat[s * S + a : s * S + a + n] = f.hidden_SLD.view(torch.int16).numpy().view(np.uint16)
                sample = {"hidden": f.hidden_SLD.clone(), "token_ids": f.token_ids_S, "loss_mask": f.loss_mask_S}
                sample["target_logprob"] = f.target_logprob_S
                torch.save({k: torch.as_tensor(v) for k, v in sample.items()}, folder / f"{document}.pt")
        rows = torch.from_numpy(np.array(flat[shard * S : (shard + 1) * S])).view(torch.bfloat16)
        safetensors.torch.save_file({"hidden": rows}, folder / f"{D}-{shard}.safetensors")
    flat.flush()
    flat = np.memmap(folder / f"flat-{D}", np.uint16, "c", shape=flat.shape)  # torch wants memory it may write into
    array = zarr.open(writer.uri, mode="r")["hidden"]
    order = np.random.default_rng(1).permutation(len(where)).tolist()
    opened = {s: safetensors.safe_open(folder / f"{D}-{s}.safetensors", "pt") for s in range(store.num_shards)}
    slices = {s: f.get_slice("hidden") for s, f in opened.items()}

    def memmap(i: int) -> Any:
        _, s, a, n = where[i]
        return torch.from_numpy(np.array(flat[s * S + a : s * S + a + n])).view(torch.bfloat16)

    def per_shard(i: int) -> Any:
        _, s, a, n = where[i]
        return slices[s][a : a + n].clone()

    def per_sample(i: int) -> Any:
        return torch.load(folder / f"{where[i][0]}.pt")

    def python(i: int) -> Any:
        _, s, a, n = where[i]
        return torch.from_numpy(array[s * S + a : s * S + a + n])

    def in_place(i: int) -> Any:
        _, s, a, n = where[i]
        return torch.from_numpy(flat[s * S + a : s * S + a + n].view(np.int16)).view(torch.bfloat16)

    def all_of(read: Callable[[int], Any]) -> None:
        held: deque[Any] = deque(maxlen=1)
        for i in order:
            held.append(read(i))

    def used(read: Callable[[int], torch.Tensor]) -> Callable[[], None]:
        """Every byte is looked at once, as a copy to a device does."""
        return lambda: all_of(lambda i: (hidden := read(i), hidden.view(torch.int64).numpy().sum()))

    def first_touch() -> None:
        checking.forget_checks()
        all_of(checking.read)

    gigabytes = sum(w[3] for w in where) * L * D * 2 / 1e9
    rate = rates(
        gigabytes,
        rounds,
        memmap=lambda: all_of(memmap),
        ours=lambda: all_of(store.read),
        first_touch=first_touch,
        safetensors=lambda: all_of(per_shard),
        pt=lambda: all_of(per_sample),
        zarr=lambda: all_of(python),
        used_memmap=used(memmap),
        used_in_place=used(in_place),
        used_pt=used(lambda i: per_sample(i)["hidden"]),
        used_ours=used(lambda i: store.read(i).hidden_SLD),
    )
    title = f"random documents, warm, 5x{D}"
    names = {"memmap": "np.memmap of a flat file", "in_place": "np.memmap, no copy", "pt": "torch.save per sample"}
    found = [
        row(title, "GB/s", rate["ours"], rate["memmap"], names["memmap"]),
        row(title, "GB/s", rate["ours"], rate["pt"], names["pt"]),
        row(title, "GB/s", rate["ours"], rate["zarr"], "zarr-python on the same store"),
        row(title, "GB/s", rate["ours"], rate["safetensors"], "safetensors per shard"),
        row(f"{title}, first touch verified", "GB/s", rate["first_touch"], rate["memmap"], names["memmap"]),
    ]
    for side, name in names.items():
        found.append(row(f"{title}, and used once", "GB/s", rate["used_ours"], rate[f"used_{side}"], name))
    return found + [bench_write(folder, writer, filler, D, rounds + 2)]


def bench_write(folder: Path, writer: StoreWriter, filler: Filler, D: int, rounds: int) -> dict[str, Any]:
    """`write_shard` of the fullest shard (checks, checksums, commit) against np.tofile of the same bytes; neither waits
    for the disk."""
    tokens = [pa.compute.sum(writer.shard_plan(s)["length"]).as_py() for s in range(writer.num_shards)]
    full = int(np.argmax(tokens))
    content = filler.shard(writer, full)
    flat_SLD = torch.cat([d.hidden_SLD for d in content])
    parts = flat_SLD.split([len(d.hidden_SLD) for d in content])
    content = [dataclasses.replace(d, hidden_SLD=part) for d, part in zip(content, parts, strict=True)]
    flat, seconds = flat_SLD.view(torch.int16).numpy(), {"ours": [], "tofile": []}
    for _ in range(rounds):
        for path in [commit_path(full), *(a.key(full) for a in writer.layouts.values()), "manifest.json"]:
            writer.files.remove(path)
        (folder / "tofile").unlink(missing_ok=True)
        began = time.perf_counter()
        flat.tofile(folder / "tofile")
        seconds["tofile"].append(time.perf_counter() - began)
        (folder / "tofile").unlink()
        began = time.perf_counter()
        writer.write_shard(full, content)
        seconds["ours"].append(time.perf_counter() - began)
    rate = {name: flat.nbytes / 1e9 / min(times) for name, times in seconds.items()}
    return row(
        f"whole shards with checksums, 5x{D}", "GB/s", rate["ours"], rate["tofile"], "np.tofile of the same bytes"
    )


def bench_stream(folder: Path, D: int, steps: int) -> dict[str, Any]:
    """Share of a 100 ms step that the consumer waits for its batch, with two workers."""
    uri = next((folder / "store" / f"bench-{D}").iterdir())
    cfg = StreamConfig(global_batch=1, workers=2, prefetch=4, shape="fixed")
    stream = AnchorStream(FeatureStore.open(str(uri)), cfg)
    batches = iter(stream)
    next(batches)
    stream.data_wait_s = 0.0
    for _ in itertools.islice(batches, steps):
        time.sleep(0.1)
    share = stream.data_wait_s / (0.1 * steps + stream.data_wait_s)
    batches.close()
    return row(f"waiting in AnchorStream, 100 ms step, 5x{D}", "share", share, 0.05, "limit", 0.05 / max(share, 1e-4))


MEMORY = """
import json, sys, time
import features.reader
def resident():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) / 1024
before, began = resident(), time.perf_counter()
store = features.reader.FeatureStore.open(sys.argv[1])
opened = time.perf_counter() - began
for row in range(0, len(store), max(1, len(store) // 3000)):
    store.read(row)
store.read(store.documents["document"][5].as_py())
print(json.dumps([len(store), opened, resident() - before]))
"""


def bench_memory(folder: Path, documents: int) -> list[dict[str, Any]]:
    """A store of many documents: seconds to open it, and memory above import after 3,000 reads."""
    table = corpus(documents * 25, 16, 34)
    spec = spec_of(table, 64, max_length=64, shard_tokens=8192)
    plan = make_plan(table, spec.shard_tokens)
    filler = Filler(table, spec)
    writer = create_store(str(folder / "many"), spec, plan)
    for shard in writer.missing_shards():
        writer.write_shard(shard, filler.shard(writer, shard))
    writer.finish()
    command = [sys.executable, "-c", MEMORY, writer.uri]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."})
    count, seconds, mib = json.loads(done.stdout)
    return [
        row(f"opening a store of {count:,} documents", "s", seconds, 2.0, "limit", 2.0 / seconds),
        row(
            f"memory of its reader after 3,000 reads (peak {mib:.0f} MiB)",
            "MiB",
            mib,
            300.0,
            "limit",
            300.0 / max(mib, 1),
        ),
    ]


def run(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m features.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a smoke test; its figures mean nothing")
    parser.add_argument("--folder", help="where to work (a temporary folder)")
    parser.add_argument("--out", default=str(OUT))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rounds, size = (2, 2**14) if args.small else (7, 2**16)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for D, tokens in ((1024, size), (4096, size // 4)):
            rows += bench_io(Path(name), D, tokens, rounds)
            rows.append(bench_stream(Path(name), D, 5 if args.small else 50))
        rows += bench_memory(Path(name), 2_000 if args.small else 100_000)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, rows)
    write_json(out.with_suffix(".provenance.json"), provenance(small=args.small, rounds=rounds))
    return 0


if __name__ == "__main__":
    main(run)
