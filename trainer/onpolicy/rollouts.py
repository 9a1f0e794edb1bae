"""Rounds of decoding by Ray actors, and the replay buffer that training reads. Ray is imported only here.

    round r    is decoded by the drafter as it was when the round was ordered: at step r · steps_per_round, or with
               `overlap` one round before
    step s     reads one part of the rounds r - staleness .. r, r = s // steps_per_round, in turns, newest first

Both are functions of the step alone, so a resumed run decodes only parts without a commit and reads the same batches.
"""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from features.order import permuted
from features.reader import FeatureStore
from features.stream import AnchorBatch, AnchorStream, StreamConfig
from infra.errors import FlashdraftError, ResourceError
from infra.provenance import sha256_file
from trainer.drafter.checkpoint import save_drafter
from trainer.engine import World, save_module
from trainer.onpolicy.config import OnPolicyConfig
from trainer.onpolicy.store import Part, commit_path, open_part


class Decoder:
    """What one actor does: load the target once, decode a part with the drafter of its round, commit it."""

    def __init__(self, cfg: OnPolicyConfig, device: str, cwd: str):
        import torch

        from features.target import load_target
        from features.target_config import load_target_config

        os.chdir(cwd)
        if device == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.cfg, self.device = cfg, device
        self.target = load_target(load_target_config(cfg.model), device)

    def decode(self, folder: str, part: int, prompts: list[list[int]], seed: int, storage_dtype: str) -> dict[str, Any]:
        """Idempotent: a part that is committed stays."""
        from eval.decode import DecodeSettings
        from eval.proposer import DrafterProposer
        from trainer.drafter.checkpoint import load_drafter
        from trainer.onpolicy.record import roll_out
        from trainer.onpolicy.store import read_commit, write_part

        if commit_path(Path(folder), part).is_file():
            return read_commit(Path(folder), part)
        r, weights = self.cfg.rollout, Path(folder) / "drafter"
        drafter = load_drafter(weights, device=self.device, dtype=self.target.dtype)
        settings = DecodeSettings(
            max_new_tokens=r.max_new_tokens,
            temperature=0.0 if self.cfg.rl.text == "greedy" else 1.0,
            batch_size=r.batch_size,
            seed=seed,
        )
        proposer = DrafterProposer(drafter, self.target.frozen_head())
        rollouts = roll_out(self.target, proposer, prompts, settings, r.top_k)
        digest = sha256_file(weights / "model.safetensors")
        return write_part(Path(folder), part, rollouts, self.target, digest, storage_dtype)


class Actors:
    """The pool. An actor that vanishes is started anew by Ray and its part decoded again; one that cannot come back
    leaves its parts to the others."""

    RESTARTS = 2

    def __init__(self, cfg: OnPolicyConfig, device: str):
        import ray

        self.cfg = cfg
        self.started = not ray.is_initialized()
        if self.started:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
            if cfg.rollout.address == "local":
                options |= {"num_cpus": cfg.rollout.actors, "include_dashboard": False}
                options["object_store_memory"] = 128 * 2**20  # holds token ids and commits only
            try:
                ray.init(cfg.rollout.address, **options)
            except (ConnectionError, ValueError, RuntimeError) as e:
                raise ResourceError(
                    f"Ray at {cfg.rollout.address!r} does not answer ({str(e).splitlines()[0]}); start it, or set "
                    "rollout.address='local'"
                ) from e
        remote = ray.remote(
            num_cpus=1, num_gpus=cfg.rollout.gpus_per_actor, max_restarts=self.RESTARTS, max_task_retries=self.RESTARTS
        )(Decoder)
        self.alive = [remote.remote(cfg, device, os.getcwd()) for _ in range(cfg.rollout.actors)]

    def submit(self, arguments: list[tuple]) -> list[tuple[Any, Any, tuple]]:
        """(future, actor, arguments) of every part."""
        chosen = [self.alive[i % len(self.alive)] for i in range(len(arguments))]
        return [(a.decode.remote(*args), a, args) for a, args in zip(chosen, arguments, strict=True)]

    def collect(self, running: list[tuple[Any, Any, tuple]]) -> None:
        """Wait until every part is committed.

        Raises:
            ResourceError: no actor is left.
            FlashdraftError: what a part's decoding raised.
        """
        import ray

        while running:
            (future, actor, args), running = running[0], running[1:]
            try:
                ray.get(future)
            except ray.exceptions.RayActorError as e:
                self.alive = [a for a in self.alive if a is not actor]
                if not self.alive:
                    raise ResourceError(
                        f"all {self.cfg.rollout.actors} rollout actors have died, the last on part {args[1]} of "
                        f"{args[0]} ({str(e).strip().splitlines()[0]}); lower rollout.batch_size if they ran out of "
                        "memory, and run the same command again: committed parts stay"
                    ) from None
                running += self.submit([args])
            except ray.exceptions.RayTaskError as e:
                if isinstance(e.cause, FlashdraftError):
                    raise e.cause from None
                raise

    def close(self) -> None:
        import ray

        for actor in self.alive:
            ray.kill(actor)
        if self.started:
            ray.shutdown()


class Rollouts:
    """Orders rounds, waits for them, and says which part a step reads."""

    def __init__(self, cfg: OnPolicyConfig, store: FeatureStore, world: World, run: Path, total: int):
        self.cfg, self.store, self.world, self.run = cfg, store, world, run
        self.rounds = -(-total // cfg.rollout.steps_per_round)
        splits = np.array(store.documents["split"].to_pylist())
        self.train = np.flatnonzero(splits == "train")
        if len(self.train) < cfg.rollout.prompts_per_round:
            raise ResourceError(
                f"store {store.uri} has {len(self.train)} training prompts, fewer than rollout.prompts_per_round = "
                f"{cfg.rollout.prompts_per_round}; lower it"
            )
        self.parts: dict[tuple[int, int], Part] = {}
        self.pending: dict[int, list] = {}
        self.actors: Actors | None = None
        self.ordered = -1

    # --- what the loop calls
    def restore(self, step: int) -> None:
        """Nothing to do: rounds are on disk, and `refresh` and the stream open what the step needs."""

    def refresh(self, engine: Any, step: int, _stream: Any) -> bool:
        every = self.cfg.rollout.steps_per_round
        if step % every:
            return False
        round_ = step // every
        if self.ordered < round_:
            self._order(engine, round_)
        self._wait(round_)
        if self.cfg.rollout.overlap and round_ + 1 < self.rounds:
            self._order(engine, round_ + 1)
        elif self.actors is not None and round_ + 1 >= self.rounds:
            self.close()
        self._forget(round_)
        return True

    def close(self) -> None:
        if self.actors is not None:
            self.actors.close()
            self.actors = None

    # --- rounds
    def folder(self, round_: int) -> Path:
        return self.run / "rollouts" / f"round-{round_:04d}"

    def prompts(self, round_: int) -> list[list[list[int]]]:
        """Prompts of every part of a round."""
        r = self.cfg.rollout
        n = len(self.train)
        at = permuted(np.arange(r.prompts_per_round), n, self.cfg.train.seed, round_)
        lengths = self.store.documents["prompt_length"].to_numpy()
        ids = [self.store.read_array("token_ids", int(row))[: lengths[row]].tolist() for row in self.train[at]]
        return [ids[p :: r.parts] for p in range(r.parts)]

    def _order(self, engine: Any, round_: int) -> None:
        """Keep the drafter as it is and send the parts that have no commit to the actors."""
        folder, r = self.folder(round_), self.cfg.rollout
        self.ordered = round_
        missing = [p for p in range(r.parts) if not commit_path(folder, p).is_file()]
        if not missing:
            return
        if not (folder / "drafter" / "config.json").is_file():
            save_module(engine, self.world, lambda module: save_drafter(module, folder / "drafter"))
        if self.world.is_main:
            self.actors = self.actors or Actors(self.cfg, "cuda" if r.gpus_per_actor else "cpu")
            prompts = self.prompts(round_)
            seed, dtype = self.cfg.train.seed * 10_007 + round_ * 101, self.store.spec.storage_dtype
            arguments = [(str(folder), p, prompts[p], seed + p, dtype) for p in missing]
            self.pending[round_] = self.actors.submit(arguments)

    def _wait(self, round_: int) -> None:
        if self.world.is_main and round_ in self.pending:
            self.actors.collect(self.pending.pop(round_))
        self.world.barrier()

    def _forget(self, round_: int) -> None:
        """Rounds that neither the buffer nor a resume from the kept checkpoints reads."""
        oldest = round_ - self.cfg.rollout.staleness - self.cfg.rollout.keep_rounds
        for key in [k for k in self.parts if k[0] < round_ - self.cfg.rollout.staleness]:
            del self.parts[key]
        if self.world.is_main:
            for old in range(max(oldest, 0)):
                shutil.rmtree(self.folder(old), ignore_errors=True)

    # --- the buffer
    def part(self, round_: int, part: int) -> Part:
        if (round_, part) not in self.parts:
            self.parts[round_, part] = open_part(self.folder(round_), part)
        return self.parts[round_, part]

    def source(self, step: int) -> tuple[int, int]:
        """(round, part) that a step reads.

        steps_per_round 4, two parts, staleness 1: steps 4..7 read (1, 0), (1, 1), (0, 0), (0, 1).
        """
        r = self.cfg.rollout
        round_, at = divmod(step, r.steps_per_round)
        live = [(x, p) for x in range(round_, max(round_ - r.staleness, 0) - 1, -1) for p in range(r.parts)]
        return live[at % len(live)]


class RolloutStream:
    """Batches of the buffer, from a step on; what `AnchorStream` is for a store."""

    steps_per_epoch = 1

    def __init__(self, rollouts: Rollouts, stream: StreamConfig, world: World, step: int):
        self.rollouts, self.cfg, self.world, self.step = rollouts, stream, world, step
        self.data_wait_s = 0.0

    def __iter__(self) -> Iterator[AnchorBatch]:
        r, uses = self.rollouts.cfg.rollout, {}
        # a part is read from its own round on, and the oldest one of the buffer is `staleness` rounds old
        first = max(self.step // r.steps_per_round - r.staleness, 0) * r.steps_per_round
        for s in range(first, self.step):
            uses[self.rollouts.source(s)] = uses.get(self.rollouts.source(s), 0) + 1
        streams: dict[tuple[int, int], tuple[AnchorStream, Iterator[AnchorBatch]]] = {}
        try:
            while True:
                key = self.rollouts.source(self.step)
                if key not in streams:
                    part = self.rollouts.part(*key)
                    stream = AnchorStream(
                        part.store, self.cfg, self.world.rank, self.world.size,
                        samples_seen=uses.get(key, 0) * self.cfg.global_batch, visited=part.starts,
                    )  # fmt: skip
                    streams[key] = stream, iter(stream)
                stream, batches = streams[key]
                step = self.step
                for micro in range(stream.accumulation):
                    batch = next(batches)
                    self.data_wait_s += stream.last_wait_s
                    if micro == stream.accumulation - 1:
                        self.step += 1
                    yield dataclasses.replace(batch, step=step)  # of the training, not of the part
        finally:
            for _, batches in streams.values():
                batches.close()
