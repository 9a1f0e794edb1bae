"""What is wrong with this machine, in plain words."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from infra.provenance import PACKAGES


def foreign_kernels(distributions: list[str] | None = None) -> str | None:
    """A sentence if Hugging Face's package `kernels` is installed: transformers would take our folder for it."""
    names = distributions if distributions is not None else [d.name for d in importlib.metadata.distributions()]
    if any(name and name.lower() == "kernels" for name in names):
        return (
            "the package 'kernels' from Hugging Face is installed and has the same import name as this repository's "
            "kernels/ folder, which breaks transformers; run: pip uninstall kernels"
        )
    return None


def checks() -> Iterator[tuple[str, str, str]]:
    """(state, what, remark) with state ok, warn or bad."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield ("ok" if sys.version_info >= (3, 11) else "bad", f"Python {version}", "3.11 or newer is needed")
    missing = [
        p for p in PACKAGES if importlib.util.find_spec(p) is None and not (p == "triton" and sys.platform != "linux")
    ]
    yield (
        "bad" if missing else "ok",
        "packages",
        f"missing: {', '.join(missing)}; run make install" if missing else "all there",
    )
    clash = foreign_kernels()
    yield ("bad" if clash else "ok", "import name 'kernels'", clash or "ours alone")
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield (
        "warn" if free < 5 else "ok",
        f"disk: {free:.0f} GB free here",
        "the demo needs 5 GB, Qwen3-8B 41 KB a token",
    )
    if sys.platform == "linux":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        yield ("warn" if memory < 7 else "ok", f"memory: {memory:.0f} GiB", "the demo needs 6 GiB")
    yield ("ok", f"CPU cores: {os.cpu_count()}", "")
    yield _gpu()


def _gpu() -> tuple[str, str, str]:
    if importlib.util.find_spec("torch") is None:
        return ("warn", "GPU", "torch is not installed")
    import torch

    if not torch.cuda.is_available():
        return ("ok", "GPU: none", "everything runs on the CPU; a large target wants GPUs")
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return ("ok", f"GPU: {names}", f"CUDA {torch.version.cuda}")


def doctor() -> int:
    worst = 0
    for state, what, remark in checks():
        print(f"{state:>4}  {what}" + (f" — {remark}" if remark and state != "ok" else ""))
        worst = max(worst, state == "bad")
    return int(worst)
