"""The study's statistics and words, on numbers whose answer is known."""

import numpy as np
import pytest

from trainer.study.config import StudyConfig
from trainer.study.report import difference, figures, lines, metrics, page, summarise, text


def runs(tau, texts=60, seeds=3, spread=0.0, seed=0):
    """Tokens and cycles of texts of 120 tokens at about `tau` tokens per cycle, one array per seed."""
    rng = np.random.default_rng(seed)
    hard = rng.uniform(0.8, 1.2, texts)  # the same for every row: what pairing takes out
    out = {}
    for s in range(seeds):
        cycles = np.maximum(np.round(120 / (tau * hard) * (1 + spread * rng.standard_normal(texts))), 1)
        out[str(s)] = np.stack([np.full(texts, 120), cycles.astype(int)], 1).tolist()
    return out


def row(greedy, sampled, step_ms=100.0):
    seeds = greedy.keys()
    rest = {"step_ms": step_ms, "refresh_ms": 10.0, "selection": [[10, 2.0], [20, 2.1]]}
    return {s: {"greedy": greedy[s], "sampled": sampled[s], **rest} for s in seeds}


class Store:
    """What `summarise` asks of a store: its table."""

    def __init__(self):
        import pyarrow as pa

        columns = {"split": ["train", "train", "heldout"], "length": [10, 20, 30], "prompt_length": [4, 4, 4]}
        self.documents = pa.table(columns)


def study(best, **changes):
    rows = {"start": {"0": row(runs(2.0, seeds=1), runs(2.0, seeds=1))["0"]}}
    rows["sft-decay"] = row(runs(2.5), runs(2.0))
    rows["rl-visited"] = row(runs(best, spread=0.02, seed=1), runs(2.0), step_ms=120.0)
    for entry in rows["rl-visited"].values():  # paired: the same texts
        assert len(entry["greedy"]) == 60
    cfg = StudyConfig(rows=("sft-decay", "rl-visited"), **changes)
    return summarise(rows, cfg, "toy", {"greedy": Store(), "sampled": Store()}, {})


def test_interval_covers_the_difference_and_pairing_narrows_it():
    a, b = (np.array(list(runs(t, spread=0.01, seed=4).values())) for t in (2.6, 2.5))
    paired = difference(a, b)
    shuffled = difference(a, b[:, np.random.default_rng(0).permutation(60)])
    assert paired["ci95"][0] < 0.1 < paired["ci95"][1] and paired["ci95"][0] > 0
    assert paired["probability_better"] == 1.0
    assert np.diff(shuffled["ci95"]) > 2 * np.diff(paired["ci95"])
    same = difference(b, b)
    assert same["difference"] == 0 and same["ci95"] == [0, 0] and same["probability_better"] == 0.5


def test_winner_and_loser_are_both_said():
    better, worse = study(2.7), study(2.3)
    assert "Best at T = 0: rl-visited" in better["verdict"] and "excludes zero" in better["verdict"]
    assert "at T = 1 its τ changes by +0.0%" in better["verdict"]
    assert worse["verdict"].startswith("No second stage beats sft-decay")
    assert worse["rows"]["rl-visited"]["greedy"]["difference"] < 0  # and stays in the table
    assert any(cells[0] == "rl-visited" for cells in lines(worse))
    assert better["supervised_tokens"] == 22
    assert better["rows"]["rl-visited"]["step_cost"] == pytest.approx(130 / 110)


def test_every_view_has_every_row():
    result = study(2.7)
    drawn = figures(result)
    for shown in (text(result), page(result, drawn)):
        assert "none (SFT only)" in shown and "rl-visited" in shown and result["verdict"] in shown
    assert metrics(result)["rl-visited/greedy/difference"] == result["rows"]["rl-visited"]["greedy"]["difference"]
    assert page(result, drawn).count("data:image/png;base64,") == 2
