"""The GPU benchmark's smoke test; it, the model and the kernels need nothing but torch and transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spawn]

GUARD = """
import builtins, sys
real = builtins.__import__
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    # transformers probes for some of these itself; only our own files must not ask for them
    caller = (globals or {}).get("__name__", "")
    ours = caller.split(".")[0] in ("kernels", "trainer", "infra", "features")
    if ours and name.split(".")[0] in ("pydantic", "ray", "deepspeed", "zarr", "mlflow", "tomli_w", "datasets"):
        raise ImportError(f"{caller} imports {name}")
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
from trainer.drafter.bench_gpu import main
sys.exit(main(["--device", "cpu", "--tiny", "--out", sys.argv[1]]))
"""


def test_gpu_benchmark_runs_with_torch_and_transformers_alone(tmp_path):
    out = tmp_path / "gpu.json"
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", GUARD, str(out)], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text())
    assert report["check attention"].keys() and report["check loss"].keys()
    assert report["step"]["tflop"] > 0 and report["step as the peers do it"]["ms"] > 0


def test_flops_of_qwen3_8b():
    """72 TFLOP per document of 3,072 tokens and 512 anchors, two thirds of them in the blocks (docs/drafter.md)."""
    from trainer.drafter.bench_gpu import QWEN3_8B, step_flops

    flops = step_flops(QWEN3_8B, 3072, 512)
    assert sum(flops.values()) == pytest.approx(72e12, rel=0.02)
    assert flops["blocks"] == pytest.approx(47.4e12, rel=0.01)
