"""Suites: every suite file is valid and pinned; folders, files and limits; broken input is named."""

import json
from pathlib import Path

import pytest

from eval.prompts import DEFAULT_SUITES, SUITES, Suite, heldout_suite, load_suite
from infra.config import read_toml, validate
from infra.errors import ConfigError, DataError

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the data folder ../shared/data")


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.toml")), ids=lambda p: p.stem)
def test_suite_files_are_pinned(path):
    suite = validate(Suite, read_toml(path), str(path))
    if suite.hub:
        assert len(suite.hub.revision) == 40
    else:
        assert len(suite.url.sha256) == 64 and any(len(part) == 40 for part in suite.url.url.split("/"))


@needs_shared
@pytest.mark.parametrize(
    ("name", "rows"),
    [("gsm8k", 1319), ("math500", 500), ("humaneval", 164), ("mbpp", 257), ("mt-bench", 80), ("spec_bench", 480)],
)
def test_loads_from_folder(name, rows):
    suite = load_suite(name, SHARED)
    assert len(suite.prompts) == suite.origin["rows"] == rows
    assert all(p.turns and all(t.strip() for t in p.turns) for p in suite.prompts)


@needs_shared
def test_formats_are_the_benchmarks():
    gsm8k = load_suite("gsm8k", SHARED).prompts[0].turns[0]
    assert gsm8k.endswith("?\nPlease reason step by step, and put your final answer within \\boxed{}.")
    code = load_suite("humaneval", SHARED).prompts[0].turns[0]
    assert code.startswith(
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\nfrom"
    )
    assert code.endswith('"""\n\n```')
    assert all(len(p.turns) == 2 for p in load_suite("mt_bench", SHARED).prompts)


@needs_shared
def test_limit_is_a_seeded_choice():
    first = load_suite("gsm8k", SHARED, limit=8)
    assert [p.id for p in first.prompts] == [p.id for p in load_suite("gsm8k", SHARED, limit=8).prompts]
    other = load_suite("gsm8k", SHARED, limit=8, seed=1)
    assert first.origin["prompts_sha256"] != other.origin["prompts_sha256"]
    assert len({p.id for p in first.prompts}) == 8


@needs_shared
def test_absent_suite_of_a_folder_is_named():
    with pytest.raises(DataError, match=r"aime24 is not in folder .* aime24\.jsonl"):
        load_suite("aime24", SHARED)


def test_unknown_suite_is_named():
    with pytest.raises(ConfigError, match=r"unknown suite 'gsm9k': did you mean 'gsm8k'"):
        load_suite("gsm9k")
    assert len(DEFAULT_SUITES) == 5


def test_any_jsonl(tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": "Hello", "category": "chat"},
        {"turns": ["One", "Two"], "id": "pair"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    ]
    file.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    suite = load_suite(str(file))
    assert suite.name == "mine"
    assert [p.turns for p in suite.prompts] == [("Hello",), ("One", "Two"), ("Hi",)]
    assert [p.id for p in suite.prompts] == ["mine/0", "pair", "mine/2"]
    assert suite.prompts[0].category == "chat" and suite.prompts[2].messages[0]["content"] == "Be brief."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2 of prompt file"),
        ("[1]\n", "row 1 .* is not a JSON object"),
        ("\n", "has no rows"),
        ('{"question": "a"}\n', "row 1: no field 'prompt'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "no user message"),
    ],
)
def test_broken_jsonl_is_named(tmp_path, text, message):
    file = tmp_path / "mine.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        load_suite(str(file))


def test_conditional_templates(tmp_path):
    (tmp_path / "alpaca.jsonl").write_text(
        '{"instruction": "Add.", "input": "1 2"}\n{"instruction": "Sing.", "input": ""}\n{"instruction": "x"}\n'
    )
    with pytest.raises(DataError, match="row 3"):
        load_suite("alpaca", tmp_path)
    text = (tmp_path / "alpaca.jsonl").read_text().rsplit("\n", 2)[0]
    (tmp_path / "alpaca.jsonl").write_text(text)
    assert [p.turns[0] for p in load_suite("alpaca", tmp_path).prompts] == ["Add.\n\nInput:\n1 2", "Sing."]


def test_heldout():
    rows = [{"document": d, "source": "a", "token_ids": [1, 2]} for d in ("b", "a", "c")]
    assert [p.id for p in heldout_suite(rows).prompts] == ["a", "b", "c"]
    assert heldout_suite(rows, limit=1).prompts[0].token_ids == (1, 2)
    with pytest.raises(DataError, match="heldout"):
        heldout_suite([])
