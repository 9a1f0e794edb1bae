"""The benchmark runs and writes what `make bench` prints; its figures at this size mean nothing."""

import json

import pytest

from kernels import bench

pytestmark = [pytest.mark.spawn]


def test_tiny_benchmark(tmp_path):
    out = tmp_path / "kernels.json"
    assert bench.main(["--tiny", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [r["unit"] for r in rows] == ["s", "B"]
    assert all(r.keys() == {"what", "unit", "ours", "opponent", "opponent_name", "ratio"} for r in rows)
