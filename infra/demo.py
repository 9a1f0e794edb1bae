"""`make demo`: the whole path, through the same command lines that a user types.

corpus -> answers by the target -> features -> drafter -> τ before and after, lossless -> MLflow
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from infra.errors import FlashdraftError
from infra.progress import duration

MODEL, CORPUS, NAME, SUITE = "smollm2-135m", "demo", "demo", "heldout"
RUN = Path("runs") / NAME


class StepFailed(FlashdraftError):
    """A step of the demo ended with an error, which it has explained itself."""


def steps(overrides: list[str]) -> list[tuple[str, list[str]]]:
    """(what, arguments of python) of each step; `overrides` go to the training recipe."""
    return [
        (
            "answers by the target, and its hidden states",
            ["-m", "pipeline", "--model", MODEL, "--corpus", CORPUS, "--run", NAME],
        ),
        (
            "training",
            ["-m", "trainer", "--stage", "sft", "--recipe", "demo", "--model", MODEL, f"name={NAME}", *overrides],
        ),
        (
            "evaluation",
            ["-m", "eval", "--model", MODEL, "--drafter", str(RUN), "--before", str(RUN / "drafter-init")]
            + ["--suites", SUITE, "max_new_tokens=64", "batch_size=16"],
        ),
    ]


def demo(overrides: list[str]) -> int:
    """Run the steps; each finds its finished work again, so that a second call takes a minute.

    Raises:
        StepFailed: naming the step, its command and how to go on.
    """
    began = time.monotonic()
    todo = steps(overrides)
    for number, (what, arguments) in enumerate(todo, 1):
        command = "python " + shlex.join(arguments)
        print(f"\n[{number}/{len(todo)}] {what}\n    {command}", flush=True)
        started = time.monotonic()
        code = subprocess.run([sys.executable, *arguments]).returncode
        if code:
            raise StepFailed(
                f"step {number} of the demo ({what}) ended with code {code}; see the message above, then run make demo "
                "again: finished work is kept"
            )
        print(f"    {duration(time.monotonic() - started)}", flush=True)
    report = json.loads((RUN / "report.json").read_text())
    print(f"\n{table(report)}\n\n{duration(time.monotonic() - began)} in total. Look at it with:  make ui", flush=True)
    return 0


def table(report: dict[str, Any]) -> str:
    """Untrained against trained on the held-out prompts."""
    rows = [("", "τ pooled", "τ macro", "replay τ", "speed-up", "lossless")]
    for label, part in (("before training", report["before"]), ("after training", report)):
        s = part["suites"][SUITE]
        lossless = f"{s['lossless']['identical']}/{s['lossless']['checked']} tokens"
        taus = [f"{s[k]:.3f}" for k in ("tau_pooled", "tau_macro", "replay_tau_pooled")]
        rows.append((label, *taus, f"{s['speedup']:.2f}×", lossless))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)
