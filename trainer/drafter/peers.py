"""Other people's DFlash code from PyPI, each beside our own packages: `python -m trainer.drafter.peers` installs them.

    dflash       the authors' inference code: the definition of the model
    speculators  vLLM's trainer: loss, masks, training step
    specforge    SGLang's trainer: loss, masks, training step

Their pins exclude each other and ours (transformers 5.15 / 5.19 / 5.8). Each gets a folder with the few packages whose
versions differ, put in front of our environment on PYTHONPATH; torch and the rest are shared, so that benchmarks
compare code and not builds. About 100 MB and a minute each, under $FLASHDRAFT_PEERS or ~/.cache/flashdraft/peers.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from infra.cli import main as run_command
from infra.errors import ResourceError

_HUB = ("httpx", "httpcore")
PEERS = {
    "dflash": ("dflash==0.1.0", "transformers==5.15.0", "huggingface-hub==1.27.0", "tokenizers==0.22.2", *_HUB),
    "speculators": (
        *("speculators==0.9.0", "hs-connectors==0.9.0", "transformers==5.19.0", "huggingface-hub==1.33.0", *_HUB),
        *("loguru", "openai", "jiter", "distro", "sniffio"),  # imported at start, used for nothing here
    ),
    "specforge": (
        *("specforge==0.2.0", "transformers==5.8.1", "huggingface-hub==1.27.0", "tokenizers==0.22.2", *_HUB),
        "yunchang",
    ),
}
SCRIPT = Path(__file__).with_name("peer_side.py")


def folder(name: str) -> Path:
    root = os.environ.get("FLASHDRAFT_PEERS") or Path.home() / ".cache" / "flashdraft" / "peers"
    return Path(root) / name


def installed(name: str) -> bool:
    marker = folder(name) / "requirements.json"
    return marker.is_file() and json.loads(marker.read_text()) == list(PEERS[name])


def install(name: str) -> None:
    """Put a peer's packages into its folder; nothing if they are there already.

    Raises:
        ResourceError: pip failed.
    """
    if installed(name):
        return
    final = folder(name)
    part = final.with_name(f"{name}.part{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(part), *PEERS[name]]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        shutil.rmtree(part, ignore_errors=True)
        raise ResourceError(
            f"peer {name!r} could not be installed ({result.stderr.strip()[-300:]}); check the network and repeat"
        )
    (part / "requirements.json").write_text(json.dumps(PEERS[name]))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(part, final)


def run(name: str, *args: str, timeout: int = 600, threads: int = 1) -> str:
    """Run `peer_side.py` with a peer's packages ("ours": with none); returns its stdout.

    Raises:
        ResourceError: the peer is not installed, or its process failed.
    """
    if name != "ours" and not installed(name):
        raise ResourceError(f"peer {name!r} is not installed; run python -m trainer.drafter.peers")
    root = str(Path(__file__).parents[2])
    pinned = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    env = {**os.environ, **pinned, "PYTHONPATH": root if name == "ours" else str(folder(name)), "HF_HUB_OFFLINE": "1"}
    # -P: without it the script's own folder would shadow top-level modules of the peers
    command = [sys.executable, "-P", str(SCRIPT), name, *args]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    if result.returncode:
        raise ResourceError(
            f"peer {name!r} failed: {result.stderr.strip()[-2000:]}; run python -m trainer.drafter.peers"
        )
    return result.stdout


def main(argv: list[str]) -> int:
    for name in argv or PEERS:
        if name not in PEERS:
            raise ResourceError(f"unknown peer {name!r}; known are {', '.join(PEERS)}")
        print(f"{name}: {'already there' if installed(name) else 'installing'} in {folder(name)}")
        install(name)
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
