"""The target: a frozen language model, its taps, and the embedding and head that the drafter borrows.

Legend: B sequences, S tokens, L tapped layers, D hidden size, V rows of the vocabulary.
"""

import copy
import dataclasses
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from features.target_config import HubSource, TargetConfig
from features.target_source import target_folder, weights_digest
from infra.errors import TargetError
from infra.provenance import canonical_json, sha256_hex

EMBEDDING_NAMES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")
HEAD_NAME = "lm_head.weight"


@dataclasses.dataclass
class TargetOutput:
    """One pass of the target.

    Attributes:
        last_hidden_BSD: after the final norm; `logits = head(last_hidden)`.
        hidden_BSLD: outputs of the tapped layers, before the final norm; None when not asked for.
        logits_BSV: in the model's dtype; S = 1 for `logits="last"`; None for `"none"`.
        cache: the KV cache, extended.
    """

    last_hidden_BSD: Tensor
    hidden_BSLD: Tensor | None
    logits_BSV: Tensor | None
    cache: Any


@dataclasses.dataclass
class FrozenHead:
    """The target's embedding and head, which the drafter uses and never trains or saves.

    Attributes:
        embedding_VD, head_VD: the same storage when the target ties them.
        stop_ids: tokens that end a text.
    """

    embedding_VD: Tensor
    head_VD: Tensor
    stop_ids: frozenset[int] = frozenset()

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "FrozenHead":
        embedding = self.embedding_VD.to(device=device, dtype=dtype)
        tied = self.head_VD is self.embedding_VD
        return FrozenHead(embedding, embedding if tied else self.head_VD.to(device=device, dtype=dtype), self.stop_ids)


class Target:
    """A loaded target in eval mode without gradients.

    Attributes:
        config: the target file.
        model, tokenizer: transformers' objects.
        num_layers, hidden_size, vocab_size: N, D and V (rows of the embedding, padding rows included).
        stop_ids: end-of-sequence ids of the generation config and the tokenizer.
    """

    def __init__(self, config: TargetConfig, model: nn.Module, tokenizer: Any, folder: Path | None = None):
        self.config, self.tokenizer, self.folder = config, tokenizer, folder
        self.model = model.eval().requires_grad_(False)
        self.decoder = model.get_decoder()
        self.layers = self.decoder.layers
        text = model.config.get_text_config()
        self.text_config = text
        self.num_layers, self.hidden_size = len(self.layers), text.hidden_size
        self.embedding_VD = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        if head is None:
            raise TargetError(f"target {config.name} has no language-model head; use a causal language model")
        self.head_VD = head.weight
        self.vocab_size = self.embedding_VD.shape[0]
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        # renamed within transformers 5
        self._cache_name = (
            "cache" if "cache" in inspect.signature(self.decoder.forward).parameters else "past_key_values"
        )
        self.stop_ids = stop_ids(model.generation_config, tokenizer)
        check_target(config, self.num_layers, self.vocab_size)

    @property
    def device(self) -> torch.device:
        return self.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VD.dtype

    def replica(self) -> "Target":
        """The same weights in modules of their own, for a pass in another thread at the same time: hooks, and rotary
        tables that some models adapt to the length at hand, are a module's own."""
        shared = {id(p): p for p in self.model.parameters()}
        return Target(self.config, copy.deepcopy(self.model, shared), self.tokenizer, self.folder)

    def frozen_head(self) -> FrozenHead:
        return FrozenHead(self.embedding_VD, self.head_VD, self.stop_ids)

    def new_cache(self):
        """An empty KV cache; `cache.crop(n)` forgets everything from position n on."""
        from transformers import DynamicCache

        return DynamicCache(config=self.text_config)

    def logits(self, last_hidden_BSD: Tensor) -> Tensor:
        """The head (with Gemma's soft cap where the target has one) on hidden states after the final norm."""
        logits = nn.functional.linear(last_hidden_BSD.to(self.head_VD.device), self.head_VD).to(last_hidden_BSD.device)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    @torch.inference_mode()
    def forward(
        self,
        ids_BS: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        logits: Literal["all", "last", "none"] = "all",
        taps: bool = True,
    ) -> TargetOutput:
        """One pass over `ids_BS` (int64), after what the cache holds.

        Args:
            attention_mask: [B, cached + S], 0 at padding; None where nothing is padded.
            position_ids: [B, S]; None counts on from the cache.
            taps: collect the outputs of the tapped layers (a copy of S·L·D values).
        Returns:
            tensors on the device of `ids_BS`, wherever the layers are.
        """
        with self.taps() if taps else _none() as collected:
            out = self.decoder(
                input_ids=ids_BS,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=cache is not None,
                **{self._cache_name: cache},
            )
        last = out.last_hidden_state.to(ids_BS.device)
        hidden = torch.stack([collected[i].to(ids_BS.device) for i in self.config.tap_layer_ids], 2) if taps else None
        computed = None
        if logits != "none":
            computed = self.logits(last if logits == "all" else last[:, -1:].contiguous())  # strided: 4 x slower
        return TargetOutput(last, hidden, computed, cache)

    @contextmanager
    def taps(self) -> Iterator[dict[int, Tensor]]:
        """Within the block, every pass puts layer id -> output of that decoder layer into the yielded dictionary.

        The output of 0-based layer k is `output_hidden_states[k + 1]` of transformers (entry 0 is the embedding).
        """
        collected: dict[int, Tensor] = {}

        def keep(layer_id: int):
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                collected[layer_id] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.layers[i].register_forward_hook(keep(i)) for i in self.config.tap_layer_ids]
        try:
            yield collected
        finally:
            for handle in handles:
                handle.remove()

    def chat_template(self) -> str:
        """The template in use: the target file's, else the tokenizer's.

        Raises:
            TargetError: neither has one.
        """
        template = self.config.chat_template or self.tokenizer.chat_template
        if not template:
            raise TargetError(f"target {self.config.name} has no chat template; give one as chat_template in its file")
        return template if isinstance(template, str) else canonical_json(template)

    def source_identity(self) -> dict[str, str]:
        """What the store's fingerprint says of the target: repository, revision, and digests of content."""
        source = self.config.source
        match source:
            case HubSource():
                repo, revision = source.repo, self.folder.name if self.folder else source.revision
            case _:
                repo = getattr(source, "requirement", None) or getattr(source, "path", None) or source.kind
                revision = getattr(source, "sha256", "")[:12]
        return {
            "source_repo": repo,
            "source_revision": revision,
            "weights_digest": weights_digest(self.folder) if self.folder else "",
            "tokenizer_digest": tokenizer_digest(self.tokenizer),
            "chat_template_digest": sha256_hex(self.chat_template()),
        }


def load_target(
    cfg: TargetConfig, device: str | torch.device | dict[str, Any] = "cpu", dtype: torch.dtype | None = None
) -> Target:
    """Load model and tokenizer, and check the target file against them.

    Args:
        device: where all of it goes; `"auto"` spreads the layers over the visible GPUs, and a dictionary (module name
            -> device) says how: transformers' `device_map`. Inputs go to `Target.device`, where outputs come back.
    Raises:
        TargetError: source unreachable or damaged, tap ids or mask id that the model does not have.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    folder = target_folder(cfg)
    _check_folder(cfg, folder)
    dtype = dtype or getattr(torch, cfg.dtype)
    if cfg.source.kind != "hub":  # a local read of seconds: its bar would be the only noise on the terminal
        logging.disable_progress_bar()
    spread = {"device_map": device} if device == "auto" or isinstance(device, dict) else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=cfg.trust_remote_code, **spread
        )
    except (OSError, ValueError) as e:
        raise TargetError(f"target {cfg.name} in {folder} cannot be loaded ({e}); check the folder's files") from e
    return Target(cfg, model if spread else model.to(device), load_tokenizer(cfg, folder), folder)


def load_tokenizer(cfg: TargetConfig, folder: Path | None = None) -> Any:
    from transformers import AutoTokenizer

    folder = folder or target_folder(cfg)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)


def load_frozen_head(
    cfg: TargetConfig, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> FrozenHead:
    """Embedding and head alone, read from the safetensors files: 1.2 GB instead of 16 GB for Qwen3-8B.

    Raises:
        TargetError: an untied target without head, or no embedding under a known name.
    """
    from safetensors import safe_open
    from transformers import AutoConfig, GenerationConfig

    folder = target_folder(cfg)
    _check_folder(cfg, folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    else:
        where = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as f:
                where |= {name: file for name in f.keys()}  # noqa: SIM118

    def read(name: str) -> Tensor:
        with safe_open(where[name], "pt") as f:
            return f.get_tensor(name)

    embedding_name = next((n for n in EMBEDDING_NAMES if n in where), None)
    if embedding_name is None:
        raise TargetError(f"target {cfg.name} has no tensor named {' or '.join(EMBEDDING_NAMES)} in {folder}")
    embedding = read(embedding_name)
    text = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code).get_text_config()
    if HEAD_NAME in where:
        head = read(HEAD_NAME)
    elif text.tie_word_embeddings:
        head = embedding
    else:
        raise TargetError(
            f"target {cfg.name} has no {HEAD_NAME} and does not tie it to the embedding; its copy is incomplete"
        )
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:
        generation = None
    return FrozenHead(embedding, head, stop_ids(generation, load_tokenizer(cfg, folder))).to(
        device, dtype or getattr(torch, cfg.dtype)
    )


def check_target(cfg: TargetConfig, num_layers: int, vocab_size: int) -> None:
    """Tap ids within the model, mask id within its embedding.

    Raises:
        TargetError: one of them is not.
    """
    last = cfg.tap_layer_ids[-1]
    if last >= num_layers:
        raise TargetError(
            f"target {cfg.name}: tap_layer_ids has {last}, but the model has layers 0 to {num_layers - 1}; "
            f"use ids up to {num_layers - 2}"
        )
    if last == num_layers - 1:
        raise TargetError(
            f"target {cfg.name}: tap_layer_ids has the last layer {last}, whose output engines take before or after "
            f"the final norm; use ids up to {num_layers - 2}"
        )
    if cfg.mask_token_id >= vocab_size:
        raise TargetError(
            f"target {cfg.name}: mask_token_id {cfg.mask_token_id} is outside the embedding's {vocab_size} rows; "
            f"choose an unused row below {vocab_size}"
        )


def stop_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for eos in (getattr(generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        if eos is not None:
            ids |= {int(i) for i in (eos if isinstance(eos, list | tuple) else [eos])}
    return frozenset(ids)


def tokenizer_digest(tokenizer: Any) -> str:
    """Of everything that decides token ids: the serialised fast tokenizer, else vocabulary and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else canonical_json(tokenizer.get_vocab())
    return sha256_hex(text + canonical_json({k: str(v) for k, v in tokenizer.special_tokens_map.items()}))


def _check_folder(cfg: TargetConfig, folder: Path) -> None:
    """Ids against config.json, before gigabytes of weights are read."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code).get_text_config()
    check_target(cfg, text.num_hidden_layers, text.vocab_size)


@contextmanager
def _none() -> Iterator[dict[int, Tensor]]:
    yield {}
