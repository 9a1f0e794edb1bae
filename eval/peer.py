"""Our decoding against the authors' own loop (`dflash` on PyPI) on the same weights and prompts."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.decode import Trace
from infra.errors import ResourceError
from trainer.drafter import peers

SCRIPT = Path(__file__).with_name("peer_loop.py")


@dataclass(frozen=True)
class Agreement:
    """Answers and cycles that both loops made, and how many of them are equal."""

    answers: int
    equal_answers: int
    cycles: int
    equal_cycles: int
    tau_ours: float | None
    """over the compared cycles; None without any"""
    tau_theirs: float | None

    @property
    def whole(self) -> bool:
        return self.cycles > 0 and (self.equal_answers, self.equal_cycles) == (self.answers, self.cycles)


def authors_generate(
    target: Path, drafter: Path, prompts: Sequence[list[int]], max_new_tokens: int, stop_ids: Collection[int]
) -> list[dict]:
    """Per prompt `answer` (token ids) and `emitted` (tokens of each cycle), greedy, fp32.

    Args:
        target: folder that transformers loads.
        drafter: folder in z-lab's layout.
    Raises:
        ResourceError: the package is not installed beside us, or its process failed.
    """
    if not peers.installed("dflash"):
        raise ResourceError("dflash from PyPI is not installed beside us; run python -m trainer.drafter.peers dflash")
    job = {
        "target": str(target), "drafter": str(drafter), "prompts": [list(p) for p in prompts],
        "max_new_tokens": max_new_tokens, "stop_ids": sorted(stop_ids),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="flashdraft-peer-") as tmp:
        source, destination = Path(tmp) / "in.json", Path(tmp) / "out.json"
        source.write_text(json.dumps(job))
        env = {**os.environ, "PYTHONPATH": str(peers.folder("dflash")), "HF_HUB_OFFLINE": "1"}
        # -P: the script's own folder would shadow top-level modules of the package
        command = [sys.executable, "-P", str(SCRIPT), str(source), str(destination)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise ResourceError(f"the loop of dflash failed: {done.stderr.strip()[-800:]}")
        return json.loads(destination.read_text())


def agreement(ours: Sequence[Trace], theirs: Sequence[dict], max_new_tokens: int, block_size: int) -> Agreement:
    """Both loops' answers whole, and their cycles but for those at the length limit.

    Where fewer than `block_size` tokens are left the authors draft a narrower block, which changes the drafts; ours
    always drafts the whole one, as servers do.
    """
    mine, other = [], []
    for trace, peer in zip(ours, theirs, strict=True):
        end = len(trace.prompt_ids) + max_new_tokens
        for cycle, emitted in zip(trace.cycles, peer["emitted"], strict=False):
            if cycle.start + block_size > end:
                break
            mine.append(cycle.emitted)
            other.append(emitted)
    return Agreement(
        answers=len(ours),
        equal_answers=sum(t.answer_ids == p["answer"] for t, p in zip(ours, theirs, strict=True)),
        cycles=len(mine),
        equal_cycles=sum(a == b for a, b in zip(mine, other, strict=True)),
        tau_ours=sum(mine) / len(mine) if mine else None,
        tau_theirs=sum(other) / len(other) if other else None,
    )
