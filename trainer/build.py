"""From a recipe to a store that fits, and a drafter that fits both."""

import json
from pathlib import Path

import torch

from features.reader import FeatureStore
from features.target_config import TargetConfig
from features.target_source import target_folder, weights_digest
from infra.errors import SpecMismatch, StoreError
from trainer.config import SftConfig
from trainer.drafter.checkpoint import load_drafter
from trainer.drafter.config import DrafterConfig
from trainer.drafter.init import WARM_START_TYPES, init_from_target, init_random
from trainer.drafter.model import Drafter

STORES = Path("store")


def find_store(cfg: SftConfig, target: TargetConfig) -> str:
    """The recipe's store, else the newest finished one of the target below `store/`.

    Raises:
        StoreError: there is none; the sentence says which command makes one.
    """
    if cfg.data.store:
        return cfg.data.store
    finished = sorted((STORES / target.name).glob("*/manifest.json"), key=lambda p: p.stat().st_mtime)
    if not finished:
        raise StoreError(
            f"no finished feature store for target {target.name!r} below {STORES / target.name}; run make features "
            f"MODEL={cfg.model}, or set data.store"
        )
    return str(finished[-1].parent)


def check_store(store: FeatureStore, cfg: SftConfig, target: TargetConfig) -> None:
    """The store was made by this target with these settings, and is whole.

    Raises:
        SpecMismatch: another target, weights, taps, hidden size or template arguments.
        StoreError: shards are missing.
    """
    spec, folder = store.spec, target_folder(target)
    for what, stored, wanted in (
        ("target", spec.target, target.name),
        ("weights_digest", spec.weights_digest, weights_digest(folder)),
        ("hidden_size", spec.hidden_size, _text_config(folder)["hidden_size"]),
        ("tap_layer_ids", tuple(spec.tap_layer_ids), target.tap_layer_ids),
        ("chat_template_args", spec.chat_template_args, target.chat_template_args),
    ):
        if stored != wanted:
            raise SpecMismatch(
                f"store {store.uri} was made with {what} {stored!r}, but target file {cfg.model!r} says {wanted!r}; "
                f"use the store's own target file or run make features MODEL={cfg.model}"
            )
    if cfg.loss.soft_share and not spec.top_k:
        raise SpecMismatch(
            f"loss.soft_share = {cfg.loss.soft_share} needs the target's top-k distribution, which store {store.uri} "
            "does not have; run make features with ARGS=prefill.top_k=32, or set loss.soft_share=0"
        )
    if not store.complete:
        raise StoreError(
            f"store {store.uri} lacks {len(store.missing_shards)} shards; run make features MODEL={cfg.model} again, "
            "which computes only these"
        )


def build_drafter(cfg: SftConfig, target: TargetConfig, store: FeatureStore, seed: int) -> Drafter:
    """A drafter for the store's features: loaded, or new and initialised from `seed`; fp32 on the CPU, trainable.

    Raises:
        SpecMismatch: a loaded drafter was trained on other taps, another hidden size, vocabulary or mask token.
    """
    folder = target_folder(target)
    if cfg.drafter.start_from:
        drafter = load_drafter(cfg.drafter.start_from, dtype=torch.float32)
        for what, has, wanted in (
            ("target_layer_ids", drafter.config.target_layer_ids, tuple(store.spec.tap_layer_ids)),
            ("hidden_size", drafter.config.hidden_size, store.spec.hidden_size),
            ("vocab_size", drafter.config.vocab_size, _text_config(folder)["vocab_size"]),
            ("mask_token_id", drafter.config.mask_token_id, target.mask_token_id),
        ):
            if has != wanted:
                raise SpecMismatch(
                    f"drafter {cfg.drafter.start_from} has {what} {has!r}, but the store of {target.name} has "
                    f"{wanted!r}; use a drafter of this target, or a target file with the drafter's settings"
                )
        return drafter
    model = json.loads((folder / "config.json").read_text())
    config = DrafterConfig.for_target(
        model,
        num_hidden_layers=cfg.drafter.num_hidden_layers,
        block_size=cfg.drafter.block_size or target.block_size,
        mask_token_id=target.mask_token_id,
        target_layer_ids=target.tap_layer_ids,
        conditioning=cfg.drafter.conditioning,
    )
    drafter = Drafter(config)
    warm = cfg.drafter.init == "target" or (cfg.drafter.init == "auto" and model["model_type"] in WARM_START_TYPES)
    if warm:
        init_from_target(drafter, folder, _sample_features(store), seed)
    else:
        init_random(drafter, seed)
    return drafter


def _text_config(folder: Path) -> dict:
    """config.json of the language model, which multimodal targets nest."""
    model = json.loads((folder / "config.json").read_text())
    return model.get("text_config", model)


def _sample_features(store: FeatureStore) -> torch.Tensor:
    """hidden_SLD of the first training document: what the initialisation scales itself by."""
    row = store.documents["split"].to_pylist().index("train")
    return store.read(row).hidden_SLD.float()
