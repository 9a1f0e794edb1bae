"""Drafters on disk: z-lab's layout (`config.json` + `model.safetensors`, 58 tensors for five layers) both ways, and
speculators' layout for reading (`trainer.drafter.export` writes it).

The target's embedding and head are never saved. Ids, block size and layer types are read, never recomputed.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from infra.errors import CheckpointError
from trainer.drafter.config import DrafterConfig, refuse_other_layouts
from trainer.drafter.model import Drafter

# Tensors of the target that speculators' checkpoints carry along.
BORROWED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
VOCABULARY_MAPS = ("t2d", "d2t")


def save_drafter(drafter: Drafter, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write `config.json` and `model.safetensors`; the files appear whole or not at all.

    Args:
        dtype: of the saved tensors; None = the parameters' own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in drafter.state_dict().items()}
    name = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    replace(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    text = json.dumps(drafter.config.to_zlab_json(name), indent=2, sort_keys=True) + "\n"
    replace(folder / "config.json", lambda path: Path(path).write_text(text))
    return folder


def replace(path: Path, write) -> None:
    """Write through a temporary file beside `path`, so that a reader never sees half of it."""
    part = path.with_name(path.name + ".part")
    write(str(part))
    os.replace(part, path)


def read_config(folder: str | Path) -> DrafterConfig:
    """The configuration of a checkpoint in either layout.

    Raises:
        CheckpointError: absent, unreadable, or of a layout that computes something else (sample-from-anchor, DSpark,
            DFlash2, reduced vocabulary).
    """
    path = Path(folder) / "config.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{str(path)!r} does not exist; give the folder of a drafter checkpoint") from None
    except json.JSONDecodeError as e:
        raise CheckpointError(
            f"{str(path)!r} is not valid JSON ({e}); download or export the checkpoint again"
        ) from None
    return _from_speculators(data) if "transformer_layer_config" in data else DrafterConfig.from_zlab_json(data)


def load_drafter(
    folder: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> Drafter:
    """A drafter from a z-lab or speculators checkpoint, in eval mode.

    Args:
        dtype: of the parameters; None = as saved.

    Raises:
        CheckpointError: see `read_config`; or tensors are missing, unknown, of another shape, or not finite.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = _read_tensors(folder)
    for name in [n for n in tensors if n in (*BORROWED, *VOCABULARY_MAPS)]:
        del tensors[name]
    with torch.device("meta"):
        drafter = Drafter(config)
    expected = drafter.state_dict()
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is not the drafter of its config.json: missing {missing[:3] or 'nothing'}, "
            f"unknown {unknown[:3] or 'nothing'}; export it again"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"tensor {name!r} of checkpoint {str(folder)!r} has shape {tuple(tensor.shape)} and its config.json "
                f"says {tuple(expected[name].shape)}; export it again"
            )
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"tensor {name!r} of checkpoint {str(folder)!r} has values that are not finite; export it again"
            )
    drafter = Drafter(config) if dtype is None else Drafter(config).to(dtype)
    if dtype is None:
        drafter = drafter.to(next(iter(tensors.values())).dtype)
    drafter.load_state_dict(tensors)
    return drafter.to(device).eval()


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} has no .safetensors file; give the folder of a drafter checkpoint"
        )
    out: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as f:
                out.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
        except Exception as e:  # safetensors has one exception type of its own for every kind of damage
            raise CheckpointError(f"{str(file)!r} is damaged ({e}); download or export the checkpoint again") from None
    return out


def _from_speculators(data: dict[str, Any]) -> DrafterConfig:
    """speculators' config.json: ids are shifted by one there, the transformer's fields are nested."""
    layer = dict(data["transformer_layer_config"])
    kind = data.get("speculators_model_type", "dflash")
    if kind != "dflash":
        raise CheckpointError(f"checkpoint is a {kind!r} speculator, not 'dflash'; load a DFlash drafter")
    refuse_other_layouts({**data, "vocab_size": layer.get("vocab_size")}, {})
    ids = data.get("aux_hidden_state_layer_ids")
    if not ids:
        raise CheckpointError(
            "config.json of the drafter has no aux_hidden_state_layer_ids; add the ones it was trained with"
        )
    sliding = "sliding_attention" in (layer.get("layer_types") or ())
    number = data.get("num_target_layers")  # not part of the format: at least one layer follows the last tap
    return DrafterConfig.from_zlab_json(
        {
            **layer,
            "block_size": data.get("block_size"),
            "num_target_layers": number or max(ids) + 1,
            "dflash_config": {
                "mask_token_id": data.get("mask_token_id"),
                "target_layer_ids": [i - 1 for i in ids],
                "causal": False if sliding and data.get("sliding_window_non_causal") else None,
            },
        }
    )
