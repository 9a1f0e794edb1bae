"""What runs inside a peer's packages (see `trainer.drafter.peers`): `peer_side.py WHO COMMAND IN.safetensors OUT`.

Legend: S context rows, D hidden size, A anchors, K block size, V vocabulary.

Nothing of ours is imported except for WHO = ours. The input file carries the drafter's weights under their published
names, `embedding`, `head`, `hidden` [S, taps*D], `ids` [S], `loss_mask` [S], `anchors` [A]; its metadata a JSON with
the drafter's published config.json under `config` and the options of the command.
"""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn


def read(path):
    with safe_open(path, framework="pt") as f:
        return {k: f.get_tensor(k) for k in f.keys()}, json.loads(f.metadata()["json"])  # noqa: SIM118


def weights_of(data):
    return {k.removeprefix("w."): v for k, v in data.items() if k.startswith("w.")}


def qwen3(config, **extra):
    from transformers import Qwen3Config

    return Qwen3Config(**{k: v for k, v in config.items() if k not in ("architectures", "dtype")}, **extra)


def dflash_drafts(data, options):
    """The authors' model, decoding one block after the other at the given starts with its cache."""
    from dflash.model import DFlashDraftModel
    from transformers import DynamicCache

    model = DFlashDraftModel(qwen3(options["config"])).float().eval()
    model.load_state_dict(weights_of(data))
    cache, out, done = DynamicCache(), {}, 0
    K = options["config"]["block_size"]
    with torch.no_grad():
        for n, start in enumerate(options["starts"]):
            block = torch.full((1, K), options["config"]["dflash_config"]["mask_token_id"])
            block[0, 0] = data["ids"][start]
            hidden = model(
                target_hidden=data["hidden"][None, done:start],
                noise_embedding=nn.functional.embedding(block, data["embedding"]),
                position_ids=torch.arange(done, start + K)[None],
                past_key_values=cache,
                use_cache=True,
            )
            cache.crop(start)
            done = start
            out[f"hidden.{n}"] = hidden[0].contiguous()
            out[f"tokens.{n}"] = (hidden[0, 1:] @ data["head"].T).argmax(-1)
    return out


def load_folder(who, options):
    """The tensors that a peer has after loading an exported folder by itself."""
    if who == "dflash":
        from dflash.model import DFlashDraftModel

        model = DFlashDraftModel.from_pretrained(options["folder"], dtype=torch.float32)
        numbers = [model.block_size, model.mask_token_id, *model.target_layer_ids]
    else:
        from speculators.models.dflash import DFlashDraftModel

        model = DFlashDraftModel.from_pretrained(options["folder"])
        numbers = [model.block_size, model.mask_token_id, *(i - 1 for i in model.target_layer_ids)]
    return {
        **{k: v.float().contiguous().clone() for k, v in model.state_dict().items()},
        "numbers": torch.tensor(numbers),
    }


def speculators_step(data, options):
    """Returns (parameters, function that gives the loss), with the anchors of the input."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses.eager import ce_loss
    from speculators.models.dflash import DFlashSpeculatorConfig, core
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    config = options["config"]
    layer = qwen3(config)
    layer._attn_implementation = options.get("attention", "sdpa")
    K = config["block_size"]
    model = core.DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=config["vocab_size"],
            block_size=K,
            aux_hidden_state_layer_ids=[i + 1 for i in config["dflash_config"]["target_layer_ids"]],
            mask_token_id=config["dflash_config"]["mask_token_id"],
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=K - 1)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path="none", architectures=["none"]),
            ),
        )
    ).float()
    model.load_state_dict(weights_of(data), strict=False)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(data["embedding"])
        model.lm_head.weight.copy_(data["head"])
        model.verifier_lm_head.weight.copy_(data["head"])
    ids, S = data["ids"], data["ids"].numel()
    if options.get("labels") == "ids":
        # its labels are the argmax of the verifier's logits at p + k - 1: make that the next token of the row
        model.verifier_norm = nn.Identity()
        model.verifier_lm_head = _OneHot(config["vocab_size"])
        last = ids.roll(-1).float()[:, None].expand(S, config["hidden_size"]).contiguous()
    else:
        last = torch.randn(S, config["hidden_size"])
    valid = torch.ones_like(data["anchors"], dtype=torch.bool)
    core.select_anchors = lambda *_: (data["anchors"], valid)

    def loss():
        _, value, _ = model(
            data["hidden"][None],
            ids[None],
            data["loss_mask"][None],
            last[None],
            torch.zeros(1, S, dtype=torch.long),
            loss_config={"ce": (ce_loss, 1.0)},
            gamma=options["gamma"],
            max_anchors=data["anchors"].numel(),
            per_position_loss_weight=options.get("weighting", "fixed-exp-decay"),
        )
        return value

    return model, loss


class _OneHot(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.vocab = vocab

    def forward(self, x):
        return nn.functional.one_hot(x[..., 0].long(), self.vocab).float() * 50


def specforge_step(data, options):
    import types

    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    config = options["config"]
    layer = qwen3(config)
    layer._attn_implementation = "sdpa"
    draft = DFlashDraftModel(layer).float()
    draft.load_state_dict(weights_of(data))
    V, D = data["head"].shape
    head, embed = nn.Linear(D, V, bias=False), nn.Embedding(V, D)
    for module, weight in ((head, data["head"]), (embed, data["embedding"])):
        module.weight = nn.Parameter(weight, requires_grad=False)
    model = OnlineDFlashModel(
        draft,
        head,
        embed,
        config["dflash_config"]["mask_token_id"],
        block_size=config["block_size"],
        attention_backend="sdpa",
        num_anchors=data["anchors"].numel(),
        loss_decay_gamma=options["gamma"],
        loss_type=options.get("loss_type", "dflash"),
    )
    anchors = data["anchors"][None]
    model._sample_anchor_positions = types.MethodType(lambda *_: (anchors, torch.ones_like(anchors).bool()), model)

    def loss():
        return model(data["ids"][None], data["hidden"][None], data["loss_mask"][None].float())[0]

    return draft, loss


def ours_step(data, options):
    from kernels.decay_ce import weighted_cross_entropy
    from kernels.weighting import decay
    from trainer.drafter.config import DrafterConfig
    from trainer.drafter.model import Drafter

    config = DrafterConfig.from_zlab_json(options["config"])
    drafter = Drafter(config)
    drafter.load_state_dict(weights_of(data))
    S, K = data["ids"].numel(), config.block_size
    anchors = data["anchors"]
    at = anchors[:, None] + torch.arange(K)
    labels = data["ids"][at.clamp_max(S - 1)]
    mask = (at < S) & data["loss_mask"][at.clamp_max(S - 1)].bool()
    mask[:, 0] = False
    hidden_SLD = data["hidden"].unflatten(1, (config.num_taps, -1))

    def loss():
        out = drafter(
            hidden_SLD,
            torch.arange(S),
            drafter.block_inputs(labels, data["embedding"]),
            torch.zeros_like(anchors),
            anchors,
            anchors,
        )
        terms = weighted_cross_entropy(out, data["head"], labels, mask, decay(options["gamma"]))
        return terms.numerator / terms.denominator

    return drafter, loss


STEPS = {"speculators": speculators_step, "specforge": specforge_step, "ours": ours_step}


def gradients(who, data, options):
    """The loss and its gradients by published parameter name."""
    model, loss = STEPS[who](data, options)
    value = loss()
    value.backward()
    out = {f"grad.{n}": p.grad.contiguous() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": value.detach().reshape(1), **out}


def timing(who, data, options):
    """Forward, backward and AdamW; best of `repeats` seconds, and bytes above the state before the first step."""
    model, loss = STEPS[who](data, options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of building the model is not the step's
    before = resident("VmRSS")
    seconds = []
    for _ in range(options["repeats"]):
        began = time.perf_counter()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": min(seconds), "peak_bytes": resident("VmHWM") - before}))


def resident(key):
    """Bytes of this process, as in kernels.bench (which the peers' environments do not have)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def main(who, command, source, out):
    data, options = read(source)
    if command == "timing":
        timing(who, data, options)
        return
    if command == "load":
        result = load_folder(who, options)
    else:
        result = dflash_drafts(data, options) if command == "drafts" else gradients(who, data, options)
    save_file(result, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
