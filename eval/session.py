"""What an evaluation loads: target, drafters, suites and store, each checked against the others."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch

from eval.config import EvalConfig
from eval.prompts import HELDOUT, LoadedSuite, Prompt, heldout_suite, load_suite
from eval.proposer import DrafterProposer
from eval.replay import Text, answer_spans
from features.reader import FeatureStore
from features.target import Target, load_target
from features.target_config import TargetConfig, load_target_config
from infra.config import read_toml
from infra.errors import CheckpointError, ConfigError, StoreError, TargetError
from infra.provenance import sha256_file
from trainer.drafter.checkpoint import load_drafter, read_config
from trainer.drafter.model import Drafter

RUNS, STORES = Path("runs"), Path("store")


@dataclasses.dataclass
class LoadedDrafter:
    """A drafter ready to draft. `folder` is the checkpoint's."""

    folder: Path
    model: Drafter
    proposer: DrafterProposer

    def describe(self) -> dict[str, Any]:
        cfg = self.model.config
        weights = self.folder / "model.safetensors"
        return {
            "path": str(self.folder),
            "weights_sha256": sha256_file(weights) if weights.is_file() else "",
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "block_size": cfg.block_size,
            "num_hidden_layers": cfg.num_hidden_layers,
            "target_layer_ids": list(cfg.target_layer_ids),
            "mask_token_id": cfg.mask_token_id,
            "conditioning": cfg.conditioning,
            "drafting": cfg.drafting,
        }


def checkpoint_folder(path: str | Path) -> Path:
    """`runs/demo` -> `runs/demo/drafter`; a checkpoint folder stays itself.

    Raises:
        CheckpointError: neither holds a config.json.
    """
    for folder in (Path(path) / "drafter", Path(path)):
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(
        f"{str(path)!r} is neither a run folder with drafter/ nor a checkpoint folder; give one of them"
    )


def newest_run(model: str) -> Path:
    """The run below `runs/` that last wrote a drafter for `model`.

    Raises:
        CheckpointError: there is none.
    """
    found = []
    for config in RUNS.glob("*/config.toml"):
        weights = config.parent / "drafter" / "model.safetensors"
        if weights.is_file() and read_toml(config).get("model") == model:
            found.append((weights.stat().st_mtime, config.parent))
    if not found:
        raise CheckpointError(
            f"no run below {RUNS}/ has a drafter for {model!r}; train one (make train STAGE=sft MODEL={model}) "
            "or give DRAFTER="
        )
    return max(found)[1]


def load_drafters(cfg: EvalConfig, target: Target, folders: dict[str, Path]) -> dict[str, LoadedDrafter]:
    head = target.frozen_head()
    out = {}
    for label, folder in folders.items():
        drafter = load_drafter(folder, device=target.device, dtype=target.dtype)
        if drafter.config.hidden_size != target.hidden_size or drafter.config.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"drafter {str(folder)!r} is for a target of hidden size {drafter.config.hidden_size} and "
                f"{drafter.config.vocab_size} vocabulary rows, but {cfg.model} has {target.hidden_size} and "
                f"{target.vocab_size}; give its own target as MODEL"
            )
        if cfg.verify_length and cfg.verify_length > drafter.config.block_size:
            raise ConfigError(
                f"verify_length = {cfg.verify_length} exceeds the block size {drafter.config.block_size} of "
                f"{str(folder)!r}; choose one up to it"
            )
        out[label] = LoadedDrafter(folder, drafter, DrafterProposer(drafter, head))
    return out


def load_matching_target(cfg: EvalConfig, folders: dict[str, Path]) -> Target:
    """The target, tapped where the drafters' checkpoints say (their ids win over the target file's).

    Raises:
        CheckpointError: the drafters want different taps, or ids that the target does not have.
    """
    taps = {label: read_config(folder).target_layer_ids for label, folder in folders.items()}
    if len(set(taps.values())) > 1:
        raise CheckpointError(f"the drafters tap different layers ({taps}); evaluate them one by one")
    config = load_target_config(cfg.model)
    try:
        config = TargetConfig.model_validate({**config.model_dump(), "tap_layer_ids": next(iter(taps.values()))})
        return load_target(config, device(cfg.device), getattr(torch, cfg.dtype) if cfg.dtype else None)
    except (TargetError, ValueError) as e:
        if config.tap_layer_ids == load_target_config(cfg.model).tap_layer_ids:
            raise
        raise CheckpointError(
            f"the drafter in {str(next(iter(folders.values())))!r} does not fit {cfg.model}: {e}"
        ) from e


def device(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def open_store(cfg: EvalConfig, target: Target) -> FeatureStore:
    """The store of `cfg`, or the newest of the target.

    Raises:
        StoreError: there is none, or it is of another target or other taps.
    """
    if cfg.store:
        uri = cfg.store
    else:
        found = [p.parent for p in (STORES / target.config.name).glob("*/spec.json")]
        if not found:
            raise StoreError(
                f"no feature store of {target.config.name} below {STORES}/; build one "
                f"(make features MODEL={cfg.model}) or give store="
            )
        uri = str(max(found, key=lambda p: (p / "plan.parquet").stat().st_mtime))
    store = FeatureStore.open(uri)
    spec = store.spec
    if spec.hidden_size != target.hidden_size or spec.target != target.config.name:
        raise StoreError(
            f"store {uri} holds features of {spec.target} (hidden size {spec.hidden_size}), "
            f"not of {target.config.name}; give the target's own"
        )
    return store


def load_suites(cfg: EvalConfig, store: FeatureStore | None) -> list[LoadedSuite]:
    loaded = []
    for name in cfg.suites:
        if name == HELDOUT:
            assert store is not None
            loaded.append(heldout_suite(_heldout_documents(store), limit=cfg.limit, seed=cfg.seed))
        else:
            loaded.append(load_suite(name, cfg.data or None, limit=cfg.limit, seed=cfg.seed))
    names = [s.name for s in loaded]
    if len(set(names)) < len(names):
        raise ConfigError(f"suites {', '.join(names)} contain a name twice; rename one file")
    return loaded


def _heldout_documents(store: FeatureStore):
    columns = store.documents.select(["document", "source", "split", "prompt_length"]).to_pylist()
    for row in columns:
        if row["split"] == "heldout":
            ids = store.read_array("token_ids", row["document"], 0, row["prompt_length"])
            yield {**row, "token_ids": ids.tolist()}


def store_texts(store: FeatureStore, prompts: list[Prompt], taps: tuple[int, ...]) -> list[Text]:
    """The stored documents of held-out prompts, for replay."""
    texts = []
    for prompt in prompts:
        f = store.read(prompt.id, taps=taps)
        spans = answer_spans(f.loss_mask_S)
        texts.append(Text(torch.from_numpy(f.token_ids_S), f.hidden_SLD, spans, f"document {prompt.id}"))
    return texts


class Renderer:
    """Prompts as token ids, with the target's chat template."""

    def __init__(self, target: Target, thinking: bool | None):
        self.target = target
        self.args = dict(target.config.chat_template_args)
        if thinking is not None:
            self.args["enable_thinking"] = thinking

    def prompt_ids(self, prompt: Prompt, turn: int, answers: list[list[int]]) -> list[int]:
        """Token ids up to the generation prompt of user turn `turn`, after the target's earlier `answers`.

        Answers go back into the conversation as text, without special tokens and thinking, as chat clients send them.
        """
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        tokenizer, messages = self.target.tokenizer, list(prompt.messages)
        for i in range(turn + 1):
            messages.append({"role": "user", "content": prompt.turns[i]})
            if i < turn:
                text = tokenizer.decode(answers[i], skip_special_tokens=True)
                messages.append({"role": "assistant", "content": re.sub(r"(?s)^\s*<think>.*?</think>\s*", "", text)})
        text = tokenizer.apply_chat_template(
            messages, chat_template=self.target.chat_template(), tokenize=False, add_generation_prompt=True, **self.args
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]
