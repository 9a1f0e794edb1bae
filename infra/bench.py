"""`make bench`: runs a package's benchmark as a command line and prints its JSON as a table."""

import json
import subprocess
import sys
from pathlib import Path

from infra.errors import ConfigError


def bench(part: str, args: list[str]) -> int:
    from infra.__main__ import BENCHES

    if not part:
        raise ConfigError(f"PART is empty; choose one: make bench PART={'|'.join(BENCHES)}")
    code = subprocess.run([sys.executable, "-m", BENCHES[part], *args]).returncode
    path = Path("runs/bench") / f"{part}.json"
    if code == 0 and path.is_file():
        print(table(json.loads(path.read_text())))
        print(f"written to {path}")
    return code


def table(rows: list[dict]) -> str:
    """The rows of a benchmark's JSON as text; ratio > 1 means ours is better."""
    lines = [("what", "ours", "opponent", "unit", "ratio")]
    for r in rows:
        lines.append(
            (
                r["what"],
                f"{r['ours']:.4g}",
                f"{r['opponent']:.4g} {r['opponent_name']}",
                r["unit"],
                f"{r['ratio']:.2f}×",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)
