"""Recipes, schedules, and the refusals before the first step."""

import math
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from features.reader import FeatureStore
from features.target_config import RandomSource, load_target_config
from features.target_source import target_folder, weights_digest
from infra.config import load_config, read_toml
from infra.errors import CheckpointError, ConfigError, SpecMismatch, StoreError
from trainer.__main__ import STAGES
from trainer.build import build_drafter, check_store, find_store
from trainer.checkpoint import latest
from trainer.config import RECIPES, LossConfig, OptimConfig, SftConfig, changed_settings
from trainer.engine import accumulation_steps, build_optimizer, deepspeed_config, parameter_groups
from trainer.run_folder import RunFolder


@pytest.mark.parametrize("recipe", [p.stem for p in RECIPES.glob("*.toml")])
def test_every_recipe_loads(recipe):
    stage = read_toml(RECIPES / f"{recipe}.toml")["stage"]
    cfg = load_config(STAGES[stage][1], RECIPES / f"{recipe}.toml", ["drafter.start_from=a"] if stage != "sft" else [])
    assert cfg.stage == stage
    assert "auto" not in str(deepspeed_config(cfg, 1))


def test_the_papers_recipe():
    cfg = load_config(SftConfig, RECIPES / "sft.toml")
    assert (cfg.optim.lr, cfg.optim.warmup_ratio, cfg.optim.clip, cfg.train.epochs) == (6e-4, 0.04, 1.0, 6)
    assert (cfg.data.anchors_per_document, cfg.drafter.num_hidden_layers) == (512, 5)
    assert [LossConfig().resolved_gamma(k) for k in (16, 10, 8)] == [7, 5, 4]


def test_learning_rate_schedule():
    optim = OptimConfig(lr=1.0, warmup_ratio=0.1)
    assert [optim.lr_at(s, 100) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert optim.lr_at(55, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    assert optim.lr_at(100, 100) == pytest.approx(0.0)


def test_batches_that_do_not_divide():
    with pytest.raises(ConfigError, match=r"global_batch = 5 is not a multiple of data.documents_per_micro_batch = 2"):
        load_config(SftConfig, RECIPES / "sft.toml", ["data.global_batch=5", "data.documents_per_micro_batch=2"])
    cfg = load_config(SftConfig, RECIPES / "sft.toml")
    assert [accumulation_steps(cfg, w) for w in (1, 2, 64)] == [64, 32, 1]
    with pytest.raises(ConfigError, match="not a multiple of 48 ranks"):
        accumulation_steps(cfg, 48)


def test_changed_settings_are_named():
    old = {"a": {"b": 1, "c": 2}, "d": 3}
    assert changed_settings(old, {"a": {"b": 1, "c": 5}, "e": 4}) == {"a.c": (2, 5), "d": (3, None), "e": (None, 4)}


def test_no_store_says_which_command_makes_one(in_tmp):
    with pytest.raises(StoreError, match="run make features MODEL=tiny"):
        find_store(SftConfig(model="tiny"), load_target_config("tiny"))


def test_store_of_other_settings_is_refused(tiny_store):
    store, cfg = FeatureStore.open(tiny_store), SftConfig(model="tiny")
    target = load_target_config("tiny")
    check_store(store, cfg, target)
    for change, words in (
        ({"tap_layer_ids": (1, 2, 4)}, r"tap_layer_ids \(1, 2, 3\).*\(1, 2, 4\)"),
        ({"name": "other"}, "target 'tiny'.*'other'"),
        ({"chat_template_args": {"enable_thinking": True}}, "chat_template_args {}.*enable_thinking"),
    ):
        with pytest.raises(SpecMismatch, match=words):
            check_store(store, cfg, target.model_copy(update=change))
    other = RandomSource.model_validate({**target.source.model_dump(), "seed": 1})
    with pytest.raises(SpecMismatch, match=r"was made with weights_digest '.*use the store's own target file"):
        check_store(store, cfg, target.model_copy(update={"source": other}))
    wide = RandomSource.model_validate(
        {**target.source.model_dump(), "config": {**target.source.config, "hidden_size": 32}}
    )
    store.spec = store.spec.model_copy(
        update={"weights_digest": weights_digest(target_folder(with_source(target, wide)))}
    )
    with pytest.raises(SpecMismatch, match=r"hidden_size 64.*says 32"):
        check_store(store, cfg, with_source(target, wide))


def test_an_unfinished_store_is_refused(tiny_store, tmp_path):
    shutil.copytree(tiny_store, tmp_path / "s")
    for commit in sorted((tmp_path / "s" / "commits").glob("*.json"))[:1]:
        commit.unlink()
    (tmp_path / "s" / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"lacks 1 shards; run make features MODEL=tiny again"):
        check_store(FeatureStore.open(str(tmp_path / "s")), SftConfig(model="tiny"), load_target_config("tiny"))


def test_a_run_keeps_its_features(in_tmp):
    cfg = SftConfig(model="tiny", name="r")
    run = RunFolder(cfg)
    run.begin(cfg, {}, store_fingerprint="a" * 64)
    RunFolder(cfg).check_store("a" * 64, allow_changed=())
    RunFolder(cfg).check_store("b" * 64, allow_changed=["data.store"])
    with pytest.raises(ConfigError, match="began with the features aaaaaaaaaaaa, and the store now has bbbbbbbbbbbb"):
        RunFolder(cfg).check_store("b" * 64, allow_changed=())


def test_soft_labels_need_a_teacher(tiny_store):
    cfg = SftConfig.model_validate({"model": "tiny", "loss": {"soft_share": 0.5}})
    with pytest.raises(SpecMismatch, match=r"soft_share = 0.5 needs.*prefill.top_k=32"):
        check_store(FeatureStore.open(tiny_store), cfg, load_target_config("tiny"))


def with_source(target, source):
    return target.model_copy(update={"source": source})


def test_the_drafter_of_another_target_is_refused(tiny_store, tmp_path):
    from trainer.drafter.checkpoint import save_drafter

    store, target = FeatureStore.open(tiny_store), load_target_config("tiny")
    cfg = SftConfig.model_validate({"model": "tiny", "drafter": {"num_hidden_layers": 1, "init": "random"}})
    drafter = build_drafter(cfg, target, store, seed=0)
    assert sum(p.requires_grad for p in drafter.parameters()) == len(list(drafter.parameters())) == 14
    drafter.config = drafter.config.model_copy(update={"target_layer_ids": (0, 2, 3)})
    save_drafter(drafter, tmp_path / "d")
    start = SftConfig.model_validate({"model": "tiny", "drafter": {"start_from": str(tmp_path / "d")}})
    with pytest.raises(SpecMismatch, match=r"target_layer_ids \(0, 2, 3\)"):
        build_drafter(start, target, store, seed=0)
    right = drafter.config.model_copy(update={"target_layer_ids": (1, 2, 3)})
    for change, words in (
        ({"vocab_size": 300}, "has vocab_size 300, but the store of tiny has 264"),
        ({"mask_token_id": 100}, "has mask_token_id 100.*use a drafter of this target"),
    ):
        drafter.config = right.model_copy(update=change)
        save_drafter(drafter, tmp_path / "d")
        with pytest.raises(SpecMismatch, match=words):
            build_drafter(start, target, store, seed=0)


def test_a_checkpoint_that_is_gone_is_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert latest(tmp_path) is None
    (tmp_path / "checkpoints" / "latest").write_text("step-00000004\n")
    with pytest.raises(
        CheckpointError, match="names 'step-00000004', which is not complete; write the name of another"
    ):
        latest(tmp_path)


def test_a_second_ctrl_c_ends_at_once(root):
    code = "import time; from trainer.signals import StopRequest; s = StopRequest(); print('up', flush=True)\n"
    code += "while True:\n    time.sleep(0.05)\n    if s.requested: print('asked', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked\n" and process.poll() is None  # the step goes on
        time.sleep(1.1)  # torchrun repeats the terminal's signal within a second
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
    finally:
        process.kill()


def test_stages_that_deepspeed_does_not_do_are_refused():
    with pytest.raises(ConfigError, match=r"zero_stage = 0 with engine.dtype = 'bf16' is a pair .*use stage 1"):
        load_config(SftConfig, RECIPES / "sft.toml", ["engine.zero_stage=0"])
    with pytest.raises(ConfigError, match=r"'muon' is not done under engine.zero_stage = 3 .*use stage 1 or 2"):
        load_config(SftConfig, RECIPES / "sft.toml", ["optim.matrices=muon", "engine.zero_stage=3"])
    cfg = load_config(SftConfig, RECIPES / "sft.toml", ["optim.matrices=muon"])
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    groups = build_optimizer(model, cfg.optim, torch.device("cpu")).param_groups
    assert [(g["use_muon"], g["lr"], len(g["params"])) for g in groups] == [(True, 0.02, 1), (False, 6e-4, 3)]
    assert deepspeed_config(cfg, 1)["gradient_clipping"] == 0.0


def test_warm_start_is_the_default_where_it_fits(tiny_store):
    store, target = FeatureStore.open(tiny_store), load_target_config("tiny")
    cfg = SftConfig.model_validate({"model": "tiny", "drafter": {"num_hidden_layers": 2}})
    drafter = build_drafter(cfg, target, store, seed=0)
    other = build_drafter(
        cfg.model_copy(update={"drafter": cfg.drafter.model_copy(update={"init": "random"})}), target, store, 0
    )
    assert torch.equal(drafter.fc.weight[:, -64:], torch.eye(64)) and not torch.equal(
        other.fc.weight[:, -64:], torch.eye(64)
    )


def test_every_parameter_is_in_one_group():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    model[0].weight.requires_grad_(False)
    groups = parameter_groups(model, 0.1)
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(3, 0.0)]
