"""A small drafter and a packed training row with every awkward case in it."""

from types import SimpleNamespace

import pytest
import torch

from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter


def small_config(**changes) -> DrafterConfig:
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 1e4,
        "block_size": 6,
        "mask_token_id": 96,
        "target_layer_ids": (1, 3, 5),
        "num_target_layers": 8,
        "max_position_embeddings": 512,
    }
    return DrafterConfig(**{**fields, **changes})


def small_drafter(seed: int = 0, dtype=torch.float32, **changes) -> Drafter:
    """Weights large enough that every part of the model changes the output."""
    drafter = Drafter(small_config(**changes)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in drafter.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * p.shape[-1] ** -0.5 if p.ndim == 2 else 1 + 0.2 * noise)
    return drafter


def packed_row(cfg: DrafterConfig, lengths=(13, 1, 22), padding=4, seed=1, dtype=torch.float32) -> SimpleNamespace:
    """Documents one behind the other; anchors at position 0, next to each other, at the end; one invalid block."""
    g = torch.Generator().manual_seed(seed)
    S = sum(lengths) + padding
    positions, document = torch.zeros(S, dtype=torch.int64), torch.full((S,), -1)
    anchors = []  # document, first row, position
    row = 0
    for d, n in enumerate(lengths):
        positions[row : row + n] = torch.arange(n)
        document[row : row + n] = d
        anchors += [(d, row, p) for p in sorted({0, 1, n // 2, n // 2 + 1, n - 1} & set(range(n)))]
        row += n
    anchors.insert(3, (0, 0, 7))  # the invalid one
    doc, first, position = (torch.tensor(t) for t in zip(*anchors, strict=True))
    valid = torch.ones(len(anchors), dtype=torch.bool)
    valid[3] = False
    tokens = torch.randint(0, cfg.vocab_size - 1, (S + cfg.block_size,), generator=g)
    return SimpleNamespace(
        hidden_SLD=torch.randn(S, cfg.num_taps, cfg.hidden_size, generator=g, dtype=dtype),
        token_ids_S=tokens[:S],
        positions_S=positions,
        document_S=document,
        context_start_A=first,
        context_end_A=first + position,
        anchor_position_A=position,
        anchor_document_A=doc,
        anchor_valid_A=valid,
        labels_AK=tokens[(first + position)[:, None] + torch.arange(cfg.block_size)],
        embedding_VD=torch.randn(cfg.vocab_size, cfg.hidden_size, generator=g, dtype=dtype),
        head_VD=torch.randn(cfg.vocab_size, cfg.hidden_size, generator=g, dtype=dtype),
    )


def run_packed(drafter: Drafter, row: SimpleNamespace) -> torch.Tensor:
    embeds = row.embedding_VD[row.token_ids_S] if drafter.config.needs_context_embeds else None
    return drafter(
        row.hidden_SLD,
        row.positions_S,
        drafter.block_inputs(row.labels_AK, row.embedding_VD),
        row.context_start_A,
        row.context_end_A,
        row.anchor_position_A,
        row.anchor_valid_A,
        context_embeds_SD=embeds,
    )


@pytest.fixture
def tools():
    return SimpleNamespace(config=small_config, drafter=small_drafter, row=packed_row, run=run_packed)
