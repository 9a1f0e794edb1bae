"""Write a drafter in speculators' layout, which vLLM serves as its own.

It differs from z-lab's layout in this: the transformer's fields are nested, layer ids count from the embedding
(id + 1), and the target's embedding and head come along.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from infra.errors import CheckpointError
from trainer.drafter.checkpoint import replace
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter


def speculators_json(
    cfg: DrafterConfig, target_name: str, target_architectures: list[str], dtype: str
) -> dict[str, Any]:
    """The `config.json` of a DFlash speculator.

    `sliding_window_non_causal` is true wherever no layer is causal inside the block: with false, vLLM runs even the
    full-attention layers causally, against their training.
    """
    causal = [cfg.layer_causal(i) for i in range(cfg.num_hidden_layers)]
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": cfg.block_size - 1}],
            "verifier": {"name_or_path": target_name, "architectures": target_architectures},
        },
        "transformer_layer_config": {"model_type": "qwen3", **cfg.transformer_json()},
        "draft_vocab_size": cfg.vocab_size,
        "target_hidden_size": cfg.hidden_size,
        "block_size": cfg.block_size,
        "mask_token_id": cfg.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in cfg.target_layer_ids],
        "sliding_window_non_causal": not any(causal),
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def export_speculators(
    drafter: Drafter,
    folder: str | Path,
    *,
    embedding_VD: Tensor,
    head_VD: Tensor,
    target_name: str,
    target_architectures: list[str] = (),
    dtype: torch.dtype | None = None,
) -> Path:
    """Write `config.json` and `model.safetensors` for speculators and vLLM.

    Args:
        embedding_VD, head_VD: the target's (the same tensor where tied).
        target_name: what the serving engine loads as the target.
        dtype: of the saved tensors; None = the drafter's.

    Raises:
        CheckpointError: the drafter is an ablation that no engine computes, or full layers are causal.
    """
    cfg = drafter.config
    if not cfg.published:
        raise CheckpointError(
            f"a drafter with conditioning {cfg.conditioning!r} and drafting {cfg.drafting!r} is an ablation that no "
            "engine serves; export one with kv_injection and block drafting"
        )
    if any(cfg.layer_causal(i) and cfg.layer_window(i) is None for i in range(cfg.num_hidden_layers)):
        raise CheckpointError(
            "speculators has no full-attention layers that are causal inside the block; train without causal"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in drafter.state_dict().items()}
    saved = next(iter(tensors.values())).dtype
    tensors["embed_tokens.weight"] = embedding_VD.detach().to("cpu", saved).contiguous()
    tensors["lm_head.weight"] = head_VD.detach().to("cpu", saved).clone().contiguous()  # never the same storage
    replace(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    data = speculators_json(cfg, target_name, list(target_architectures), str(saved).removeprefix("torch."))
    replace(
        folder / "config.json", lambda path: Path(path).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    )
    return folder
