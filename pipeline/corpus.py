"""Reading corpora: sources one row at a time, and their mixture."""

import contextlib
import glob
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.errors import DataError
from pipeline.config import FeaturesConfig, FilesSource, HubSource, PromptsSource, Source
from pipeline.conversation import BadRow, Conversation, Reject, content_key, parse_row
from pipeline.prompts import generate_prompts

Row = tuple[str, int, Any]  # file, line, parsed object or BadRow


def read_corpus(cfg: FeaturesConfig) -> Iterator[Conversation | Reject]:
    """The mixture's conversations, in a fixed order, with rejects where they were met.

    The next row comes from the source that is furthest behind its weight; a source that is used up drops out and the
    others go on, until `cfg.limit` or until nothing is left. Rows with the same turns count once.

    Raises:
        DataError: a file that is missing or unreadable as a whole, or a source without a single usable row.
    """
    iterators = {name: _conversations(name, source, cfg.heldout_share) for name, source in cfg.sources.items()}
    taken = dict.fromkeys(iterators, 0)
    rejected = dict.fromkeys(iterators, 0)
    seen: dict[str, Conversation] = {}
    while iterators and (cfg.limit is None or len(seen) < cfg.limit):
        name = min(iterators, key=lambda n: (taken[n] + 1) / cfg.sources[n].weight)
        item = next(iterators[name], None)
        if item is None:
            del iterators[name]
            if not taken[name]:
                raise DataError(
                    f"source {name!r} of corpus {cfg.name!r} has no usable row ({rejected[name]} were rejected); "
                    f"{_remedy(cfg.sources[name])}"
                )
        elif isinstance(item, Conversation):
            first = seen.setdefault(item.key, item)
            if first is item:
                taken[name] += 1
                yield item
            else:
                rejected[name] += 1
                yield Reject(
                    name, item.file, item.line, "read", f"same turns as {first.file} line {first.line}", item.key
                )
        else:
            rejected[name] += 1
            yield item


def inputs_digest(cfg: FeaturesConfig) -> str:
    """Changes when a source's content may have: size and time of local files, tag of objects, revision of hub sets."""
    parts: list[Any] = []
    for source in cfg.sources.values():
        if isinstance(source, FilesSource):
            for path in _paths(source):
                if "://" in path:
                    meta = _object_store(path)[0].head(_object_store(path)[1])
                    parts.append([path, meta["size"], str(meta.get("e_tag"))])
                else:
                    stat = os.stat(path)
                    parts.append([path, stat.st_size, stat.st_mtime_ns])
        elif isinstance(source, HubSource) and Path(source.repo).is_dir():
            parts += [
                [str(p), p.stat().st_size, p.stat().st_mtime_ns]
                for p in sorted(Path(source.repo).rglob("*"))
                if p.is_file()
            ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _conversations(name: str, source: Source, heldout_share: float) -> Iterator[Conversation | Reject]:
    if isinstance(source, PromptsSource):
        for i, p in enumerate(generate_prompts(source.count, source.heldout, source.seed), start=1):
            messages = ({"role": "user", "content": p.text},)
            yield Conversation(
                content_key(messages), messages, f"{p.category}/{p.template}", p.split, f"prompts:{name}", i
            )
        return
    from features.plan import split_of

    rows = _file_rows(source) if isinstance(source, FilesSource) else _hub_rows(source)
    number = 0
    for file, line, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            messages, tools = parse_row(row, source.fields)
        except BadRow as e:
            yield Reject(name, file, line, "read", str(e))
            continue
        key = content_key(messages, tools)
        # by the question and not by the answer: the same prompt never is in both splits
        split = source.split or split_of(content_key([m for m in messages if m["role"] == "user"]), heldout_share)
        yield Conversation(key, messages, name, split, file, line, tools)
        number += 1
        if number == source.limit:
            return


def _file_rows(source: FilesSource) -> Iterator[Row]:
    for path in _paths(source):
        name = path.lower()
        if name.endswith((".parquet", ".pq")):
            yield from _parquet_rows(path)
        elif name.endswith((".jsonl", ".ndjson")):
            yield from _jsonl_rows(path)
        elif name.endswith(".json"):
            yield from _json_rows(path)
        else:
            raise DataError(f"corpus file {path!r} has an unknown ending; give .jsonl, .json or .parquet files")


def _paths(source: FilesSource) -> list[str]:
    paths: list[str] = []
    for pattern in source.paths:
        if "://" in pattern:
            paths.append(pattern)
            continue
        found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        if not found:
            raise DataError(f"corpus file {pattern!r} does not exist; correct paths in the corpus file")
        paths += found
    return paths


def _open(path: str) -> Any:
    """A binary, seekable file, local or of an object store."""
    if "://" not in path:
        return open(path, "rb")
    import obstore

    store, key = _object_store(path)
    try:
        return contextlib.closing(obstore.open_reader(store, key))
    except FileNotFoundError:
        raise DataError(f"corpus file {path!r} does not exist; correct paths in the corpus file") from None


def _object_store(path: str) -> tuple[Any, str]:
    from obstore.store import from_url

    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    return from_url(f"{scheme}://{bucket}"), key


def _jsonl_rows(path: str) -> Iterator[Row]:
    with _open(path) as f:
        # split at line feeds only: str.splitlines would also cut at U+2028 and others inside of a JSON text
        for number, raw in enumerate(_lines(f), start=1):
            if not raw.strip():
                continue
            try:
                yield path, number, json.loads(raw)
            except UnicodeDecodeError as e:
                yield path, number, BadRow(f"not valid UTF-8 (byte {e.start} of the line)")
            except json.JSONDecodeError as e:
                yield path, number, BadRow(f"not valid JSON ({e.msg} at column {e.colno})")
            except RecursionError:
                yield path, number, BadRow("JSON nested too deeply")


def _lines(f: Any) -> Iterator[bytes]:
    if isinstance(f, io.BufferedReader):
        yield from f
        return
    rest = b""
    while chunk := bytes(f.read(1 << 20)):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _json_rows(path: str) -> Iterator[Row]:
    with _open(path) as f:
        try:
            data = json.loads(bytes(f.read()))
        except ValueError as e:
            raise DataError(
                f"corpus file {path!r} is not valid JSON ({e}); a file with one object per line ends in .jsonl"
            ) from None
    if not isinstance(data, list):
        raise DataError(f"corpus file {path!r} holds a {type(data).__name__}; it must be a list of objects")
    for number, row in enumerate(data, start=1):
        yield path, number, row


def _parquet_rows(path: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with _open(path) as raw:
            f = raw if isinstance(raw, io.BufferedReader) else io.BytesIO(bytes(raw.read()))
            for batch in pq.ParquetFile(f).iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield path, number, row
    except pa.ArrowInvalid as e:
        raise DataError(
            f"corpus file {path!r} is not readable as Parquet after row {number} ({e}); fetch it again"
        ) from None


def _hub_rows(source: HubSource) -> Iterator[Row]:
    import datasets

    try:
        if (Path(source.repo) / "state.json").is_file() or (Path(source.repo) / "dataset_dict.json").is_file():
            data = datasets.load_from_disk(source.repo)
            data = data[source.hub_split] if isinstance(data, datasets.DatasetDict) else data
        else:
            data = datasets.load_dataset(
                source.repo, source.subset, split=source.hub_split, revision=source.revision, streaming=True
            )
        for number, row in enumerate(data, start=1):
            yield f"{source.repo}:{source.hub_split}", number, row
    except (OSError, ValueError, KeyError) as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise DataError(
            f"data set {source.repo!r} split {source.hub_split!r} cannot be read ({reason}); "
            "check repo, subset, hub_split and the network"
        ) from e


def _remedy(source: Source) -> str:
    return (
        "see rejects.parquet for the reasons"
        if isinstance(source, PromptsSource)
        else "set its `fields` to the names of its columns"
    )
