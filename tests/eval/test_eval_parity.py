"""Our loop against the authors' own (`dflash` on PyPI) on the same weights and prompts: same text, same cycles.

`make parity` installs the package beside us; without it the test skips. `make serve-check` does the same on SmolLM2.
"""

import pytest

from eval.decode import DecodeSettings, decode
from eval.peer import agreement, authors_generate
from eval.proposer import DrafterProposer
from trainer.drafter import peers

PROMPTS = [list(f"{i}. Once upon {i * 37} times".encode()) for i in range(12)]


@pytest.mark.spawn
def test_the_authors_loop_makes_the_same_cycles(tiny, drafter, tiny_run):
    if not peers.installed("dflash"):
        pytest.skip("dflash from PyPI is not installed beside us; `make parity` does it")
    length = 50
    theirs = authors_generate(tiny.folder, tiny_run / "runs" / "demo" / "drafter", PROMPTS, length, tiny.stop_ids)
    ours = decode(tiny, DrafterProposer(drafter, tiny.frozen_head()), PROMPTS, DecodeSettings(max_new_tokens=length))
    found = agreement(ours, theirs, length, drafter.config.block_size)
    assert found.whole and found.cycles > 100, found
    assert len({c.emitted for t in ours for c in t.cycles}) >= 5
