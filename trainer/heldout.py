"""Replay τ on held-out documents of the store, while training: what decides which drafter is the best.

Legend: S tokens of a document, K block size.
"""

import dataclasses
import re

import numpy as np
import torch

from eval.metrics import Cycles, by_context_length, conditional_acceptance, tau_pooled
from eval.replay import Text, answer_spans, matches_of, walk
from features.reader import FeatureStore
from features.target import FrozenHead
from trainer.engine import World, whole_parameters

MOST_SOURCES = 24
"""sources with a metric of their own, those with most cycles first"""


@dataclasses.dataclass(frozen=True)
class Heldout:
    """What one replay found; equal on every rank.

    Attributes:
        tau: tokens per cycle at verify length K, bonus included, over all documents; NaN without a cycle.
        metrics: MLflow key below `heldout/` -> value: `replay_tau_pooled`, `tau_at_b04` (verify length 4),
            `acceptance_at_02` (share of second drafts that stood where the first did), `tau_source/<source>`,
            `tau_context/<tokens before the anchor>`.
    """

    tau: float
    metrics: dict[str, float]


def heldout_rows(store: FeatureStore, count: int) -> list[int]:
    """Up to `count` held-out documents, spread evenly over the store, the same ones on every rank and at every call."""
    rows = [i for i, split in enumerate(store.documents["split"].to_pylist()) if split == "heldout"]
    if count >= len(rows):
        return rows
    return [rows[i] for i in np.linspace(0, len(rows) - 1, count).round().astype(int)] if count else []


def replay_heldout(engine, store: FeatureStore, rows: list[int], head: FrozenHead, world: World) -> Heldout:
    """Every rank finds the leading right drafts N(p) of its share of the documents; all ranks walk over all of them.

    One forward pass per document serves every verify length: N(p) does not depend on it.
    """
    mine: dict[int, tuple[np.ndarray, tuple[tuple[int, int], ...]]] = {}
    with whole_parameters(engine) as drafter:
        K, was_training = drafter.config.block_size, drafter.training
        drafter.eval()
        own = rows[world.rank :: world.size]
        texts = (store_text(store, row) for row in own)
        for row, (text, found_S) in zip(own, matches_of(drafter, head, texts), strict=True):
            mine[row] = (found_S.astype(np.int8), text.answers)  # K <= 64
        drafter.train(was_training)
    found = {row: part for ranks in world.gather(mine) for row, part in ranks.items()}
    cycles = {b: [walk(found[row][0], found[row][1], b) for row in rows] for b in range(2, K + 1)}
    sources = store.documents["source"].take(rows).to_pylist()
    return Heldout(_tau(cycles[K]), summary(cycles, sources))


def summary(cycles: dict[int, list[Cycles]], sources: list[str]) -> dict[str, float]:
    """`Heldout.metrics` from the cycles of each document by verify length, the largest of which is K."""
    K = max(cycles)
    together = Cycles.concat(cycles[K])
    out = {"replay_tau_pooled": _tau(cycles[K])}
    out |= {f"tau_at_b{b:02d}": _tau(parts) for b, parts in cycles.items()}
    for k, share in enumerate(conditional_acceptance(together, K), 1):
        if share is not None:
            out[f"acceptance_at_{k:02d}"] = share
    by_source: dict[str, list[Cycles]] = {}
    for source, part in zip(sources, cycles[K], strict=True):
        by_source.setdefault(source, []).append(part)
    largest = sorted(by_source, key=lambda s: -sum(map(len, by_source[s])))[:MOST_SOURCES]
    out |= {f"tau_source/{_key(s)}": _tau(by_source[s]) for s in largest}
    out |= {f"tau_context/{bucket}": part["tau_pooled"] for bucket, part in by_context_length(together).items()}
    return {key: value for key, value in out.items() if value == value}


def _tau(parts: list[Cycles]) -> float:
    return tau_pooled([int(c.emitted.sum()) for c in parts], [len(c) for c in parts])


def _key(source: str) -> str:
    """A source's name with the characters that MLflow allows in a metric's."""
    return re.sub(r"[^\w\-. :/]", "_", source)


def store_text(store: FeatureStore, row: int) -> Text:
    """A stored document as replay takes it."""
    features = store.read(row)
    return Text(
        torch.as_tensor(features.token_ids_S),
        features.hidden_SLD,
        answer_spans(np.asarray(features.loss_mask_S)),
        f"document {row}",
    )
