"""What the driver needs of a target: everything but its weights."""

from typing import Any

from features.target import Target, check_target, load_tokenizer, stop_ids
from features.target_config import TargetConfig
from features.target_source import target_folder


class TargetFront:
    """Tokenizer, template, stop tokens and identity of a target whose weights only the actors load.

    Raises:
        TargetError: source unreachable, no template, tap ids or mask id that the model does not have.
    """

    chat_template = Target.chat_template
    source_identity = Target.source_identity

    def __init__(self, cfg: TargetConfig):
        from transformers import AutoConfig, GenerationConfig

        self.config = cfg
        self.folder = target_folder(cfg)
        self.tokenizer: Any = load_tokenizer(cfg, self.folder)
        text = AutoConfig.from_pretrained(self.folder, trust_remote_code=cfg.trust_remote_code).get_text_config()
        check_target(cfg, text.num_hidden_layers, text.vocab_size)
        self.hidden_size: int = text.hidden_size
        try:
            generation = GenerationConfig.from_pretrained(self.folder)
        except OSError:
            generation = None
        self.stop_ids = stop_ids(generation, self.tokenizer)
