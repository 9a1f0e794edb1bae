"""What an evaluation is. Imports without torch."""

from typing import Literal

import pydantic
from pydantic import Field

from eval.prompts import DEFAULT_SUITES
from infra.config import Config


class EvalConfig(Config):
    """Evaluation of one drafter, and optionally of the same drafter before training, on suites of prompts."""

    model: str = "smollm2-135m"
    """target: a name in features/targets or the path of a TOML file"""
    drafter: str = ""
    """run folder (`runs/demo`) or checkpoint folder (ours, z-lab's or speculators' layout); empty: the newest run of
    the target below `runs/`"""
    before: str = ""
    """checkpoint folder of the untrained drafter, evaluated on the same prompts; empty: none"""
    suites: tuple[str, ...] = DEFAULT_SUITES
    """names of eval/suites, `heldout`, or paths of suite files (.toml) or of prompts (.jsonl)"""
    data: str = ""
    """folder with the suites' files; empty: from the hub at pinned revisions"""
    store: str = ""
    """feature store of the suite `heldout` and of the replay; empty: the newest one of the target below `store/`"""
    limit: int | None = Field(default=None, ge=1)
    """prompts per suite, chosen by `seed`; None: all"""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """tokens per answer; None: 2048 as in the paper, 128 on a CPU (2048 there take minutes per answer)"""
    temperature: float = Field(default=0.0, ge=0)
    verification: Literal["exact", "rejection"] = "exact"
    """exact: argmax drafts stand where they equal the target's token; rejection: sampled drafts, kept by min(1, p/q)"""
    verify_length: int | None = Field(default=None, ge=2)
    """positions verified per cycle, anchor included; None: the drafter's block size"""
    batch_size: int | None = Field(default=None, ge=1)
    """sequences decoded at once; None: 1, as in the paper, 8 on a CPU (five suites of 8 prompts then take ten minutes
    instead of forty for a target of 135 M parameters)"""
    thinking: bool | None = None
    """passed to the chat template as enable_thinking; None: as the target file says"""
    seed: int = 0
    device: str = "auto"
    """auto: CUDA where there is one"""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """of target and drafter; empty: the target file's"""
    engine: str = ""
    """also run the prompts through a serving engine: `vllm` (started for it), or http://host:port of a vLLM or SGLang
    server that drafts with this drafter"""
    out: str = ""
    """folder of report.json and figures; empty: the run folder of the drafter, else runs/eval-<drafter>"""
    track: bool = True
    """log to MLflow"""

    @pydantic.model_validator(mode="after")
    def _sensible(self) -> "EvalConfig":
        if not self.suites:
            raise ValueError("suites is empty; name at least one")
        if self.verification == "rejection" and self.temperature == 0:
            raise ValueError("verification = 'rejection' is for sampling; set temperature above 0 or use 'exact'")
        return self
