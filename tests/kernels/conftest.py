"""Triton decides at import whether to interpret or to compile, so either kind of test runs in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_python():
    """Run a script from the repository root; `interpret` decides Triton's mode. Returns its stdout."""

    def run(source: str, *, interpret: bool, timeout: int = 240) -> str:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env.pop("TRITON_INTERPRET", None)
        if interpret:
            env["TRITON_INTERPRET"] = "1"
        result = subprocess.run(
            [sys.executable, "-c", source], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
        )
        assert result.returncode == 0, result.stderr[-4000:]
        return result.stdout

    return run
