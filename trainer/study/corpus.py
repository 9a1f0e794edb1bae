"""Texts of a small target and their features: what a study trains and measures on when no store is given.

Every text begins with a prompt drawn from the target at temperature 1; its answer is greedy (the training texts and one
held-out set) or drawn at temperature 1 (the other held-out set).

Legend: B texts of one batch, S tokens, L taps, D hidden size, V vocabulary.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
import torch

from features.document import DocumentFeatures
from features.plan import DOCUMENT_SCHEMA, corpus_digest, document_id, make_plan
from features.reader import FeatureStore
from features.spec import FeatureSpec, store_path
from features.target import Target
from features.teacher import compact_teacher
from features.writer import create_store
from infra.progress import Progress

STORIES = Path("../shared/models/stories260K")
BATCH = 256
PROMPT_TOKENS = (6, 24)
"""shortest and longest prompt, the first token included"""
MAX_TOKENS = 224


def target_file(folder: Path) -> Path:
    """The study's target as a TOML file: stories260K, else a tiny target trained on Python's own documentation."""
    path = folder / "target.toml"
    folder.mkdir(parents=True, exist_ok=True)
    if STORIES.is_dir():
        data = {
            "name": "stories260k",
            "dtype": "float32",
            "tap_layer_ids": [1, 2, 3],
            "mask_token_id": 0,
            "block_size": 16,
            "max_length": MAX_TOKENS,
            "chat_template": "{{ messages[-1].content }}",
            "source": {"kind": "folder", "path": str(STORIES)},
        }
    else:
        from trainer.study.tiny import trained_tiny

        data = trained_tiny(folder / "target", MAX_TOKENS)
    path.write_text(tomli_w.dumps(data))
    return path


def make_store(target: Target, root: Path, *, train: int, heldout: int, sampled: bool, seed: int) -> FeatureStore:
    """A finished store of `train` + `heldout` texts; found again when it exists.

    Args:
        sampled: answers drawn at temperature 1 instead of greedy ones.
    """
    kind = "sampled" if sampled else "greedy"
    documents = root / f"{kind}-{train}-{heldout}-{seed}.parquet"
    if not documents.is_file():
        root.mkdir(parents=True, exist_ok=True)
        rows = _texts(target, root / f"{kind}-{seed}", train, heldout, sampled, seed)
        pq.write_table(pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA), documents)
    table = pq.read_table(documents)
    spec = FeatureSpec(
        target=target.config.name,
        **target.source_identity(),
        tap_layer_ids=target.config.tap_layer_ids,
        hidden_size=target.hidden_size,
        max_length=target.config.max_length,
        corpus_digest=corpus_digest(table),
    )
    plan = make_plan(table, spec.shard_tokens)
    writer = create_store(str(root), spec, plan)
    by_id = {r["document"]: r for r in table.to_pylist()}
    for shard in writer.missing_shards():
        ids = writer.shard_plan(shard)["document"].to_pylist()
        writer.write_shard(shard, _features(target, [by_id[i] for i in ids]))
    writer.finish()
    return FeatureStore.open(store_path(str(root), spec.target, spec))


def _texts(target: Target, parts: Path, train: int, heldout: int, sampled: bool, seed: int) -> list[dict]:
    """Documents of distinct texts (two prompts may lead to one greedy text), held-out ones first.

    Batches are kept in `parts`: a killed run goes on.
    """
    rows: dict[tuple[int, ...], dict] = {}
    with Progress(train + heldout, "texts", "texts") as progress:
        for batch in itertools.count():
            part = parts / f"batch-{batch:04d}.parquet"
            if not part.is_file():
                parts.mkdir(parents=True, exist_ok=True)
                made = _batch(target, sampled, seed * 100_003 + batch)
                pq.write_table(pa.Table.from_pylist(made, schema=DOCUMENT_SCHEMA), part.with_suffix(".tmp"))
                part.with_suffix(".tmp").rename(part)
            for row in pq.read_table(part).to_pylist():
                if len(rows) < train + heldout:
                    row["split"] = "heldout" if len(rows) < heldout else "train"
                    rows.setdefault(tuple(row["token_ids"]), row)
            progress.update(len(rows) - progress.done)
            if len(rows) == train + heldout:
                return list(rows.values())


def _batch(target: Target, sampled: bool, seed: int) -> list[dict]:
    generator = torch.Generator(device=target.device).manual_seed(seed)
    length = int(torch.randint(*PROMPT_TOKENS, (1,), generator=generator, device=target.device))
    prompts = _continue(target, _first(target), length - 1, 1.0, generator)
    texts = _continue(target, prompts, target.config.max_length - length, float(sampled), generator)
    out = []
    for tokens in texts.cpu().numpy().astype(np.int32):
        stops = np.flatnonzero(np.isin(tokens[1:], list(target.stop_ids))) + 1
        end = int(stops[0]) + 1 if len(stops) else len(tokens)
        if end < length + 8:
            continue  # ended within the prompt or right behind it
        mask = np.zeros(end, np.uint8)
        mask[length:] = 1
        out.append(
            {
                "document": document_id(tokens[:end], mask),
                "token_ids": tokens[:end].tolist(),
                "loss_mask": mask.tolist(),
                "source": "study",
                "split": "train",
                "prompt_length": length,
            }
        )
    return out


def _first(target: Target) -> torch.Tensor:
    """The first token of a text: the tokenizer's beginning, else any byte."""
    bos = target.tokenizer.bos_token_id
    if bos is not None:
        return torch.full((BATCH, 1), bos, device=target.device)
    return torch.arange(BATCH, device=target.device)[:, None] % 26 + 65


@torch.inference_mode()
def _continue(target: Target, ids_BS: torch.Tensor, count: int, temperature: float, generator) -> torch.Tensor:
    """`count` more tokens of every text; texts that stop go on and are cut later."""
    cache, new, parts = target.new_cache(), ids_BS, [ids_BS]
    for _ in range(count):
        logits_BV = target.forward(new, cache=cache, logits="last", taps=False).logits_BSV[:, -1].float()
        if temperature:
            new = torch.multinomial(torch.softmax(logits_BV / temperature, -1), 1, generator=generator)
        else:
            new = logits_BV.argmax(-1, keepdim=True)
        parts.append(new)
    return torch.cat(parts, 1)


def _features(target: Target, rows: list[dict]) -> Iterator[DocumentFeatures]:
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        longest = max(len(r["token_ids"]) for r in batch)
        ids_BS = torch.zeros(len(batch), longest, dtype=torch.long)
        for i, r in enumerate(batch):
            ids_BS[i, : len(r["token_ids"])] = torch.tensor(r["token_ids"])
        out = target.forward(ids_BS.to(target.device), logits="none")  # causal: padding behind a text changes nothing
        tokens = [np.array(r["token_ids"], np.int32) for r in batch]
        masks = [np.array(r["loss_mask"], np.uint8) for r in batch]
        teacher = compact_teacher(out.last_hidden_BSD, target.logits, tokens, masks)
        for i, (r, (logprob_S, _, _)) in enumerate(zip(batch, teacher, strict=True)):
            hidden_SLD = out.hidden_BSLD[i, : len(tokens[i])].cpu()
            yield DocumentFeatures(r["document"], tokens[i], masks[i], hidden_SLD, logprob_S)
