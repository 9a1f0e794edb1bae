"""Stages `rl` and `rl-onpolicy` on the tiny target: refusals, resume bit for bit, what rollouts record.

Legend: S tokens, K block size, V vocabulary.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.decode import DecodeSettings
from eval.proposer import DrafterProposer
from features.reader import FeatureStore
from infra.config import validate
from infra.errors import ConfigError, SpecMismatch, StoreError
from kernels import acceptance
from trainer.build import build_drafter
from trainer.config import SftConfig
from trainer.drafter.checkpoint import save_drafter
from trainer.engine import init_world
from trainer.onpolicy.config import OnPolicyConfig
from trainer.onpolicy.record import roll_out
from trainer.onpolicy.rollouts import Rollouts
from trainer.onpolicy.store import commit_path, open_part, write_part
from trainer.rl import check_text, reward_gains, train
from trainer.rl_config import RlConfig, RlSection

SMALL = {
    "model": "tiny",
    "data": {
        "anchors_per_document": 6, "global_batch": 4, "documents_per_micro_batch": 2, "shape": "trimmed",
    },
    "optim": {"lr": 1e-3},
    "engine": {"dtype": "fp32", "zero_stage": 0},
    "train": {"steps": 6, "save_every": 3, "eval_every": 3, "eval_documents": 4, "log_every": 2, "seed": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def world():
    return init_world()


@pytest.fixture(scope="module")
def start(tiny, tiny_store, tmp_path_factory) -> Path:
    """An untrained drafter of one layer, initialised from the target."""
    cfg = SftConfig(model="tiny", drafter={"num_hidden_layers": 1, "block_size": 6})
    folder = tmp_path_factory.mktemp("start") / "drafter"
    save_drafter(build_drafter(cfg, tiny.config, FeatureStore.open(tiny_store), seed=0), folder)
    return folder


def config(kind, start, store, **sections):
    data = SMALL | {"drafter": {"start_from": str(start)}, "data": SMALL["data"] | {"store": store}} | sections
    return validate(kind, data, "test")


def records(run: Path) -> list[dict]:
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: r[k] for k in ("step", "loss", "grad_norm")} for r in lines]


@pytest.mark.parametrize("estimator", ["closed", "group"])
def test_resume_repeats_visits_and_draws(in_tmp, start, tiny_store, world, estimator):
    """Interrupted at step 3, between two refreshes of the visits (every 2 steps) and of the rollout drafter."""
    rl = {
        "visited_every": 2, "visited_documents": 12, "kl": 0.05, "kl_direction": "both", "estimator": estimator,
        "group": {"size": 4, "baseline": "reference", "rollout_every": 2} if estimator == "group" else {},
    }  # fmt: skip
    cfg = config(RlConfig, start, tiny_store, rl=rl, name="whole")
    train(cfg, world)
    whole = in_tmp / "runs" / "whole"
    kept = {p.name for p in (whole / "visits").glob("*.npz")}  # those of step 0 too, if no save was done by step 4
    assert {f"step-0000000{s}.npz" for s in (2, 4)} <= kept
    again = in_tmp / "runs" / "again"
    shutil.copytree(whole, again)
    (again / "mlflow.json").unlink()
    (again / "checkpoints" / "latest").write_text("step-00000003\n")
    shutil.rmtree(again / "checkpoints" / "step-00000006")
    shutil.rmtree(again / "drafter")
    (again / "visits" / "step-00000004.npz").unlink()
    train(cfg.model_copy(update={"name": "again"}), world)
    assert records(again) == records(whole)
    logged = [json.loads(x) for x in (whole / "metrics.jsonl").read_text().splitlines()]
    assert max(r.get("visited_blocks_share", 0) for r in logged) > 0.5
    assert all("refresh_s" in r for r in logged)


def test_visits_are_where_replay_begins_blocks(tiny, start, tiny_store):
    from eval.replay import Text, matches, walk
    from trainer.drafter.checkpoint import load_drafter
    from trainer.heldout import store_text
    from trainer.visits import visited

    store, drafter, head = FeatureStore.open(tiny_store), load_drafter(start).eval(), tiny.frozen_head()
    texts = [store_text(store, row) for row in range(6)]
    one = texts[0]
    texts.append(Text(one.token_ids_S, one.hidden_SLD, ((12, 20), (23, 24), (26, 34)), "two turns"))
    found = visited(drafter, head, texts)
    for text, starts in zip(texts, found, strict=True):
        np.testing.assert_array_equal(starts, walk(matches(drafter, head, text), text.answers, 6).start)


def test_early_stop_keeps_the_best_drafter(in_tmp, start, tiny_store, world):
    """A learning rate that ruins the drafter: the stage ends early, and what it keeps is the one it began with."""
    rl = {"visited_share": 0.0, "patience": 1}
    train_ = SMALL["train"] | {"steps": 30, "eval_every": 3}
    cfg = config(RlConfig, start, tiny_store, rl=rl, optim={"lr": 30.0, "warmup_ratio": 0.0}, train=train_, name="bad")
    kept = train(cfg, world)
    assert len(records(in_tmp / "runs" / "bad")) < 30
    assert (kept / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes()
    assert train(cfg, world) == kept  # the same command again finds it over


def test_text_of_another_kind_is_refused(tiny_store):
    store = FeatureStore.open(tiny_store)
    check_text(store, RlSection(), vocabulary=264)
    with pytest.raises(ConfigError, match=r"rl.text = 'sampled', but 0.00% of \d+ answer tokens .* set rl.text=greedy"):
        check_text(store, RlSection(text="sampled"), vocabulary=264)
    with pytest.raises(ConfigError, match="so its text is sampled"):
        check_text(store, RlSection(), vocabulary=1)  # every token below 1/V, as drawn text has some


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"verification": "rejection"}, "set text = 'sampled' and temperature"),
        ({"verification": "rejection", "text": "sampled", "temperature": (1.0, 1.0), "estimator": "group"}, "'closed'"),
        ({"reward": "throughput"}, "needs rl.schedule"),
        ({"temperature": (1.0, 0.0)}, "must be positive"),
    ],
)
def test_settings_without_meaning_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        validate(RlSection, settings, "test")


def test_a_start_is_needed_and_the_floor_is_static(start, tiny_store):
    with pytest.raises(ConfigError, match="give INIT=runs"):
        validate(RlConfig, {"model": "tiny"}, "test")
    with pytest.raises(ConfigError, match="fixed weights and hard labels"):
        config(RlConfig, start, tiny_store, loss={"weighting": "dpace"})


def test_another_reference_is_refused(in_tmp, tiny, start, tiny_store, world):
    rl = {"kl": 0.1, "visited_share": 0.0, "reference": str(in_tmp / "reference")}
    cfg = config(RlConfig, start, tiny_store, rl=rl, train=SMALL["train"] | {"steps": 1, "save_every": 1})
    other = SftConfig(model="tiny", drafter={"num_hidden_layers": 1, "block_size": 4})
    store = FeatureStore.open(tiny_store)
    save_drafter(build_drafter(other, tiny.config, store, seed=0), in_tmp / "reference")
    with pytest.raises(SpecMismatch, match="has block_size 4, the drafter 6"):
        train(cfg, world)
    shutil.copytree(start, in_tmp / "reference", dirs_exist_ok=True)
    train(cfg, world)
    same = SftConfig(model="tiny", drafter={"num_hidden_layers": 1, "block_size": 6, "init": "random"})
    save_drafter(build_drafter(same, tiny.config, store, seed=9), in_tmp / "reference")
    with pytest.raises(SpecMismatch, match="began with reference drafter"):
        train(cfg, world)


def test_rewards(tmp_path):
    assert reward_gains(RlSection(), 4).tolist() == [1, 1, 1, 1]
    window = reward_gains(RlSection(reward="window", window_cost=0.5), 4).cumsum(0)
    torch.testing.assert_close(window, torch.tensor([1 / 1.5, 2 / 2, 3 / 2.5, 4 / 3], dtype=torch.float64))
    table = {"block_size": 4, "best": {"2": {"best": 3}}, "draft_ms": {"2": 1.0}, "verify_ms": {"2": {"3": 4.0}}}
    (tmp_path / "schedule.json").write_text(json.dumps(table))
    rl = RlSection(reward="throughput", schedule=str(tmp_path / "schedule.json"), concurrency=2)
    # two sequences, 5 ms a cycle, three positions verified: no draft beyond the second counts
    torch.testing.assert_close(reward_gains(rl, 4).cumsum(0), torch.tensor([2 / 5, 4 / 5, 6 / 5, 6 / 5]).double())
    with pytest.raises(ConfigError, match=r"for blocks of 4 at 2 sequences, not blocks of 6"):
        reward_gains(rl, 6)
    with pytest.raises(ConfigError, match="does not exist"):
        reward_gains(rl.model_copy(update={"schedule": "nowhere"}), 4)


@pytest.fixture(scope="module")
def rollouts(tiny, start, tiny_store):
    from trainer.drafter.checkpoint import load_drafter

    store = FeatureStore.open(tiny_store)
    prompts = [store.read_array("token_ids", r)[:12].tolist() for r in range(5)]
    proposer = DrafterProposer(load_drafter(start), tiny.frozen_head())
    return roll_out(tiny, proposer, prompts, DecodeSettings(max_new_tokens=20, batch_size=3), top_k=5)


def test_rollouts_record_what_the_target_said(tiny, rollouts):
    """Features, log-probabilities of the text, and the target's distributions behind drafts, against plain passes."""
    assert len(rollouts) == 5
    for r in rollouts:
        text = torch.tensor(r.token_ids_S[None].astype(np.int64))
        out = tiny.forward(text)
        S = text.shape[1]
        torch.testing.assert_close(r.features.hidden_SLD[: S - 1], out.hidden_BSLD[0, : S - 1], atol=1e-4, rtol=1e-4)
        logprob = out.logits_BSV[0].log_softmax(-1)
        for at in range(r.prompt_length + 1, S):
            assert r.features.target_logprob_S[at] == pytest.approx(float(logprob[at - 1, text[0, at]]), abs=1e-4)
        assert r.cycles[0].start == r.prompt_length
        for cycle, accepted in zip(r.cycles, r.accepted, strict=True):
            path = torch.cat([text[0, : cycle.start + 1], torch.tensor(cycle.drafts)])
            behind = tiny.forward(path[None]).logits_BSV[0, cycle.start : -1].log_softmax(-1)
            values, ids = behind.topk(5)
            assert (ids[:, 0] == torch.from_numpy(cycle.topk_ids[:, 0])).all()
            np.testing.assert_allclose(cycle.topk_logprobs, values.numpy(), atol=2e-2)
            stood = (ids[:, 0] == torch.tensor(cycle.drafts)).long().cumprod(0).sum()
            assert accepted == int(stood)


def test_one_writer_commits_a_part(tmp_path, tiny, rollouts):
    first = write_part(tmp_path, 0, rollouts, tiny, "d", "fp32")
    second = write_part(tmp_path, 0, rollouts[:2], tiny, "d", "fp32")  # a repeated task
    assert second == first and len(list(tmp_path.glob("part-0000-*"))) == 1
    part = open_part(tmp_path, 0)
    assert part.store.documents.num_rows == 5 and len(part.cycles) == sum(len(r.cycles) for r in rollouts)
    document = rollouts[0].features.document
    assert part.starts(document).tolist() == [c.start for c in rollouts[0].cycles]
    with open(tmp_path / first["attempt"] / "cycles.parquet", "ab") as f:
        f.write(b"x")
    with pytest.raises(StoreError, match=r"is not what .* committed"):
        open_part(tmp_path, 0)


def test_the_buffer_reads_newest_first_and_no_older_than_allowed(start, tiny_store, world, tmp_path):
    rollout = {"steps_per_round": 4, "prompts_per_round": 16, "parts": 2, "staleness": 1}
    cfg = config(OnPolicyConfig, start, tiny_store, rollout=rollout)
    buffer = Rollouts(cfg, FeatureStore.open(tiny_store), world, tmp_path, 12)
    assert [buffer.source(s) for s in range(8)] == [(0, 0), (0, 1)] * 2 + [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert {buffer.source(s)[0] for s in range(8, 12)} == {1, 2}
    with pytest.raises(ConfigError, match=r"below data.global_batch = 4 per part"):
        config(OnPolicyConfig, start, tiny_store, rollout=rollout | {"prompts_per_round": 6})


@pytest.mark.ray
@pytest.mark.slow
def test_rounds_of_real_decoding(in_tmp, start, tiny_store, world, monkeypatch):
    """Two rounds with an actor that vanishes; the second run of the same command decodes only the part that is gone."""
    import ray

    from trainer.onpolicy import rollouts as module
    from trainer.onpolicy.stage import train as train_onpolicy

    submit = module.Actors.submit
    killed = []

    def submit_and_kill(self, arguments):
        running = submit(self, arguments)
        if not killed:  # for good: Ray may not restart it, so the pool must do with the other
            killed.append(running[0][1])
            ray.kill(running[0][1])
        return running

    monkeypatch.setattr(module.Actors, "submit", submit_and_kill)
    rollout = {"steps_per_round": 3, "prompts_per_round": 16, "parts": 2, "actors": 2, "max_new_tokens": 12, "top_k": 4}
    cfg = config(OnPolicyConfig, start, tiny_store, rollout=rollout, name="on")
    train_onpolicy(cfg, world)
    assert not ray.is_initialized() and killed
    run = in_tmp / "runs" / "on"
    assert len(records(run)) == 6
    logged = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(r.get("recorded_blocks", 0) for r in logged) > 0
    whole = records(run)
    commits = {p: commit_path(run / "rollouts" / "round-0001", p).read_text() for p in (0, 1)}
    (run / "checkpoints" / "latest").write_text("step-00000003\n")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    shutil.rmtree(run / "drafter")
    commit_path(run / "rollouts" / "round-0001", 1).unlink()
    train_onpolicy(cfg, world)
    assert records(run) == whole
    assert commit_path(run / "rollouts" / "round-0001", 0).read_text() == commits[0]
    assert (
        json.loads(commit_path(run / "rollouts" / "round-0001", 1).read_text())["fingerprint"]
        == (json.loads(commits[1])["fingerprint"])
    )


def test_group_gains_are_those_of_the_table():
    draws = acceptance.Draws(
        torch.zeros(1, 1, 4).bool(), torch.tensor([[[False, True, True, False]]]), torch.tensor([[1]])
    )
    come = acceptance.reward_to_come(draws, torch.tensor([1.0, 0.5, 0.25, 0.125]))
    assert come.tolist() == [[[0.0, 0.5, 0.0, 0.0]]]  # f(1) - f(0) at slot 1; the slot that fails gets nothing


def test_rows_of_a_study_that_do_not_exist():
    from trainer.study.__main__ import run
    from trainer.study.config import StudyConfig

    with pytest.raises(ConfigError, match="must begin with 'sft-decay'"):
        run(StudyConfig(rows=("rl-visited",)))
