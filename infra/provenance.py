"""Where an artefact comes from: command, code revision, versions, machine, time."""

import datetime
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "deepspeed", "ray", "zarr", "pyarrow", "mlflow", "numpy")


def provenance(**extra: Any) -> dict[str, Any]:
    """A JSON-able record; `extra` adds what the artefact needs (fingerprint, resolved configuration, ...)."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {p: v for p in PACKAGES if (v := _version(p))},
        "python": platform.python_version(),
        "machine": {"system": platform.system(), "processor": platform.machine()},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **extra,
    }


def write_json(path: str | Path, data: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(data, indent=2, sort_keys=True, default=str) + "\n")
    aside.replace(path)


def canonical_json(data: Any) -> str:
    """One spelling per value: sorted keys, no spaces. What digests are taken of."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def sha256_hex(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _git(*args: str) -> str | None:
    root = Path(__file__).parent.parent
    try:
        out = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() if out.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
