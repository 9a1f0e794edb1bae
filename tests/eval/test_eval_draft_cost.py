"""Drafting costs: a block drafter makes one pass whatever its length, an autoregressive one K - 1."""

import json

from eval.__main__ import run


def test_shape(in_tmp, capsys):
    assert run(["draft-cost", "--model", "tiny", "--repeats", "3", "--context", "20"]) == 0
    assert "autoregressive" in capsys.readouterr().out
    ms = json.loads((in_tmp / "runs" / "draft-cost" / "tiny.json").read_text())["ms"]
    assert ms["autoregressive, 1 layer"]["16"] > 4 * ms["1 layer"]["16"]
    assert ms["1 layer"]["16"] < 3 * ms["1 layer"]["4"]
    assert (in_tmp / "runs" / "draft-cost" / "tiny.png").is_file()
