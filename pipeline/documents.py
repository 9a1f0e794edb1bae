"""From a corpus to documents: read, regenerate, render. What is finished is found again by its digests.

data/<target>/<corpus>-<digest12>/
  documents.parquet   features.plan.DOCUMENT_SCHEMA
  rejects.parquet     source, file, line, stage, reason, key
  documents.json      the record, written last: digest of the inputs, counts, figures on the answers
  config.toml
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from features.plan import DOCUMENT_SCHEMA, document_id
from infra.config import save_toml
from infra.errors import DataError
from infra.progress import Progress
from infra.provenance import provenance, write_json
from pipeline.config import FeaturesConfig
from pipeline.conversation import Conversation, Reject
from pipeline.corpus import inputs_digest, read_corpus
from pipeline.front import TargetFront
from pipeline.regenerate import Dialogue, regenerate
from pipeline.render import BadSample, Renderer
from pipeline.responses import load_json

REJECTS_SCHEMA = pa.schema(
    [(n, pa.int64() if n == "line" else pa.string()) for n in ("source", "file", "line", "stage", "reason", "key")]
)


def build_documents(cfg: FeaturesConfig, front: TargetFront) -> tuple[pa.Table, dict[str, Any]]:
    """(documents, record); from the work folder where they are there already.

    Raises:
        DataError: unreadable sources, or nothing usable in them.
    """
    folder = cfg.work_folder
    inputs = {"files": inputs_digest(cfg), **front.source_identity()}
    record = load_json(folder / "documents.json")
    if record is not None and record["inputs"] == inputs:
        return pq.read_table(folder / "documents.parquet", schema=DOCUMENT_SCHEMA), record
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "documents.json").unlink(missing_ok=True)
    save_toml(cfg, folder / "config.toml")

    rejects: list[Reject] = []
    conversations: list[Conversation] = []
    for item in read_corpus(cfg):
        (rejects if isinstance(item, Reject) else conversations).append(item)
    renderer = Renderer(cfg.target, front.tokenizer, front.chat_template(), front.stop_ids, cfg.render.min_supervised)
    answers: dict[str, Any] = {}
    if cfg.regenerate.engine == "none":
        dialogues = [Dialogue(c, list(c.messages)) for c in conversations]
    else:
        dialogues, bad, answers = regenerate(cfg, front, renderer, conversations)
        rejects += bad
    rows, bad = _render(cfg, renderer, dialogues)
    rejects += bad
    _write(pa.Table.from_pylist([asdict(r) for r in rejects], schema=REJECTS_SCHEMA), folder / "rejects.parquet")
    if not rows:
        raise DataError(
            f"none of the {len(conversations) + len(rejects)} rows of corpus {cfg.name!r} became a document; "
            f"see the reasons in {folder / 'rejects.parquet'}"
        )
    documents = pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA)
    _write(documents, folder / "documents.parquet")
    supervised = sum(int(r["loss_mask"].sum()) for r in rows)
    tokens = sum(len(r["token_ids"]) for r in rows)
    record = {
        "inputs": inputs,
        "counts": {
            "conversations": len(conversations),
            "documents": len(rows),
            "rejects": len(rejects),
            "reject_reasons": _by_stage(rejects),
            "tokens": tokens,
            "supervised_tokens": supervised,
            "splits": {s: sum(r["split"] == s for r in rows) for s in ("train", "heldout")},
            "sources": _count(r["source"] for r in rows),
        },
        "answers": answers,
        "provenance": provenance(),
    }
    # failed requests are worth another try: without the record the next run asks for them again
    if not any(r.stage == "regenerate" and r.reason.startswith("request failed") for r in rejects):
        write_json(folder / "documents.json", record)
    return documents, record


def _render(
    cfg: FeaturesConfig, renderer: Renderer, dialogues: list[Dialogue]
) -> tuple[list[dict[str, Any]], list[Reject]]:
    rows: dict[str, dict[str, Any]] = {}
    rejects = []
    with Progress(len(dialogues), "render", "conversations", enabled=len(dialogues) > 5000) as progress:
        for d in dialogues:
            c = d.conversation
            answers = None if cfg.regenerate.engine == "none" else d.answers
            try:
                if cfg.render.rows == "turn":
                    rendered = renderer.turns(tuple(d.messages), c.tools, answers)
                else:
                    rendered = [renderer.conversation(tuple(d.messages), c.tools, answers)]
            except BadSample as e:
                rejects.append(Reject(c.source, c.file, c.line, "render", str(e), c.key))
                rendered = []
            for r in rendered:
                document = document_id(r.token_ids_S, r.loss_mask_S)
                if document in rows:
                    rejects.append(
                        Reject(c.source, c.file, c.line, "render", f"same tokens as document {document}", c.key)
                    )
                    continue
                rows[document] = {
                    "document": document,
                    "token_ids": r.token_ids_S,
                    "loss_mask": r.loss_mask_S,
                    "source": c.source,
                    "split": c.split,
                    "prompt_length": r.prompt_length,
                }
            progress.update(1, rejects=len(rejects))
    return list(rows.values()), rejects


def _write(table: pa.Table, path: Path) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, aside, compression="zstd")
    aside.replace(path)


def _count(items: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return dict(sorted(counts.items()))


def _by_stage(rejects: list[Reject]) -> dict[str, int]:
    return _count(r.stage for r in rejects)
