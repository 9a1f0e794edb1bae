"""The loop as a whole changes neither a token nor a distribution: χ² over whole answers, and a real language model.

The rules by themselves are tested on 120,000 draws in test_eval_verify.py; here what feeds them is.
"""

import dataclasses

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from eval.decode import DecodeSettings, decode, plain_decode
from features.target import Target

V, ANSWERS = 6, 12_000


@pytest.fixture(scope="module")
def dice(tiny):
    """A target of six tokens whose distributions are far from uniform, without a stop token."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(shape)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    torch.nn.init.normal_(model.lm_head.weight, std=0.35)
    config = tiny.config.model_copy(update={"mask_token_id": V - 1, "tap_layer_ids": (0,)})
    target = Target(config, model, tiny.tokenizer)
    target.stop_ids = frozenset()
    return target


class Table:
    """Factorised drafts that depend on the anchor alone: a legal proposal, and a poor one."""

    block_size = 3

    def __init__(self, seed):
        self.logits = 1.5 * torch.randn(V, self.block_size - 1, V, generator=torch.Generator().manual_seed(seed))

    def open(self, slots, capacity): ...

    def extend(self, slot, start, hidden_SLD, token_ids_S): ...

    def propose(self, slots, anchors_B, starts):
        return self.logits[anchors_B]


def law(target, prompt, n):
    """Probability of every answer of n tokens, by enumeration: [V, ..., V]."""
    texts = torch.cartesian_prod(*[torch.arange(V)] * n).reshape(-1, n)
    ids = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], dim=1)
    logprobs = target.forward(ids, taps=False).logits_BSV.double().log_softmax(-1)
    here = logprobs[:, len(prompt) - 1 : -1].gather(2, texts[..., None])[..., 0]
    return here.sum(1).exp()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verification", "seed"), [("plain", 0), *((v, seed) for v in ("exact", "rejection") for seed in (0, 1, 2))]
)
def test_answers_have_the_targets_law(dice, verification, seed):
    """Four tokens: prefill's, then cycles that reject early, late or never; all 1296 answers are counted."""
    n, prompt = 4, [1, 4, 2]
    settings = DecodeSettings(
        max_new_tokens=n, temperature=1.0, seed=seed, batch_size=4_000,
        verification="exact" if verification == "plain" else verification,
    )  # fmt: skip
    proposer = None if verification == "plain" else Table(seed)
    traces = decode(dice, proposer, [prompt] * ANSWERS, settings)
    answers = torch.tensor([t.answer_ids for t in traces])
    counts = torch.bincount((answers * V ** torch.arange(n - 1, -1, -1)).sum(1), minlength=V**n).double()
    expected = law(dice, prompt, n) * ANSWERS
    assert expected.max() > 3 * expected.mean(), "a near-uniform law tests little"
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    degrees = torch.tensor(float(keep.sum() - 1), dtype=torch.float64)
    assert torch.special.gammaincc(degrees / 2, statistic / 2) > 1e-3
    if proposer:
        emitted = torch.tensor([c.emitted for t in traces for c in t.cycles])
        assert set(emitted.tolist()) == {1, 2, 3}


def stories(shared):
    """A real language model of 260 K parameters, from the data folder."""
    from features.target import load_target
    from features.target_config import FolderSource, TargetConfig

    folder = shared / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip("needs the model folder ../shared/models/stories260K")
    config = TargetConfig(
        name="stories260k", source=FolderSource(path=str(folder)), dtype="float32", tap_layer_ids=(0, 1, 2, 3),
        mask_token_id=0, block_size=16, max_length=512, chat_template="{{ messages[0]['content'] }}",
    )  # fmt: skip
    return load_target(config)


def test_real_stories_do_not_change(root):
    """Greedy and sampled, one by one and in a batch, with drafts that are right half of the time."""
    target = stories(root.parent / "shared")
    starts = ("Once upon a time", "Lily wanted", "The dog ran", "One day, Tom")
    prompts = [target.tokenizer(text)["input_ids"] for text in starts]
    for temperature in (0.0, 0.8):
        settings = DecodeSettings(max_new_tokens=60, temperature=temperature)
        plain = plain_decode(target, prompts, settings)
        assert len({tuple(t.answer_ids) for t in plain}) == 4
        proposer = HalfRight([t.text_ids for t in plain], target.vocab_size)
        drafted = decode(target, proposer, prompts, dataclasses.replace(settings, batch_size=4))
        assert [t.answer_ids for t in drafted] == [t.answer_ids for t in plain]
        assert 1.5 < sum(c.emitted for t in drafted for c in t.cycles) / sum(len(t.cycles) for t in drafted) < 6


class HalfRight:
    block_size = 16

    def __init__(self, texts, vocab_size):
        self.texts, self.vocab_size = texts, vocab_size

    def open(self, slots, capacity):
        self.text_of = {}

    def extend(self, slot, start, hidden_SLD, token_ids_S):
        if start == 0:
            self.text_of[slot] = next(t for t in self.texts if t[: len(token_ids_S)] == token_ids_S.tolist())

    def propose(self, slots, anchors_B, starts):
        rows = []
        for slot, start in zip(slots, starts, strict=True):
            text = self.text_of[slot] + [0] * self.block_size
            right = text[start + 1 : start + self.block_size]
            rows.append([t if (7 * (start + k)) % 16 > 3 else 1 for k, t in enumerate(right)])
        return torch.nn.functional.one_hot(torch.tensor(rows), self.vocab_size).float()
