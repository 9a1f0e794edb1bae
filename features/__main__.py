"""python -m features inspect|verify|estimate|convert|merge-manifest|sample

What people do with a store besides filling it and training from it.
"""

import argparse
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from features.estimate import check_room, estimate, estimate_tokens, show_bytes, with_dtype
from features.plan import corpus_digest, make_plan
from features.spec import DEFAULT_SHARD_TOKENS, FeatureSpec, no_store, parse_spec
from features.target_config import HubSource, TargetConfig, load_target_config
from infra.cli import main
from infra.errors import ConfigError, StoreError

STORE = "folder of the store (the one with spec.json) or its s3:// gs:// az:// address"
EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192)


def inspect(args: argparse.Namespace) -> int:
    """Sizes, documents, length histogram, sources, splits, rejects."""
    from features.reader import FeatureStore

    store = FeatureStore.open(args.store, verify="never")
    lengths = store.documents["length"].to_numpy()
    info: dict[str, Any] = {
        "uri": store.uri,
        "fingerprint": store.spec.fingerprint,
        "spec": store.spec.model_dump(mode="json"),
        "complete": store.complete,
        "shards": store.num_shards,
        "missing_shards": len(store.missing_shards),
        "documents": len(store),
        "tokens": int(lengths.sum()),
        "bytes": store.bytes,
        "sources": _counts(store.documents["source"]),
        "splits": _counts(store.documents["split"]),
        "lengths": _histogram(lengths),
        "rejected": len(store.rejects),
        "rejects": _counts(store.rejects["reason"]),
    }
    if args.json:
        print(json.dumps(info, indent=2))
        return 0
    spec = store.spec
    print(f"store       {store.uri}")
    print(f"target      {spec.target} ({spec.source_repo} at {spec.source_revision})")
    top = f", top {spec.top_k} of the target" if spec.top_k else ""
    taps = ", ".join(map(str, spec.tap_layer_ids))
    print(f"features    taps {taps} x {spec.hidden_size} in {spec.storage_dtype}{top}")
    state = "complete" if store.complete else f"{len(store.missing_shards):,} still missing"
    print(f"shards      {store.num_shards:,} of {spec.shard_tokens:,} tokens ({state})")
    print(f"documents   {len(store):,}\ntokens      {int(lengths.sum()):,}\nsize        {show_bytes(store.bytes)}")
    for name in ("splits", "sources"):
        print(f"{name:<12}{', '.join(f'{k} {v:,}' for k, v in info[name].items())}")
    print("lengths")
    most = max(info["lengths"].values(), default=1) or 1
    for label, count in info["lengths"].items():
        print(f"  {label:>11} {count:>10,} {'#' * round(40 * count / most)}")
    print(f"rejected    {len(store.rejects):,}")
    for reason, count in info["rejects"].items():
        first = store.rejects.filter(pc.equal(store.rejects["reason"], reason)).slice(0, 1).to_pylist()[0]
        print(f"  {reason} {count:,}, for example {first['document']}: {first['detail']}")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Recompute all checksums; 0 when all is well or repaired, 1 when something is bad."""
    from features.verify import repair, verify_store

    bad = verify_store(args.store, progress=True)
    for b in bad:
        print(f"{'store' if b.shard is None else f'shard {b.shard}'}: {b.path}: {b.problem}")
    if not bad:
        print("all objects are intact")
        return 0
    if not args.repair:
        print(f"{len(bad)} problems; --repair drops the bad shards so that the next prefill recomputes only those")
        return 1
    shards = repair(args.store, bad)
    print(f"dropped {len(shards)} shards ({', '.join(map(str, shards))}); run the prefill again to recompute them")
    return 0


def estimate_command(args: argparse.Namespace) -> int:
    """Tokens, bytes (bf16 and fp8), shards and hours before a run."""
    from features.files import open_files
    from features.writer import read_plan

    given = [x for x in (args.store, args.documents, args.tokens) if x is not None]
    if len(given) != 1:
        raise ConfigError("estimate needs one of STORE, --documents FILE and --tokens N; give one")
    if args.store is not None:
        files = open_files(args.store)
        try:
            spec = parse_spec(files.read("spec.json"), args.store)
        except FileNotFoundError:
            raise no_store(args.store) from None
        plan = read_plan(files)
    else:
        documents = _documents(args.documents) if args.documents else None
        spec = _planned_spec(args, documents)
        if documents is None:
            found = estimate_tokens(
                spec, round(args.tokens), round(args.tokens / args.mean_length), args.tokens_per_second
            )
            print(found.text())
            return 0
        plan = make_plan(documents, spec.shard_tokens)
    print(estimate(spec, plan, args.tokens_per_second).text())
    check_room(args.root, with_dtype(spec, args.dtype or spec.storage_dtype), plan, max_bytes=args.max_bytes)
    return 0


def convert_command(args: argparse.Namespace) -> int:
    """Write the store again in fewer bits, without the target, and report the error per tap."""
    from features.convert import convert

    summary = convert(args.store, args.root, args.dtype, max_bytes=args.max_bytes, progress=True)
    print(f"{summary['uri']}: {summary['documents']:,} documents, {show_bytes(summary['bytes'])}")
    for tap, error in summary["relative_error"].items():
        print(f"  layer {tap:>3}: relative error {error:.4%}")
    return 0


def merge_manifest(args: argparse.Namespace) -> int:
    """Complete what killed writers left and compact the commits into manifest.json; the store may be incomplete."""
    from features.writer import StoreWriter

    summary = StoreWriter(args.store, max_reject_share=1.0).finish()
    print(json.dumps(summary, indent=2))
    return 0


def sample(args: argparse.Namespace) -> int:
    """A few documents: their tokens, what is supervised, how likely the target finds them; with --text their text."""
    from features.reader import FeatureStore

    store = FeatureStore.open(args.store)
    tokenizer = None
    if args.text:
        from features.target import load_tokenizer

        tokenizer = load_tokenizer(load_target_config(store.spec.target))
    if not len(store):
        raise StoreError(f"{args.store} holds no committed document yet; prefill it first")
    rows = np.random.default_rng(args.seed).choice(len(store), min(args.documents, len(store)), replace=False)
    for row in rows.tolist():
        f, meta = store.read(row), store.documents.slice(row, 1).to_pylist()[0]
        mask = f.loss_mask_S.astype(bool)
        norms = f.hidden_SLD.float().norm(dim=-1).mean(0).tolist()
        print(f"{f.document}  {meta['source']}  {meta['split']}  shard {meta['shard']}  {meta['length']} tokens")
        print(f"  supervised {int(mask.sum())}, mean log-prob there {f.target_logprob_S[mask].mean():.3f}")
        print(f"  mean norm per tap {', '.join(f'{x:.3g}' for x in norms)}")
        if tokenizer is None:
            print(f"  tokens {f.token_ids_S[: args.tokens].tolist()}")
        else:
            print(f"  prompt   {tokenizer.decode(f.token_ids_S[~mask][: args.tokens])!r}")
            print(f"  response {tokenizer.decode(f.token_ids_S[mask][: args.tokens])!r}")
    return 0


def _documents(path: str) -> pa.Table:
    try:
        return pq.read_table(path, columns=["document", "token_ids", "source", "split", "prompt_length"])
    except (OSError, pa.ArrowException) as e:
        raise ConfigError(
            f"documents {path!r} cannot be read ({e}); give a Parquet file of rendered documents"
        ) from None


def _planned_spec(args: argparse.Namespace, documents: pa.Table | None) -> FeatureSpec:
    """A spec with what decides the size; the rest is left open."""
    if args.target is None:
        raise ConfigError("--target is missing; name the target whose features are to be stored")
    target = load_target_config(args.target)
    hidden_size = args.hidden_size or _hidden_size(target)
    open_fields = dict.fromkeys(("source_repo", "source_revision", "weights_digest"), "")
    open_fields |= dict.fromkeys(("tokenizer_digest", "chat_template_digest"), "")
    return FeatureSpec(
        **open_fields,
        target=target.name,
        tap_layer_ids=target.tap_layer_ids,
        hidden_size=hidden_size,
        storage_dtype=args.dtype or "bf16",
        max_length=target.max_length,
        corpus_digest=corpus_digest(documents) if documents is not None else "",
        shard_tokens=max(args.shard_tokens, target.max_length),
        top_k=args.top_k,
    )


def _hidden_size(target: TargetConfig) -> int:
    """From the target's config.json; of a hub model nothing else is fetched."""
    from transformers import AutoConfig

    if isinstance(target.source, HubSource):
        where, revision = target.source.repo, target.source.revision
    else:
        from features.target_source import target_folder

        where, revision = str(target_folder(target)), "main"
    try:
        config = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=target.trust_remote_code)
    except OSError:
        raise ConfigError(f"the configuration of {where} cannot be read here; give --hidden-size") from None
    return int(config.get_text_config().hidden_size)


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    pairs = pc.value_counts(column).to_pylist()
    return {p["values"]: p["counts"] for p in sorted(pairs, key=lambda p: (-p["counts"], p["values"]))}


def _histogram(lengths: np.ndarray) -> dict[str, int]:
    edges = [*EDGES, int(max(lengths.max(initial=0) + 1, EDGES[-1] + 1))]
    counts, _ = np.histogram(lengths, edges)
    labels = [f"{a}-{b - 1}" for a, b in zip(edges[:-2], edges[1:-1], strict=True)] + [f"{EDGES[-1]}-"]
    return {label: int(n) for label, n in zip(labels, counts, strict=True)}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m features", description="Tools for feature stores.")
    verbs = top.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run: Any) -> argparse.ArgumentParser:
        p = verbs.add_parser(name, help=run.__doc__.splitlines()[0], description=run.__doc__)
        p.set_defaults(run=run)
        return p

    p = verb("inspect", inspect)
    p.add_argument("store", help=STORE)
    p.add_argument("--json", action="store_true", help="machine-readable")
    p = verb("verify", verify)
    p.add_argument("store", help=STORE)
    p.add_argument("--repair", action="store_true", help="drop bad shards so that the next prefill recomputes them")
    p = verb("estimate", estimate_command)
    p.add_argument("store", nargs="?", help=f"{STORE} whose plan to use")
    p.add_argument("--documents", help="Parquet of rendered documents")
    p.add_argument("--tokens", type=float, help="a count of tokens, 1.2e9")
    p.add_argument("--mean-length", type=float, default=1000, help="tokens per document with --tokens (1000)")
    p.add_argument("--target", help="MODEL, as in `python -m pipeline MODEL CORPUS`")
    p.add_argument("--hidden-size", type=int, help="D, where the target's configuration is not at hand")
    p.add_argument("--dtype", choices=["bf16", "fp8_e4m3", "fp32"], help="storage dtype for --max-bytes and free space")
    p.add_argument("--top-k", type=int, default=0, help="stored candidates of the target per token (0)")
    p.add_argument("--shard-tokens", type=int, default=DEFAULT_SHARD_TOKENS)
    p.add_argument("--tokens-per-second", type=float, help="prefill rate over all workers, for the hours")
    p.add_argument("--max-bytes", type=_bytes, help="stop with an error above this size, 2e12")
    p.add_argument("--root", default=".", help="where the store would lie, for the check of free space (.)")
    p = verb("convert", convert_command)
    p.add_argument("store", help=STORE)
    p.add_argument("root", help="root folder or address of the new store")
    p.add_argument("--dtype", choices=["fp8_e4m3", "bf16"], default="fp8_e4m3")
    p.add_argument("--max-bytes", type=_bytes)
    p = verb("merge-manifest", merge_manifest)
    p.add_argument("store", help=STORE)
    p = verb("sample", sample)
    p.add_argument("store", help=STORE)
    p.add_argument("--documents", type=int, default=3)
    p.add_argument("--tokens", type=int, default=64, help="tokens shown of each (64)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--text", action="store_true", help="decode with the target's tokenizer")
    return top


def _bytes(text: str) -> int:
    return int(float(text))


if __name__ == "__main__":
    args = parser().parse_args()
    main(lambda: args.run(args))
