"""Starts: the same weights for the same seed, and the target's own layers where asked."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from infra.errors import TargetError
from trainer.drafter.config import DrafterConfig
from trainer.drafter.init import init_from_target, init_random
from trainer.drafter.model import Drafter

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def target(kind, folder, seed=0, **sizes):
    torch.manual_seed(seed)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **sizes}))
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.3 * torch.randn_like(p))
    model.eval().save_pretrained(folder)
    return model


def drafter_for(model, **fields):
    fields = {"block_size": 4, "mask_token_id": 96, "target_layer_ids": (1, 3), "num_hidden_layers": 2, **fields}
    return Drafter(DrafterConfig.for_target(model.config, **fields))


def test_random_start_is_a_function_of_the_seed(tools):
    a, b, c = (Drafter(tools.config()) for _ in range(3))
    for drafter, seed in ((a, 1), (b, 1), (c, 2)):
        init_random(drafter, seed)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.fc.weight, c.fc.weight)


def test_context_keys_and_values_are_the_targets_own(tmp_path):
    """What a layer of the drafter computes from the tap is what the copied layer would have computed from it."""
    model = target("qwen3", tmp_path)
    drafter = drafter_for(model)
    init_from_target(drafter, tmp_path)
    ids = torch.randint(0, 96, (1, 20))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        hidden_SLD = torch.stack([states[i + 1][0] for i in drafter.config.target_layer_ids], dim=1)
        context_SD = drafter._context(hidden_SLD, None)
        for ours, theirs in zip(drafter.layers, model.model.layers[-2:], strict=True):
            x = theirs.input_layernorm(hidden_SLD[:, -1])
            expected = theirs.self_attn.k_norm(theirs.self_attn.k_proj(x).view(20, 2, 8))
            got = ours.self_attn.k_norm(ours.self_attn.k_proj(context_SD).view(20, 2, 8))
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours.self_attn.v_proj(context_SD), theirs.self_attn.v_proj(x))
    assert torch.equal(drafter.norm.weight, model.model.norm.weight)


def test_a_started_layer_equals_transformers_qwen3_layer(tmp_path):
    """RoPE, norms and MLP against transformers: one document, and a block that is its causal continuation."""
    model = target("qwen3", tmp_path, num_hidden_layers=1)
    drafter = Drafter(
        DrafterConfig.for_target(
            model.config.to_dict() | {"num_hidden_layers": 4},
            block_size=6,
            mask_token_id=96,
            target_layer_ids=(0,),
            num_hidden_layers=1,
            causal=True,
        )
    )
    init_from_target(drafter, tmp_path)
    x = torch.randn(1, 15, 32)
    with torch.no_grad():
        expected = model.model(inputs_embeds=x).last_hidden_state[0]
        hidden_SLD = x[0, :, None]  # features = the layer's own input
        nine = torch.tensor([9])
        out = drafter(hidden_SLD[:9], torch.arange(9), x[:, 9:], torch.tensor([0]), nine, nine)
    torch.testing.assert_close(out[0], expected[9:], rtol=0, atol=1e-5)


def test_targets_without_query_key_norms(tmp_path):
    model = target("llama", tmp_path)
    drafter = drafter_for(model)
    init_from_target(drafter, tmp_path)
    layer, theirs = drafter.layers[1].self_attn, model.model.layers[-1].self_attn
    blind = layer.k_norm.weight[0].item()
    hidden_SLD = torch.randn(300, 2, 32)
    init_from_target(drafter, tmp_path, hidden_SLD)
    with torch.no_grad():
        keys = theirs.k_proj(model.model.layers[-1].input_layernorm(hidden_SLD[:, -1]))
    expected = keys.square().mean().sqrt().item()
    assert layer.k_norm.weight[0].item() == pytest.approx(expected, rel=0.05)
    assert blind == pytest.approx(expected, rel=0.2)  # the features here do have independent components


@pytest.mark.parametrize("conditioning", ["kv_injection", "input_fusion", "none"])
def test_every_conditioning_can_start(tmp_path, conditioning):
    model = target("llama", tmp_path)
    drafter = drafter_for(model, conditioning=conditioning)
    init_from_target(drafter, tmp_path)
    assert all(torch.isfinite(p).all() for p in drafter.parameters())


def test_layers_that_do_not_fit(tmp_path):
    model = target("llama", tmp_path)
    with pytest.raises(TargetError, match=r"mlp\.gate_proj\.weight.*\(64, 32\).*\(48, 32\)"):
        init_from_target(drafter_for(model, intermediate_size=64), tmp_path)
    with pytest.raises(TargetError, match="8 layers"):
        init_from_target(drafter_for(model, num_hidden_layers=8), tmp_path)
