"""A tiny real target, and proposers that no trained drafter resembles."""

import pytest
import torch

from features.target import load_target
from features.target_config import load_target_config


@pytest.fixture(scope="session")
def tiny():
    return load_target(load_target_config("tiny"))


class Scripted:
    """Proposes what `rule(text position)` says, with all its probability: an adversary without weights."""

    def __init__(self, rule, vocab_size: int, block_size: int = 8):
        self.rule, self.vocab_size, self.block_size = rule, vocab_size, block_size

    def open(self, slots, capacity):
        self.fed = [0] * slots

    def extend(self, slot, start, hidden_SLD, token_ids_S):
        assert start == 0 or start == self.fed[slot], "features must arrive without gap or overlap"
        assert len(hidden_SLD) == len(token_ids_S)
        self.fed[slot] = start + len(hidden_SLD)

    def propose(self, slots, anchors_B, starts):
        assert [self.fed[s] for s in slots] == starts, "a block sees exactly the positions before its anchor"
        places = zip(slots, starts, strict=True)
        tokens = [[self.rule(slot, start + k) for k in range(1, self.block_size)] for slot, start in places]
        return 50.0 * torch.nn.functional.one_hot(torch.tensor(tokens), self.vocab_size).float()


@pytest.fixture
def scripted(tiny):
    return lambda rule, block_size=8: Scripted(rule, tiny.vocab_size, block_size)
