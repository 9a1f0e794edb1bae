"""Checkpoint layouts: names, ids, round trips, and refusals that would otherwise be silent acceptance collapses."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

from features.target_config import uniform_tap_layer_ids
from infra.errors import CheckpointError, ConfigError
from trainer.drafter.checkpoint import load_drafter, read_config, save_drafter
from trainer.drafter.config import DrafterConfig
from trainer.drafter.export import export_speculators
from trainer.drafter.model import Drafter


def qwen3_8b() -> DrafterConfig:
    """The target's configuration carries fields that must not reach the drafter."""
    target = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        max_position_embeddings=40960,
    )
    return DrafterConfig.for_target(target, block_size=16, mask_token_id=151669, target_layer_ids=(1, 9, 17, 25, 33))


def test_qwen3_8b_has_the_58_published_tensors():
    cfg = qwen3_8b()
    with torch.device("meta"):
        shapes = {k: tuple(v.shape) for k, v in Drafter(cfg).state_dict().items()}
    layer = {
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate_proj": (12288, 4096),
        "mlp.up_proj": (12288, 4096),
        "mlp.down_proj": (4096, 12288),
    }
    expected = {f"layers.{i}.{n}.weight": s for i in range(5) for n, s in layer.items()}
    expected |= {"fc.weight": (4096, 20480), "hidden_norm.weight": (4096,), "norm.weight": (4096,)}
    assert len(expected) == 58
    assert shapes == expected


def test_config_json_is_the_published_one():
    data = qwen3_8b().to_zlab_json()
    published = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "num_target_layers": 36,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 5,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "attention_bias": False,
        "dtype": "bfloat16",
    }
    assert {k: data[k] for k in published} == published
    assert "partial_rotary_factor" not in json.dumps(data)
    assert DrafterConfig.from_zlab_json(data) == qwen3_8b()


@pytest.mark.parametrize(
    ("layers", "ids"),
    [(28, (1, 7, 13, 19, 25)), (32, (1, 8, 15, 22, 29)), (36, (1, 9, 17, 25, 33)), (64, (1, 16, 31, 46, 61))],
)
def test_layer_ids_of_new_targets(layers, ids):
    assert uniform_tap_layer_ids(layers, 5) == ids


def test_ids_are_read_and_never_recomputed():
    """A published drafter whose ids the formula does not give (sglang#37475); block size inside dflash_config."""
    data = qwen3_8b().to_zlab_json()
    data["num_target_layers"] = 64
    data["dflash_config"] = {"mask_token_id": 5, "target_layer_ids": [5, 19, 33, 47, 61], "block_size": 8}
    del data["block_size"]
    cfg = DrafterConfig.from_zlab_json(data)
    assert cfg.target_layer_ids == (5, 19, 33, 47, 61)
    assert cfg.block_size == 8


def test_sliding_layers_are_read():
    data = qwen3_8b().to_zlab_json()
    data["layer_types"] = ["sliding_attention"] * 4 + ["full_attention"]
    data["sliding_window"] = 2048
    cfg = DrafterConfig.from_zlab_json(data)
    assert [cfg.layer_window(i) for i in range(5)] == [2048] * 4 + [None]
    assert [cfg.layer_causal(i) for i in range(5)] == [True] * 4 + [False]
    assert cfg.to_zlab_json()["use_sliding_window"]


def test_llama_rope_scaling_is_kept():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    target = LlamaConfig(num_hidden_layers=32, rope_parameters=rope, head_dim=128)
    cfg = DrafterConfig.for_target(target, block_size=10, mask_token_id=7, target_layer_ids=(1, 8))
    assert cfg.rope_theta == 5e5
    assert cfg.rope_scaling["factor"] == 8.0
    assert DrafterConfig.from_zlab_json(cfg.to_zlab_json()) == cfg


@pytest.mark.parametrize(
    "change", [{}, {"causal": True}, {"conditioning": "input_fusion"}, {"drafting": "autoregressive"}]
)
def test_zlab_round_trip(tools, tmp_path, change):
    drafter = tools.drafter(**change)
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path)
    assert again.config == drafter.config
    row = tools.row(drafter.config)
    torch.testing.assert_close(tools.run(again, row), tools.run(drafter, row), rtol=0, atol=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_dtype_of_saving_and_loading(tools, tmp_path):
    save_drafter(tools.drafter(), tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_drafter(tmp_path).fc.weight.dtype == torch.bfloat16
    assert load_drafter(tmp_path, dtype=torch.float32).fc.weight.dtype == torch.float32


def test_speculators_round_trip(tools, tmp_path):
    drafter = tools.drafter()
    row = tools.row(drafter.config)
    export_speculators(
        drafter, tmp_path, embedding_VD=row.embedding_VD, head_VD=row.embedding_VD, target_name="org/target"
    )
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert data["sliding_window_non_causal"] is True
    assert data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert {"embed_tokens.weight", "lm_head.weight"} <= load_file(tmp_path / "model.safetensors").keys()
    again = load_drafter(tmp_path)
    assert again.config.target_layer_ids == drafter.config.target_layer_ids
    torch.testing.assert_close(tools.run(again, row), tools.run(drafter, row), rtol=0, atol=0)


def test_speculators_export_refuses_ablations(tools, tmp_path):
    drafter = tools.drafter(conditioning="none")
    row = tools.row(drafter.config)
    with pytest.raises(CheckpointError, match="conditioning 'none'"):
        export_speculators(drafter, tmp_path, embedding_VD=row.head_VD, head_VD=row.head_VD, target_name="x")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sample_from_anchor": True}, "sample-from-anchor"),
        ({"architectures": ["Qwen3DSparkModel"]}, "off by one"),
        ({"dflash_config": {"shift_label": True}}, "sample-from-anchor"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type"),
        ({"dflash_config": {"conv_kernel_size": 2}}, "conv_kernel_size"),
        ({"draft_vocab_size": 32000}, "reduced vocabulary"),
        ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 35]}}, "35"),
    ],
)
def test_other_layouts_are_refused_with_a_sentence(tmp_path, change, sentence):
    (tmp_path / "config.json").write_text(json.dumps({**qwen3_8b().to_zlab_json(), **change}))
    with pytest.raises(CheckpointError, match=sentence):
        read_config(tmp_path)


def test_damage_is_named(tools, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_drafter(tmp_path)
    drafter = tools.drafter()
    save_drafter(drafter, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    save_file({k: v for k, v in tensors.items() if k != "norm.weight"}, file)
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        load_drafter(tmp_path)
    save_file({**tensors, "fc.weight": tensors["fc.weight"][:, :-32].contiguous()}, file)
    with pytest.raises(CheckpointError, match=r"fc\.weight.*\(32, 64\)"):
        load_drafter(tmp_path)
    save_file({**tensors, "norm.weight": tensors["norm.weight"] * float("nan")}, file)
    with pytest.raises(CheckpointError, match="not finite"):
        load_drafter(tmp_path)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_key_value_heads": 3}, "key/value"),
        ({"mask_token_id": 97}, "no row"),
        ({"target_layer_ids": (1, 7)}, "outside 0..6"),
        ({"layer_types": ("sliding_attention",) * 2}, "sliding_window"),
        ({"layer_types": ("full_attention",)}, "1 entries"),
    ],
)
def test_impossible_configurations(tools, change, sentence):
    base = tools.config().model_dump()
    with pytest.raises(ConfigError, match=sentence):
        DrafterConfig.for_target({**base, "num_hidden_layers": 8}, **{**base, **change})
