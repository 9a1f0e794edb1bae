"""Our drafter and loss against code that nobody here wrote: `make parity` installs it and runs these.

Without the peers' packages the tests skip; `dflash` is the authors' own model, `speculators` and `specforge` are the
two trainers, each with its own normalisation of the loss:

    specforge    sum(w * CE) / sum(w)                        as here
    speculators  sum(w * CE) / (sum(mask) + 1e-5)            the unweighted count
    specforge, D-PACE   sum(w * CE) / sequences              here: / blocks with a supervised slot
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from kernels.decay_ce import weighted_cross_entropy
from kernels.weighting import decay, dpace
from trainer.drafter import peers
from trainer.drafter.checkpoint import save_drafter
from trainer.drafter.config import DrafterConfig
from trainer.drafter.export import export_speculators
from trainer.drafter.model import Drafter

pytestmark = [pytest.mark.spawn]


def need(name):
    if not peers.installed(name):
        pytest.skip(f"{name} from PyPI is not installed beside us; `make parity` does it")


def make(sliding=False, S=340, seed=0):
    """A drafter with lively weights and a row of features."""
    cfg = DrafterConfig(
        vocab_size=211,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        block_size=8,
        mask_token_id=210,
        target_layer_ids=(1, 4, 7),
        num_target_layers=12,
        layer_types=("sliding_attention",) * 3 if sliding else (),
        sliding_window=64 if sliding else None,
    )
    g = torch.Generator().manual_seed(seed)
    drafter = Drafter(cfg)
    with torch.no_grad():
        for p in drafter.parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(noise * p.shape[-1] ** -0.5 if p.ndim == 2 else 1 + 0.2 * noise)
    loss_mask = torch.ones(S, dtype=torch.int64)
    loss_mask[:20] = 0
    loss_mask[100:110] = 0
    data = {
        "hidden": torch.randn(S, 3 * 48, generator=g),
        "ids": torch.randint(0, 210, (S,), generator=g),
        "loss_mask": loss_mask,
        "anchors": torch.tensor([20, 21, 40, 95, 150, 151, 153, 300, 330]),
        "embedding": torch.randn(211, 48, generator=g),
        "head": torch.randn(211, 48, generator=g) * 0.3,
    }
    return drafter, data


def ask(name, command, drafter, data, tmp_path, **options):
    weights = {f"w.{k}": v.detach() for k, v in drafter.state_dict().items()}
    options = {"config": drafter.config.to_zlab_json("float32"), **options}
    save_file({**data, **weights}, tmp_path / "in.safetensors", metadata={"json": json.dumps(options)})
    peers.run(name, command, str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors"))
    return load_file(tmp_path / "out.safetensors")


@pytest.mark.parametrize("sliding", [False, True])
def test_dflash_drafts_the_same_tokens(tmp_path, sliding):
    """Behind a 300-token prompt and then block after block, cached: hidden states to 1e-5, tokens exactly."""
    need("dflash")
    drafter, data = make(sliding)
    starts = [300, 301, 305, 306, 313, 320, 321]
    theirs = ask("dflash", "drafts", drafter, data, tmp_path, starts=starts)
    cache, hidden_SLD = drafter.new_cache(), data["hidden"].unflatten(1, (3, -1))
    for n, start in enumerate(starts):
        inputs = drafter.block_inputs(data["ids"][start : start + 1], data["embedding"])
        ours = drafter.decode(inputs, hidden_SLD[cache.length : start], cache, start)[0]
        torch.testing.assert_close(ours, theirs[f"hidden.{n}"], rtol=0, atol=1e-5)
        assert torch.equal((ours[1:] @ data["head"].T).argmax(-1), theirs[f"tokens.{n}"])


@pytest.mark.parametrize("name", ["dflash", "speculators"])
def test_peers_load_what_we_save(tmp_path, name):
    need(name)
    drafter, data = make()
    folder = tmp_path / "exported"
    if name == "dflash":
        save_drafter(drafter, folder)
    else:
        # it fetches embedding, head and final norm from the target that the export names
        sizes = {"num_hidden_layers": 12, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
        target = Qwen3ForCausalLM(Qwen3Config(vocab_size=211, hidden_size=48, intermediate_size=80, **sizes))
        target.save_pretrained(tmp_path / "target")
        export_speculators(
            drafter, folder, embedding_VD=data["embedding"], head_VD=data["head"], target_name=str(tmp_path / "target")
        )
    theirs = ask(name, "load", drafter, data, tmp_path, folder=str(folder))
    assert theirs["numbers"].tolist() == [8, 210, 1, 4, 7]
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(theirs[key], tensor), key


def our_terms(drafter, data, weighting):
    S, K = data["ids"].numel(), drafter.config.block_size
    at = data["anchors"][:, None] + torch.arange(K)
    labels = data["ids"][at.clamp_max(S - 1)]
    mask = (at < S) & data["loss_mask"][at.clamp_max(S - 1)].bool()
    mask[:, 0] = False
    out = drafter(
        data["hidden"].unflatten(1, (3, -1)),
        torch.arange(S),
        drafter.block_inputs(labels, data["embedding"]),
        torch.zeros_like(data["anchors"]),
        data["anchors"],
        data["anchors"],
    )
    return weighted_cross_entropy(out, data["head"], labels, mask, weighting), mask


def compare(loss, drafter, theirs):
    drafter.zero_grad()
    loss.backward()
    torch.testing.assert_close(loss.detach().reshape(1), theirs["loss"], rtol=1e-5, atol=1e-6)
    for name, p in drafter.named_parameters():
        expected = theirs[f"grad.{name}"]
        torch.testing.assert_close(p.grad, expected, rtol=0, atol=2e-5 * float(expected.abs().max() + 1e-3))


@pytest.mark.parametrize("sliding", [False, True])
def test_specforge_training_step(tmp_path, sliding):
    need("specforge")
    drafter, data = make(sliding)
    theirs = ask("specforge", "gradients", drafter, data, tmp_path, gamma=4.0)
    terms, _ = our_terms(drafter, data, decay(4.0))
    compare(terms.numerator / terms.denominator, drafter, theirs)


def test_specforge_dpace(tmp_path):
    need("specforge")
    drafter, data = make()
    theirs = ask("specforge", "gradients", drafter, data, tmp_path, gamma=None, loss_type="dpace")
    terms, _ = our_terms(drafter, data, dpace(0.5))
    compare(terms.numerator / 1, drafter, theirs)


@pytest.mark.parametrize("weighting", ["fixed-exp-decay", "dpace"])
def test_speculators_training_step(tmp_path, weighting):
    need("speculators")
    drafter, data = make()
    # its indices run over the row's end where ours stop: keep every block inside
    data["anchors"] = data["anchors"].clamp_max(data["ids"].numel() - drafter.config.block_size)
    theirs = ask(
        "speculators", "gradients", drafter, data, tmp_path, gamma=4.0, labels="ids", weighting=weighting
    )  # fmt: skip
    terms, mask = our_terms(drafter, data, decay(4.0) if weighting == "fixed-exp-decay" else dpace(0.5))
    compare(terms.numerator / (mask.sum() + 1e-5), drafter, theirs)
