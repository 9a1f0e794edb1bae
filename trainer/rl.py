"""Stage `rl`: the expected accepted length itself, in closed form, from the store (docs/rl.md derives it).

Legend: A blocks, K block size.
"""

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eval.session import checkpoint_folder
from features.reader import FeatureStore
from features.stream import AnchorBatch
from features.target import FrozenHead
from infra.cli import main
from infra.errors import ConfigError, SpecMismatch
from infra.provenance import sha256_file, write_json
from kernels import acceptance
from kernels.acceptance_loss import Acceptance, AcceptanceLoss, Drafted, Reference, acceptance_loss
from trainer.drafter.checkpoint import load_drafter
from trainer.drafter.model import Drafter
from trainer.engine import World
from trainer.follow import blocks_of, follow, leaders_and_followers
from trainer.loop import Parts, Stage, fit, run_stage
from trainer.objective import Objective, forward
from trainer.rl_config import RlConfig, RlSection
from trainer.visits import Snapshot, Visits

TEXT_SAMPLE = 64
"""documents looked at to tell greedy text from sampled"""


def train(cfg: RlConfig, world: World, *, allow_changed: Collection[str] = ()) -> Path:
    """Fine-tune and return the folder of the best drafter, which is the one to start from if none is better.

    Raises:
        ConfigError, SpecMismatch: the store's text is not what the objective assumes; the reference does not fit.
        Besides what `trainer.loop.fit` raises.
    """
    return fit(cfg, world, lambda parts: stage(cfg, parts), allow_changed=allow_changed)


def stage(cfg: RlConfig, parts: Parts) -> Stage:
    """Objective, visits and, where another drafter draws, its snapshots."""
    rl, run = cfg.rl, parts.run.path
    check_text(parts.store, rl, vocabulary=len(parts.head.head_VD))
    reference = load_reference(cfg, parts) if rl.kl or rl.group.baseline == "reference" else None
    visits = snapshot = None
    if rl.visited_share:
        visits = Visits(parts.store, parts.head, parts.world, run, rl.visited_every, rl.visited_documents)
    if rl.estimator == "group" and rl.group.rollout_every > 1:
        snapshot = Snapshot(parts.drafter, parts.world, run, rl.group.rollout_every)
    objective = RlObjective(cfg, parts, reference, visits, snapshot)
    return Stage(
        objective,
        refreshed=tuple(x for x in (visits, snapshot) if x),
        visited=visits.positions if visits else None,
        visited_share=rl.visited_share,
        lookahead=parts.drafter.config.block_size if rl.follow_share else 0,
        patience=rl.patience,
    )


class RlObjective:
    """Per supervised block: -log E[f(N)], the cross-entropy floor, the divergence from the reference."""

    def __init__(
        self, cfg: RlConfig, parts: Parts, reference: Drafter | None, visits: Visits | None, snapshot: Snapshot | None
    ):
        self.cfg, self.rl, self.drafter = cfg, cfg.rl, parts.drafter.config
        self.reference, self.visits, self.snapshot = reference, visits, snapshot
        self.floor = Objective(cfg.loss, self.drafter)
        self.gains_K = reward_gains(cfg.rl, self.drafter.block_size)
        self.generator = torch.Generator(device=parts.world.device)
        self.rank = parts.world.rank
        self.sums = np.zeros(6)

    def begin(self, step: int, total: int) -> None:
        share = step / max(total - 1, 1)
        self.temperature, self.alpha = (a + share * (b - a) for a, b in (self.rl.temperature, self.rl.alpha))

    def denominator(self, batch: AnchorBatch) -> float:
        """Supervised blocks of the whole optimiser step."""
        return max(float(batch.step_blocks), 1e-9)

    def __call__(self, model: nn.Module, batch: AnchorBatch, head: FrozenHead) -> AcceptanceLoss:
        """One micro-batch; `numerator` is to be divided by `denominator(batch)`."""
        self.generator.manual_seed(self._key(batch))
        if batch.ahead_labels_AX is None:
            return self._terms(forward(model, self.drafter, batch, head), batch, head)
        kept_a, led_a, following_a = leaders_and_followers(batch.anchor_valid_A, self.rl.follow_share)
        kept = blocks_of(batch, kept_a)
        made: list[Any] = []

        def then(hidden_AKD: Tensor) -> AnchorBatch:
            first = self._terms(hidden_AKD, kept, head)
            run_A = torch.zeros_like(batch.anchor_position_A).index_copy(0, kept_a, first.run_A)
            followers, there_a = follow(batch, led_a, following_a, run_A[led_a])
            made.extend((first, followers, there_a))
            return followers

        _, hidden_AKD = forward(model, self.drafter, kept, head, then)
        first, followers, there_a = made
        return joined(first, kept_a, self._terms(hidden_AKD, followers, head, there_a), following_a)

    def _terms(
        self, hidden_AKD: Tensor, batch: AnchorBatch, head: FrozenHead, followed_A: Tensor | None = None
    ) -> AcceptanceLoss:
        """The loss of these blocks, also counted for the log; `followed_A`: those put where decoding goes on."""
        rl = self.rl
        floor_K = None
        if rl.floor:  # its own mean over slots, times the blocks that everything is divided by
            scale = rl.floor * self.denominator(batch) / self.floor.denominator(batch)
            floor_K = (self.floor.slot_weight_K * scale).float()
        group = None
        if rl.estimator == "group":
            group = acceptance.Group(rl.group.size, rl.group.baseline, rl.group.clip)
        rollout = None
        if self.snapshot is not None:
            with torch.no_grad():
                rollout = forward(self.snapshot.drafter, self.drafter, batch, head)
        goal = Acceptance(
            self.gains_K,
            log=rl.objective == "log",
            temperature=self.temperature,
            alpha=self.alpha,
            target_logprob_AK=batch.target_logprob_AK if rl.verification == "rejection" else None,
            group=group,
            generator=self.generator,
            rollout_AKD=rollout,
        )
        out = acceptance_loss(
            hidden_AKD, head.head_VD, batch.labels_AK, batch.supervised_AK, goal,
            floor_K=floor_K, reference=self._reference(batch, head), drafted=self.drafted(batch),
            chunk_rows=self.cfg.loss.chunk_rows,
        )  # fmt: skip
        self._count(out, batch, followed_A)
        return out

    def _key(self, batch: AnchorBatch) -> int:
        """Of a micro-batch's draws."""
        return ((self.cfg.train.seed * 1_000_003 + batch.step) * 65_537 + batch.micro * 257 + self.rank) % 2**63

    def drafted(self, batch: AnchorBatch) -> Drafted | None:
        """What the target said of drafts: nothing in a store (`trainer.onpolicy` has it)."""
        return None

    def _reference(self, batch: AnchorBatch, head: FrozenHead) -> Reference | None:
        if self.reference is None:
            return None
        rl, A = self.rl, len(batch.anchor_valid_A)
        stride = 1 if rl.group.baseline == "reference" else round(1 / rl.kl_share)
        picked = torch.arange(batch.step % stride, A, stride, device=batch.labels_AK.device)
        with torch.no_grad():
            hidden_bKD = forward(self.reference, self.drafter, blocks_of(batch, picked), head)
        hidden_AKD = hidden_bKD.new_zeros(A, *hidden_bKD.shape[1:]).index_copy(0, picked, hidden_bKD)
        blocks_A = torch.zeros(A, dtype=torch.bool, device=picked.device).index_fill(0, picked, True)
        beta = {d: rl.kl * stride * (rl.kl_direction in (d, "both")) for d in ("forward", "reverse")}
        return Reference(hidden_AKD, blocks_A, **beta)

    def _count(self, out: AcceptanceLoss, batch: AnchorBatch, followed_A: Tensor | None) -> None:
        """Sums for the log: expected reward, divergence, and the leading run at visited and at other anchors."""
        counted_A = batch.supervised_AK.any(1)
        visited_A = torch.zeros_like(counted_A) if followed_A is None else followed_A.clone()
        if self.visits is not None:
            for d, document in enumerate(batch.documents):
                at = torch.nonzero(batch.anchor_document_A == d).flatten()
                starts = self.visits.positions(document)
                if starts is not None:
                    here = np.isin(batch.anchor_position_A[at].cpu().numpy(), starts)
                    visited_A[at] |= torch.from_numpy(here).to(visited_A.device)
        visited_A &= counted_A
        others_A = counted_A & ~visited_A
        self.sums += [
            float(out.value_A[counted_A].sum()), float(out.kl), float(visited_A.sum()), float(others_A.sum()),
            float(out.run_A[visited_A].sum()), float(out.run_A[others_A].sum()),
        ]  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """Since the last call, on this rank."""
        value, kl, visited, others, run_visited, run_others = self.sums.tolist()
        self.sums[:] = 0
        blocks = max(visited + others, 1)
        out = {"expected_reward": value / blocks, "visited_blocks_share": visited / blocks}
        out |= {"draft_temperature": self.temperature, "smoothing": self.alpha}
        if self.rl.kl:
            out["kl"] = kl / blocks
        if visited:
            out["tau_hat_visited"] = 1 + run_visited / visited
        if others:
            out["tau_hat_uniform"] = 1 + run_others / others
        return out


def joined(first: AcceptanceLoss, at_a: Tensor, second: AcceptanceLoss, at_b: Tensor) -> AcceptanceLoss:
    """The terms of a batch from those of its blocks `at_a` and `at_b`."""

    def whole(x: Tensor, y: Tensor) -> Tensor:
        if x.ndim == 0:
            return x + y
        out = x.new_zeros(len(at_a) + len(at_b), *x.shape[1:])
        return out.index_copy(0, at_a, x).index_copy(0, at_b, y)

    return AcceptanceLoss(*map(whole, first, second))


def reward_gains(rl: RlSection, K: int) -> Tensor:
    """The reward of 0 .. K-1 accepted drafts, as gains [K].

    Raises:
        ConfigError: no cost table there, or it is for another block size or concurrency.
    """
    accepted_K = torch.arange(K, dtype=torch.float64)
    if rl.reward == "tau":
        return acceptance.tau_gains(K)
    if rl.reward == "window":
        return acceptance.gains_of((1 + accepted_K) / (1 + rl.window_cost * (1 + accepted_K)))
    path = Path(rl.schedule)
    if not path.is_file():
        raise ConfigError(f"rl.schedule = {rl.schedule!r} does not exist; run `python -m eval schedule` on the drafter")
    table, c = json.loads(path.read_text()), str(rl.concurrency)
    if table["block_size"] != K or c not in table["best"]:
        raise ConfigError(
            f"{path} is for blocks of {table['block_size']} at {', '.join(table['best'])} sequences, not blocks of {K} "
            f"at {c}; run `python -m eval schedule` on the drafter with --concurrency {c}"
        )
    b = max(table["best"][c]["best"], 2)
    cycle_ms = table["draft_ms"][c] + table["verify_ms"][c][str(b)]
    return acceptance.gains_of(rl.concurrency * (1 + accepted_K.clamp_max(b - 1)) / cycle_ms)


def check_text(store: FeatureStore, rl: RlSection, vocabulary: int) -> None:
    """The answers are greedy where the objective says so, and sampled where it says so.

    With the target's candidates in the store this is exact: greedy text is the first candidate. Without them: the
    target's argmax has at least probability 1/V, and text drawn from the target falls below that now and then
    (stories260K: 1 % of tokens at temperature 1; a factor of 2 is left for the noise of bf16).

    Raises:
        ConfigError: it is not what rl.text says.
    """
    train = [i for i, s in enumerate(store.documents["split"].to_pylist()) if s == "train"][:TEXT_SAMPLE]
    tokens = unlikely = 0
    for row in train:
        mask = store.read_array("loss_mask", row).astype(bool)
        tokens += int(mask.sum())
        if store.spec.top_k:
            unlikely += int((store.read_array("topk_ids", row)[:, 0] != store.read_array("token_ids", row))[mask].sum())
        else:
            unlikely += int((store.read_array("target_logprob", row)[mask] < -np.log(2 * vocabulary)).sum())
    share = unlikely / max(tokens, 1)
    found = "sampled" if share > (0.02 if store.spec.top_k else 2e-4) else "greedy"
    if found != rl.text:
        raise ConfigError(
            f"rl.text = {rl.text!r}, but {share:.2%} of {tokens} answer tokens of store {store.uri} are not what the "
            f"target prefers, so its text is {found}; set rl.text={found} (the objective is then that of "
            f"{'temperature 1' if found == 'sampled' else 'temperature 0'}), or make a store of {rl.text} answers"
        )


def load_reference(cfg: RlConfig, parts: Parts) -> Drafter:
    """The frozen drafter that the divergence is from; the same one for the whole run.

    Raises:
        SpecMismatch: another shape than the drafter's, or not the weights that the run began with.
    """
    folder = checkpoint_folder(cfg.rl.reference or cfg.drafter.start_from)
    reference = load_drafter(folder, device=parts.world.device, dtype=torch.float32).requires_grad_(False).eval()
    mine, theirs = parts.drafter.config.model_dump(), reference.config.model_dump()
    for key in ("target_layer_ids", "hidden_size", "vocab_size", "block_size", "mask_token_id"):
        if mine[key] != theirs[key]:
            raise SpecMismatch(
                f"reference drafter {folder} has {key} {theirs[key]!r}, the drafter {mine[key]!r}; use one of the same "
                "target and block size (rl.reference)"
            )
    record, digest = parts.run.path / "reference.json", sha256_file(folder / "model.safetensors")
    if record.is_file() and (began := json.loads(record.read_text())["weights"]) != digest:
        raise SpecMismatch(
            f"run {str(parts.run.path)!r} began with reference drafter {began[:12]}, and {folder} now has weights "
            f"{digest[:12]}; restore them, or take another name (name=...)"
        )
    if parts.world.is_main:
        write_json(record, {"folder": str(folder), "weights": digest})
    return reference


if __name__ == "__main__":
    main(lambda: run_stage(RlConfig, train, sys.argv[1:]))
