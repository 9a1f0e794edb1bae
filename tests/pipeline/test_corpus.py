"""Readers, row shapes, mixtures and rejects."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.config import validate
from infra.errors import ConfigError, DataError
from pipeline.config import FeaturesConfig, FieldsConfig, resolve
from pipeline.conversation import BadRow, Conversation, parse_row
from pipeline.corpus import inputs_digest, read_corpus
from pipeline.documents import build_documents
from pipeline.front import TargetFront


def config(sources, **more):
    target = resolve("tiny", "demo").target.model_dump()
    return validate(FeaturesConfig, {"name": "x", "target": target, "sources": sources} | more, "test")


def files(*paths, **more):
    return {"kind": "files", "paths": [str(p) for p in paths], **more}


def roles(row, **fields):
    return [(m["role"], m["content"]) for m in parse_row(row, FieldsConfig(**fields))[0]]


def test_row_shapes():
    assert roles({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) == [
        ("user", "a"),
        ("assistant", "b"),
    ]
    sharegpt = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert roles({"conversations": sharegpt}) == [("system", "s"), ("user", "a"), ("assistant", "b")]
    assert roles({"instruction": "a", "input": "x", "response": "b"}) == [("user", "a\n\nx"), ("assistant", "b")]
    assert roles({"prompt": "a"}) == [("user", "a")]
    assert roles({"q": "a", "a": "b"}, prompt="q", response="a") == [("user", "a"), ("assistant", "b")]
    assert roles({"prompt": "a", "system": "s"}) == [("system", "s"), ("user", "a")]
    assert roles({"messages": json.dumps([{"role": "user", "content": "a"}])}) == [("user", "a")]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert roles({"messages": [{"role": "user", "content": parts}]}) == [("user", "ab")]


def test_tool_calls_and_reasoning_are_kept():
    call = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": json.dumps(call)},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
            {"role": "assistant", "content": "b", "reasoning_content": "because"},
        ],
        "tools": [{"name": "f"}],
    }
    messages, tools = parse_row(row, FieldsConfig())
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": call}
    assert messages[2]["tool_call_id"] == "1" and messages[3]["reasoning_content"] == "because"
    assert tools == [{"name": "f"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "must be an object"),
        ({"foo": 1}, "no field one of messages"),
        ({"messages": []}, "empty"),
        ({"messages": {"a": 1}}, "not a list"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
        ({"messages": [{"role": "wizard", "content": "s"}]}, "unknown role 'wizard'"),
        ({"messages": [{"role": "user", "content": None}]}, "no content"),
        ({"messages": [{"role": "user", "content": "  "}]}, "is empty"),
        ({"messages": [{"role": "user", "content": 7}]}, "not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"messages": ["hi"]}, "not an object"),
        ({"messages": "[{"}, "not JSON"),
        ({"prompt": "half \ud83d pair"}, "surrogate"),
    ],
)
def test_bad_rows_have_a_reason(row, reason):
    with pytest.raises(BadRow, match=reason):
        parse_row(row, FieldsConfig())


def test_jsonl_rejects_name_file_line_and_reason(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"prompt": "emoji \xf0\x9f\x98\x80 and control \\u0007, line separator \xe2\x80\xa8 inside"}',
        b"{broken",
        b"",
        b'{"prompt": "bad bytes \xff"}',
        b'{"prompt": "second"}',
        b'{"prompt": "second"}',
        b"[" * 100_000,
    ]
    path.write_bytes(b"\n".join(lines))
    items = list(read_corpus(config({"a": files(path)})))
    good = [i for i in items if isinstance(i, Conversation)]
    bad = {i.line: i.reason for i in items if not isinstance(i, Conversation)}
    assert [g.line for g in good] == [1, 5]
    assert good[0].messages[0]["content"] == "emoji 😀 and control \x07, line separator \u2028 inside"
    assert set(bad) == {2, 4, 6, 7}
    assert "not valid JSON" in bad[2] and "UTF-8" in bad[4] and "same turns as" in bad[6] and "line 5" in bad[6]
    assert all(i.file == str(path) for i in items)


def test_parquet_json_and_saved_data_sets(tmp_path):
    import datasets

    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps([{"prompt": "x"}, {"prompt": "y"}]))
    datasets.Dataset.from_list([{"prompt": f"d{i}"} for i in range(3)]).save_to_disk(str(tmp_path / "set"))
    sources = {
        "p": files(tmp_path / "*.parquet"),
        "j": files(tmp_path / "b.json"),
        "h": {"kind": "hub", "repo": str(tmp_path / "set"), "split": "heldout"},
    }
    items = list(read_corpus(config(sources)))
    assert {s: sum(i.source == s for i in items) for s in sources} == {"p": 5, "j": 2, "h": 3}
    assert {i.split for i in items if i.source == "h"} == {"heldout"}
    assert [i.line for i in items if i.source == "p"] == [1, 2, 3, 4, 5]


def test_mixture_keeps_its_weights_until_a_source_runs_out(tmp_path):
    for name, n in (("a", 100), ("b", 10)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name}{i}"}) + "\n" for i in range(n)))
    sources = {"a": files(tmp_path / "a.jsonl", weight=3.0), "b": files(tmp_path / "b.jsonl")}
    taken = [i.source for i in read_corpus(config(sources, limit=20))]
    assert taken.count("a") == 15 and taken.count("b") == 5
    everything = [i.source for i in read_corpus(config(sources))]
    assert everything.count("a") == 100 and everything.count("b") == 10
    sources["a"]["limit"] = 4
    assert [i.source for i in read_corpus(config(sources))].count("a") == 4


def test_one_prompt_is_in_one_split(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"p{i}", "response": f"r{i}{k}"} for i in range(200) for k in range(2)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    items = list(read_corpus(config({"a": files(path)}, heldout_share=0.2)))
    splits = {}
    for i in items:
        splits.setdefault(i.messages[0]["content"], set()).add(i.split)
    assert all(len(s) == 1 for s in splits.values())
    assert 0.1 < sum(s == {"heldout"} for s in splits.values()) / 200 < 0.3


def test_unusable_sources_end_with_a_sentence(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"foo": 1}\n')
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    (tmp_path / "c.json").write_text("{}")
    (tmp_path / "d.csv").write_text("a,b")
    for path, reason in [
        ("a.jsonl", "no usable row"),
        ("b.parquet", "Parquet"),
        ("c.json", "list of objects"),
        ("d.csv", "ending"),
        ("e.jsonl", "does not exist"),
    ]:
        with pytest.raises(DataError, match=reason):
            list(read_corpus(config({"s": files(tmp_path / path)})))
    with pytest.raises(DataError, match="nowhere"):
        list(read_corpus(config({"s": {"kind": "hub", "repo": "nobody/nowhere"}})))


def test_changed_files_change_the_inputs_digest(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n')
    cfg = config({"a": files(path)})
    before = inputs_digest(cfg)
    assert inputs_digest(cfg) == before
    path.write_text('{"prompt": "ab"}\n')
    assert inputs_digest(cfg) != before


def test_overrides_and_unknown_names(monkeypatch):
    cfg = resolve("tiny", "demo", ["sources.demo.count=7", "target.max_length=128", "ray.actors=3"])
    assert cfg.sources["demo"].count == 7 and cfg.target.max_length == 128 and cfg.ray.actors == 3
    assert cfg.corpus_digest() != resolve("tiny", "demo").corpus_digest()
    same = resolve("tiny", "demo", ["sources.demo.count=7", "target.max_length=128"])
    assert cfg.corpus_digest() == same.corpus_digest()
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        resolve("tiny", "demmo")
    with pytest.raises(ConfigError, match=r"regenerate\.max_tokens"):
        resolve("tiny", "demo", ["regenerate.max_tokens=3"])
    with pytest.raises(ConfigError, match=r"regenerate\.urls"):
        resolve("tiny", "demo", ["regenerate.engine=openai"])
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert resolve("tiny", "demo").ray.address == "head:6379"


def test_three_real_corpora_as_one_mixture(tmp_path, tiny):
    """A JSON list with instruction and input, and two JSON-lines files with columns of their own, answers kept."""
    data = Path("../shared/data")
    if not data.is_dir():
        pytest.skip("../shared/data is not here")
    sources = {
        "gsm8k": files(data / "gsm8k/train.jsonl", weight=2, fields={"prompt": "question", "response": "answer"}),
        "mbpp": files(data / "mbpp/mbpp.jsonl", limit=20, fields={"prompt": "text", "response": "code"}),
        "gpteacher": files(data / "gpteacher/codegen-instruct.json", limit=20),
    }
    target = resolve("tiny", "demo", ["target.max_length=4096"]).target.model_dump()  # a byte is a token here
    cfg = config(sources, limit=80, regenerate={"engine": "none"}, data_root=str(tmp_path), target=target)
    documents, record = build_documents(cfg, TargetFront(cfg.target))
    assert record["counts"]["sources"] == {"gpteacher": 20, "gsm8k": 40, "mbpp": 20} and not record["counts"]["rejects"]
    first = {r["source"]: r for r in documents.to_pylist()[::-1]}["gpteacher"]
    assert "How" in tiny.tokenizer.decode(first["token_ids"]) or "Write" in tiny.tokenizer.decode(first["token_ids"])
    for row in documents.to_pylist():
        assert not any(row["loss_mask"][: row["prompt_length"]]) and sum(row["loss_mask"]) >= 2
