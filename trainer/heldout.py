"""Replay τ on held-out documents of the store, while training: what decides which drafter is the best."""

import numpy as np
import torch

from eval.replay import Text, answer_spans, replay
from features.reader import FeatureStore
from features.target import FrozenHead
from trainer.engine import World, whole_parameters


def heldout_rows(store: FeatureStore, count: int) -> list[int]:
    """Up to `count` held-out documents, spread evenly over the store, the same ones on every rank and at every call."""
    rows = [i for i, split in enumerate(store.documents["split"].to_pylist()) if split == "heldout"]
    if count >= len(rows):
        return rows
    return [rows[i] for i in np.linspace(0, len(rows) - 1, count).round().astype(int)] if count else []


def replay_heldout(engine, store: FeatureStore, rows: list[int], head: FrozenHead, world: World) -> float:
    """Pooled τ (tokens per cycle, bonus included) at verify length K; every rank replays its share."""
    totals = torch.zeros(2, dtype=torch.float64)
    with whole_parameters(engine) as drafter:
        texts = (_text(store, row) for row in rows[world.rank :: world.size])
        for cycles in replay(drafter, head, texts)[drafter.config.block_size]:
            totals += torch.tensor([float(cycles.emitted.sum()), float(len(cycles.emitted))])
    tokens, count = world.sum(totals).tolist()
    return tokens / count if count else float("nan")


def _text(store: FeatureStore, row: int) -> Text:
    features = store.read(row)
    return Text(
        torch.as_tensor(features.token_ids_S),
        features.hidden_SLD,
        answer_spans(np.asarray(features.loss_mask_S)),
        f"document {row}",
    )
