"""What `make rl-study` compares. Imports without torch."""

from pathlib import Path

from pydantic import Field

from infra.config import Config
from trainer.config import DataConfig, DrafterSection, EngineConfig, OptimConfig

ROWS = ("sft-decay", "sft-dpace", "rl-uniform", "rl-visited", "rl-followed", "rl-group", "rl-onpolicy")
"""second stages; the first is what all others are measured against"""
BASELINE = ROWS[0]
SETTINGS = Path(__file__).parent / "stories.toml"


class StudyConfig(Config):
    """One SFT drafter, then several second stages at equal steps on equal data."""

    name: str = "rl-study"
    """folder below `runs/`"""
    model: str = ""
    """target file; empty: stories260K where `../shared/models` has it, else the tiny target trained for the study"""
    store: str = ""
    """features of greedy answers; empty: made by the study"""
    sampled_store: str = ""
    """features of answers drawn at temperature 1, for τ at temperature 1; empty: made by the study where it makes
    the texts itself, else left out"""
    stories: int = Field(default=6400, ge=1)
    """training texts that the study makes: a prompt drawn from the target at temperature 1, then its greedy answer"""
    heldout: int = Field(default=320, ge=2)
    """texts kept apart, as many again drawn at temperature 1"""
    start_from: str = ""
    """run or checkpoint folder of the drafter that all rows start from; empty: trained by the study"""
    sft_steps: int = Field(default=1500, ge=1)
    steps: int = Field(default=500, ge=1)
    """of every second stage"""
    lr_share: float = Field(default=0.3, gt=0)
    """learning rate of every second stage, as a share of the SFT's"""
    seeds: tuple[int, ...] = (0, 1, 2)
    rows: tuple[str, ...] = ROWS
    selection_documents: int = Field(default=64, ge=1)
    """held-out texts that choose each run's best drafter; τ is reported on the others"""
    data: DataConfig = DataConfig()
    drafter: DrafterSection = DrafterSection()
    optim: OptimConfig = OptimConfig()
    engine: EngineConfig = EngineConfig()
    rl: dict[str, dict] = {}
    """settings of section `rl` by row, over the study's own"""
