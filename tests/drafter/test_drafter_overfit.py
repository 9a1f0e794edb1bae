"""The gate that catches masks, positions and labels that are off by one: learn one document, then draft it live.

Training accuracy alone does not: a train/serve mismatch shows only in cached decoding (SpecForge#455, #533).
"""

import pytest
import torch

from kernels.decay_ce import weighted_cross_entropy
from kernels.weighting import acceptance, decay, dpace, uniform
from trainer.drafter.config import DrafterConfig
from trainer.drafter.init import init_random
from trainer.drafter.model import Drafter

K, V, D, S, PROMPT = 4, 64, 32, 32, 8


def document():
    """Tokens, and features that know as much of the text as a target's would: the token and its position."""
    g = torch.Generator().manual_seed(3)
    ids_S = torch.randint(0, V - 1, (S,), generator=g)
    hidden_SLD = torch.randn(S, 2, D, generator=g)
    embedding_VD = torch.randn(V, D, generator=g)
    head_VD = torch.randn(V, D, generator=g)
    return ids_S, hidden_SLD, embedding_VD, head_VD


def config(**switches):
    fields = {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 1e4,
        "block_size": K,
        "mask_token_id": V - 1,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
    }
    return DrafterConfig(**{**fields, **switches})


def learn(drafter, weighting, steps):
    ids_S, hidden_SLD, embedding_VD, head_VD = document()
    anchors = torch.arange(PROMPT, S - 1)
    at = anchors[:, None] + torch.arange(K)
    labels_AK, mask_AK = ids_S[at.clamp_max(S - 1)], at < S
    mask_AK[:, 0] = False
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        out_AKD = drafter(
            hidden_SLD,
            torch.arange(S),
            drafter.block_inputs(labels_AK, embedding_VD),
            torch.zeros_like(anchors),
            anchors,
            anchors,
            context_embeds_SD=embedding_VD[ids_S],
        )
        loss = weighted_cross_entropy(out_AKD, head_VD, labels_AK, mask_AK, weighting)
        (loss.numerator / loss.denominator).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.numerator / loss.denominator).item())
    return losses


def live_tau(drafter):
    """Draft the document behind its prompt as a server would: cached, block after block."""
    ids_S, hidden_SLD, embedding_VD, head_VD = document()
    cache, start, lengths = drafter.new_cache(), PROMPT, []
    while start + K <= S:
        new = slice(cache.length, start)
        drafts = drafter.draft(
            ids_S[start : start + 1], hidden_SLD[new], cache, start, embedding_VD, head_VD, new_ids_S=ids_S[new]
        )[0]
        accepted = int((drafts == ids_S[start + 1 : start + K]).int().cumprod(0).sum())
        lengths.append(accepted + 1)
        start += accepted + 1
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"conditioning": "input_fusion"},
        {"conditioning": "none"},
        {"drafting": "autoregressive"},
        {"drafting": "autoregressive", "conditioning": "input_fusion"},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 12},
    ],
    ids=lambda s: "-".join(str(v) for v in s.values() if isinstance(v, str)) or ("sliding" if s else "published"),
)
def test_one_document_is_drafted_in_full(switches):
    drafter = Drafter(config(**switches))
    init_random(drafter)
    assert live_tau(drafter) < 1.5
    learn(drafter, decay(4.0), 150)
    assert live_tau(drafter) == K


@pytest.mark.parametrize("weighting", [uniform(), dpace(0.5), acceptance(0.3)], ids=["uniform", "dpace", "acceptance"])
def test_other_weightings_learn_it_too(weighting):
    drafter = Drafter(config())
    init_random(drafter)
    learn(drafter, weighting, 150)
    assert live_tau(drafter) == K


@pytest.mark.parametrize(
    "switches",
    [{"num_hidden_layers": n} for n in (1, 4, 8)]
    + [{"target_layer_ids": tuple(range(n)), "num_target_layers": 10} for n in (1, 5, 8)]
    + [{"block_size": n} for n in (2, 8, 16)],
    ids=str,
)
def test_sizes_train(switches):
    """Layers, taps and block size: parameters grow as they should, and three steps lower the loss."""
    ids_S, _, embedding_VD, head_VD = document()
    drafter = Drafter(config(**switches))
    init_random(drafter)
    cfg = drafter.config
    assert len(drafter.layers) == switches.get("num_hidden_layers", 2)
    assert drafter.fc.weight.shape == (D, D * cfg.num_taps)
    hidden_SLD = torch.randn(S, cfg.num_taps, D)
    anchors = torch.tensor([5, 9, 15])
    labels_AK = ids_S[anchors[:, None] + torch.arange(cfg.block_size)]
    mask_AK = torch.ones_like(labels_AK, dtype=torch.bool)
    mask_AK[:, 0] = False
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        inputs = drafter.block_inputs(labels_AK, embedding_VD)
        out = drafter(hidden_SLD, torch.arange(S), inputs, torch.zeros_like(anchors), anchors, anchors)
        assert out.shape == (3, cfg.block_size, D)
        loss = weighted_cross_entropy(out, head_VD, labels_AK, mask_AK, decay(7.0)).numerator
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
