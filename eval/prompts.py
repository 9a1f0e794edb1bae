"""Suites: named sets of prompts, from the hub at a pinned revision, from a folder, from a JSONL file, or from a store.

A suite file (`eval/suites/*.toml`) says where its rows come from and how a row becomes user turns, so that a τ belongs
to exactly known prompts. Formats follow z-lab's benchmark (arXiv 2602.06036, reference code), see docs/evaluation.md.
"""

import dataclasses
import hashlib
import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import pydantic

from infra.config import Config, find_named, read_toml, validate
from infra.errors import ConfigError, DataError
from infra.provenance import canonical_json, sha256_hex

SUITES = Path(__file__).parent / "suites"
DEFAULT_SUITES = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench")
"""the five of z-lab's benchmark"""
HELDOUT = "heldout"
"""the held-out documents of a store: token ids, no template"""


class HubData(Config):
    """A dataset on the Hugging Face hub."""

    repo: str
    revision: str
    """commit"""
    split: str
    config: str | None = None
    data_files: tuple[str, ...] | None = None
    """files of the repository to read as JSON lines, for datasets whose loading script is no longer executed"""


class UrlData(Config):
    """A JSONL file at an address that contains a commit."""

    url: str
    sha256: str


class Where(Config):
    """Keeps rows whose integer `field` lies in [least, most]."""

    field: str
    least: int
    most: int


class Suite(Config):
    """What a suite file says."""

    description: str
    licence: str
    files: tuple[str, ...]
    """paths below the data folder, the first that exists is read; `.jsonl` or `.json` (a list)"""
    turns: tuple[str, ...] = ()
    """Jinja templates of the user turns over the row's fields"""
    turns_field: str | None = None
    """or the field that holds the list of user turns"""
    category: str | None = None
    """field by which results are also broken down"""
    where: Where | None = None
    hub: HubData | None = None
    url: UrlData | None = None

    @pydantic.model_validator(mode="after")
    def _one_of_each(self) -> "Suite":
        if bool(self.turns) == (self.turns_field is not None):
            raise ValueError("give either turns (templates) or turns_field")
        if (self.hub is None) == (self.url is None):
            raise ValueError("give either [hub] or [url]")
        return self


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation to decode.

    Attributes:
        id: stable within the suite (`gsm8k/12`: row 12 of the source).
        turns: user messages; the answer to each precedes the next. Empty where `token_ids` is given.
        token_ids: a prompt that is already tokens (held-out documents of a store).
        messages: conversation before the first turn (system message, ...).
        category: source or category for the breakdown, "" if none.
    """

    id: str
    turns: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] = ()
    category: str = ""


@dataclasses.dataclass(frozen=True)
class LoadedSuite:
    """Prompts and their `origin` (JSON-able): source, limit, seed, rows, sha256 of the chosen prompts."""

    name: str
    prompts: list[Prompt]
    origin: dict[str, Any]


def load_suite(name: str, data: str | Path | None = None, *, limit: int | None = None, seed: int = 0) -> LoadedSuite:
    """Load a named suite, a suite file (`my.toml`) or a file of prompts (`my.jsonl`).

    A limit takes the first rows after a seeded shuffle (`random.Random(seed)`, as z-lab's benchmark does); where it
    does not bite, all rows come in their order.

    Args:
        data: folder with the suites' files; None loads from the hub.

    Raises:
        ConfigError: unknown suite.
        DataError: missing file, unreachable hub, broken line or row (named by number).
    """
    if name.endswith((".jsonl", ".json")):
        path = Path(name)
        rows = read_rows(path)
        prompts = [_free_prompt(row, f"{path.stem}/{i}", f"{path}, row {i + 1}") for i, row in enumerate(rows)]
        return _select(path.stem, prompts, {"file": str(path)}, limit, seed)
    path = find_named(SUITES, name if name.endswith(".toml") else name.replace("-", "_"), "suite")
    suite, name = validate(Suite, read_toml(path), str(path)), path.stem
    rows, origin = _from_folder(suite, name, Path(data)) if data else _from_source(suite, name)
    kept = [(i, row) for i, row in enumerate(rows) if suite.where is None or _inside(suite.where, row, name, i)]
    prompts = [_suite_prompt(suite, name, i, row) for i, row in kept]
    return _select(name, prompts, {"description": suite.description, "licence": suite.licence, **origin}, limit, seed)


def heldout_suite(documents: Iterable[dict[str, Any]], *, limit: int | None = None, seed: int = 0) -> LoadedSuite:
    """The suite `heldout` from rows with `document`, `source`, `token_ids` (the prompt's alone)."""
    prompts = [Prompt(d["document"], token_ids=tuple(d["token_ids"]), category=d["source"]) for d in documents]
    if not prompts:
        raise DataError("the store has no document of split 'heldout'; build it with a held-out share above 0")
    prompts.sort(key=lambda p: p.id)  # content hashes: an order that does not depend on how the store was written
    return _select(HELDOUT, prompts, {"description": "held-out documents of the store"}, limit, seed)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a `.jsonl` (blank lines skipped) or `.json` (a list) file.

    Raises:
        DataError: the file is absent, a line is no JSON object, or there is no row.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"prompt file {str(path)!r} does not exist; give the path of a JSONL file") from None
    except UnicodeDecodeError as e:
        raise DataError(f"prompt file {str(path)!r} is not UTF-8 ({e.reason} at byte {e.start}); convert it") from None
    if path.suffix == ".json":
        return _checked_rows(_parse(text, f"prompt file {str(path)!r}"), path)
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            rows.append(_parse(line, f"line {number} of prompt file {str(path)!r}"))
    return _checked_rows(rows, path)


def _parse(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise DataError(f"{what} is not valid JSON ({e.msg} at column {e.colno}); correct or remove it") from None


def _checked_rows(rows: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(rows, list) or not rows:
        raise DataError(f"prompt file {str(path)!r} has no rows; give one JSON object per line")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f'row {number} of prompt file {str(path)!r} is not a JSON object; write {{"prompt": ...}}')
    return rows


def _from_folder(suite: Suite, name: str, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    for file in suite.files:
        if (folder / file).is_file():
            return read_rows(folder / file), {"file": file, "file_sha256": _digest((folder / file).read_bytes())}
    raise DataError(
        f"suite {name} is not in folder {str(folder)!r} (looked for {', '.join(suite.files)}); "
        "put it there, leave the suite out, or give no folder to load it from the hub"
    )


def _from_source(suite: Suite, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    if suite.url is not None:
        try:
            with urllib.request.urlopen(suite.url.url, timeout=60) as response:
                content = response.read()
        except (urllib.error.URLError, TimeoutError) as e:
            raise DataError(
                f"suite {name} cannot be fetched from {suite.url.url} ({e}); give a folder that has it"
            ) from None
        if _digest(content) != suite.url.sha256:
            raise DataError(f"suite {name}: {suite.url.url} has another sha256 than {suite.url.sha256}; do not use it")
        rows = [_parse(line, f"line {i} of {suite.url.url}") for i, line in enumerate(content.decode().splitlines(), 1)]
        return rows, {"url": suite.url.url, "file_sha256": suite.url.sha256}
    from datasets import load_dataset

    hub = suite.hub
    try:
        if hub.data_files:
            files = [f"hf://datasets/{hub.repo}@{hub.revision}/{file}" for file in hub.data_files]
            dataset = load_dataset("json", data_files=files, split=hub.split)
        else:
            dataset = load_dataset(hub.repo, hub.config, split=hub.split, revision=hub.revision)
    except Exception as e:  # datasets raises whatever its HTTP client, cache or parser raises
        raise DataError(
            f"suite {name} cannot be loaded from the hub ({hub.repo} at {hub.revision[:12]}: {type(e).__name__}); "
            "check the network, or give a folder that has it"
        ) from e
    return list(dataset), {"hub": hub.repo, "revision": hub.revision, "split": hub.split}


def _inside(where: Where, row: dict[str, Any], name: str, i: int) -> bool:
    try:
        return where.least <= int(row[where.field]) <= where.most
    except (KeyError, TypeError, ValueError):
        raise DataError(f"suite {name}, row {i + 1}: field {where.field!r} is missing or no integer") from None


def _suite_prompt(suite: Suite, name: str, i: int, row: dict[str, Any]) -> Prompt:
    if suite.turns_field is not None:
        turns = row.get(suite.turns_field)
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise DataError(f"suite {name}, row {i + 1}: field {suite.turns_field!r} is not a list of texts")
    else:
        try:
            turns = [_template(text).render(row) for text in suite.turns]
        except jinja2.UndefinedError as e:
            raise DataError(f"suite {name}, row {i + 1}: {e.message}; the file is not what the suite expects") from None
    return Prompt(f"{name}/{i}", tuple(turns), category=str(row.get(suite.category) or "") if suite.category else "")


def _template(text: str) -> jinja2.Template:
    return jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(text)


def _free_prompt(row: dict[str, Any], id: str, where: str) -> Prompt:
    """A row of a user's file: `turns`, `prompt`, or `messages`/`conversations` (answers in it are decoded anew)."""
    category = str(row.get("category") or row.get("source") or "")
    id = str(row.get("id") or id)
    turns = row.get("turns") or ([row["prompt"]] if isinstance(row.get("prompt"), str) else None)
    if turns is not None:
        if not isinstance(turns, list) or not all(isinstance(t, str) for t in turns):
            raise DataError(f"{where}: turns is not a list of texts")
        return Prompt(id, tuple(turns), category=category)
    messages = row.get("messages") or row.get("conversations")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    ):
        raise DataError(f"{where}: no field 'prompt', 'turns' or 'messages' (a list of role and content)")
    before = tuple(m for m in messages if m["role"] == "system")
    turns = tuple(m["content"] for m in messages if m["role"] == "user")
    if not turns:
        raise DataError(f"{where}: the conversation has no user message")
    return Prompt(id, turns, messages=before, category=category)


def _select(name: str, prompts: list[Prompt], origin: dict[str, Any], limit: int | None, seed: int) -> LoadedSuite:
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit} leaves no prompt of suite {name}; give 1 or more")
    chosen = list(prompts)
    if limit is not None and limit < len(chosen):
        random.Random(seed).shuffle(chosen)
        chosen = chosen[:limit]
    digest = sha256_hex(canonical_json([dataclasses.asdict(p) for p in chosen]))
    return LoadedSuite(
        name, chosen, {**origin, "rows": len(prompts), "limit": limit, "seed": seed, "prompts_sha256": digest}
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
