"""The benchmark of replay runs, and its rows have the fields that the table prints."""

import json

import pytest

from eval.bench import run


def test_rows(in_tmp):
    run(["--model", "tiny", "--tokens", "12", "--prompts", "2", "--repeats", "1"])
    rows = json.loads((in_tmp / "runs" / "bench" / "replay.json").read_text())
    assert len(rows) == 6
    for row in rows:
        assert {"what", "unit", "ours", "opponent", "opponent_name", "ratio"} <= row.keys()
        assert row["ratio"] == pytest.approx(row["ours"] / row["opponent"]) and row["same_cycles"]
