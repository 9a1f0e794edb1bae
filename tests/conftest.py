"""Shared by all tests: one thread per process, no network, everything in temporary folders."""

import os
import sys
from pathlib import Path

# before torch, ray or mlflow are imported; two test processes with two threads each slow one another down tenfold
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))


SECONDS = {"ray": 30.0, "spawn": 20.0, "slow": 10.0}
"""rough times of a test by its marker"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest files first, so that no process is left alone with one at the end (xdist deals files out in order)."""
    seconds: dict[Path, float] = {}
    for item in items:
        longest = max((SECONDS.get(mark.name, 0.0) for mark in item.iter_markers()), default=0.0)
        seconds[item.path] = seconds.get(item.path, 0.0) + max(longest, 0.2)
    items.sort(key=lambda item: -seconds[item.path])  # stable: the order within a file stays


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def tiny():
    """The `tiny` target: random Qwen3, D = 64, 6 layers, 264 tokens."""
    from features.target import load_target
    from features.target_config import load_target_config

    return load_target(load_target_config("tiny"))


@pytest.fixture
def in_tmp(tmp_path, monkeypatch) -> Path:
    """Runs the test in an empty folder with an MLflow file of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path
