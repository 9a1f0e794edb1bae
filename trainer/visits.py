"""Block starts that decoding really visits, and the drafter that draws: what RL refreshes at fixed steps.

Uniform anchors are not where decoding begins its blocks: a hard place ends a block and begins the next, so hard places
are visited more often. Replay finds the visited ones with the current drafter. Both are pure functions of the run's
state at steps that are multiples of their period, and are kept on disk until no checkpoint needs them, so that a
resumed run has what the undisturbed one had.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.proposer import DrafterProposer
from eval.replay import Text
from features.reader import FeatureStore
from features.stream import AnchorStream
from features.target import FrozenHead
from infra.errors import CheckpointError
from trainer.drafter.checkpoint import load_drafter, save_drafter
from trainer.drafter.model import Drafter
from trainer.engine import World, save_module, whole_parameters
from trainer.heldout import store_text

TOGETHER = 32
"""documents decoded at once"""


@torch.no_grad()
def visited(drafter: Drafter, head: FrozenHead, texts: Sequence[Text]) -> list[np.ndarray]:
    """Anchors of decoding each text with the drafter, int64, as `eval.replay.walk` finds them.

    Drafts only where decoding is, all texts side by side: a third of the blocks that replay needs to know every anchor.
    """
    proposer, K = DrafterProposer(drafter, head), drafter.config.block_size
    proposer.open(len(texts), max(len(t.token_ids_S) for t in texts) + K)
    device, dtype = head.head_VD.device, drafter.fc.weight.dtype
    hidden = [t.hidden_SLD.to(device, dtype) for t in texts]
    ids = [t.token_ids_S.to("cpu", torch.long) for t in texts]  # compared here: one transfer per pass, not per text
    starts: list[list[int]] = [[] for _ in texts]
    spans = [[a for a in t.answers if a[1] - a[0] > 1][::-1] for t in texts]  # the next one last
    at = [s[-1][0] if s else 0 for s in spans]
    known = [0] * len(texts)
    while running := [i for i, s in enumerate(spans) if s]:
        for i in running:
            new = slice(known[i], at[i])
            proposer.extend(i, known[i], hidden[i][new], ids[i][new].to(device))
            known[i] = at[i]
            starts[i].append(at[i])
        anchors_B = torch.stack([ids[i][at[i]] for i in running]).to(device)
        drafts_BN = proposer.propose(running, anchors_B, [at[i] for i in running]).argmax(-1).cpu()
        for i, drafts_N in zip(running, drafts_BN, strict=True):
            end = spans[i][-1][1]
            wanted = ids[i][at[i] + 1 : min(at[i] + K, end)]
            stood = int((drafts_N[: len(wanted)] == wanted).long().cumprod(0).sum())
            at[i] += stood + 1
            if at[i] >= end - 1:
                spans[i].pop()
                at[i] = spans[i][-1][0] if spans[i] else at[i]
    return [np.array(s, np.int64) for s in starts]


class Visits:
    """document -> positions where decoding with the drafter of the latest refresh begins a block."""

    def __init__(self, store: FeatureStore, head: FrozenHead, world: World, run: Path, every: int, documents: int):
        self.store, self.head, self.world, self.every, self.documents = store, head, world, every, documents
        self.folder = run / "visits"
        self.starts: dict[str, np.ndarray] = {}
        self.found_at: dict[str, int] = {}
        self.step = -1
        self.ids = store.documents["document"].to_pylist()

    def positions(self, document: str) -> np.ndarray | None:
        return self.starts.get(document)

    def refresh(self, engine: Any, step: int, stream: AnchorStream) -> bool:
        """Replay documents that the next steps read, oldest visits first; True where anything changed."""
        if step % self.every or step == self.step:
            return False
        upcoming = np.concatenate([stream.step_rows(s) for s in range(step, step + self.every)]).tolist()
        rows = sorted(dict.fromkeys(upcoming), key=lambda r: self.found_at.get(self.ids[r], -1))[: self.documents]
        mine: dict[str, np.ndarray] = {}
        with whole_parameters(engine) as drafter:
            drafter.eval()
            own = rows[self.world.rank :: self.world.size]
            for first in range(0, len(own), TOGETHER):
                some = own[first : first + TOGETHER]
                starts = visited(drafter, self.head, [store_text(self.store, row) for row in some])
                mine |= {self.ids[row]: s for row, s in zip(some, starts, strict=True)}
            drafter.train()
        for part in self.world.gather(mine):
            self.starts |= part
            self.found_at |= dict.fromkeys(part, step)
        self.step = step
        if self.world.is_main:
            self._save(step)
        return True

    def restore(self, step: int) -> None:
        """As they were when the run was at `step`.

        Raises:
            CheckpointError: their file is gone.
        """
        period = step // self.every * self.every
        if step == period and not self._file(period).is_file():
            period -= self.every  # the refresh of this step is still to come
        if period < 0:
            return
        if not self._file(period).is_file():
            raise CheckpointError(
                f"{self._file(period)} is gone, and the checkpoint of step {step} needs its block starts; go on from a "
                "checkpoint of a later refresh, or delete checkpoints/ to begin anew"
            )
        with np.load(self._file(period)) as f:
            parts = np.split(f["positions"], np.cumsum(f["counts"])[:-1])
            names = [str(x) for x in f["documents"]]
            self.starts = dict(zip(names, parts, strict=True))
            self.found_at = dict(zip(names, f["found_at"].tolist(), strict=True))
        self.step = period

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.npz"

    def _save(self, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        names = sorted(self.starts)
        aside = self.folder / ".part.npz"
        np.savez(
            aside,
            documents=np.array(names),
            counts=np.array([len(self.starts[n]) for n in names]),
            positions=np.concatenate([self.starts[n] for n in names]),
            found_at=np.array([self.found_at[n] for n in names]),
        )
        aside.rename(self._file(step))
        for old in self.folder.glob("step-*.npz"):
            if int(old.stem[5:]) < _oldest(self.folder.parent) - self.every:
                old.unlink()


class Snapshot:
    """A frozen copy of the drafter, taken again every `every` steps: the one that draws a group's drafts."""

    def __init__(self, drafter: Drafter, world: World, run: Path, every: int):
        self.drafter, self.world, self.folder, self.every, self.step = drafter, world, run / "rollout", every, -1

    def refresh(self, engine: Any, step: int, _stream: AnchorStream) -> bool:
        if step % self.every == 0 and step != self.step:
            save_module(engine, self.world, lambda module: save_drafter(module, self._at(step)))
            self._load(step)
            if self.world.is_main:
                for old in self.folder.glob("step-*"):
                    if int(old.name[5:]) < _oldest(self.folder.parent) - self.every:
                        for file in old.iterdir():
                            file.unlink()
                        old.rmdir()
        return False

    def restore(self, step: int) -> None:
        period = step // self.every * self.every
        if (self._at(period) / "config.json").is_file():
            self._load(period)

    def _load(self, step: int) -> None:
        device = self.world.device
        self.drafter = load_drafter(self._at(step), device=device, dtype=torch.float32).requires_grad_(False)
        self.step = step

    def _at(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


def _oldest(run: Path) -> int:
    """Step of the oldest checkpoint; 0 without one."""
    return min((int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")), default=0)
