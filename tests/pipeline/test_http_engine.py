"""Regeneration through the OpenAI protocol, against a server on loopback that runs the tiny target."""

import json

import pyarrow.parquet as pq
import pytest
from openai_server import serving

from infra.errors import ConfigError, ResourceError
from pipeline.config import resolve
from pipeline.documents import build_documents
from pipeline.front import TargetFront
from pipeline.generate import Generator, Request


def config(tmp_path, *urls, rows=12, **more):
    prompts = [{"messages": [{"role": "user", "content": f"Say {i}"}]} for i in range(rows - 2)]
    two = [("user", "One"), ("assistant", "to be replaced"), ("user", "Two"), ("assistant", "as well")]
    prompts += [{"messages": [{"role": r, "content": f"{c} {k}"} for r, c in two]} for k in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    (tmp_path / "c.toml").write_text(f'[sources.rows]\nkind = "files"\npaths = ["{tmp_path}/rows.jsonl"]\n')
    fields = {"engine": "openai", "model": "tiny", "max_new_tokens": 12, "concurrency": 4, "retries": 3, **more}
    overrides = [f"regenerate.{k}={json.dumps(v)}" for k, v in fields.items()]
    urls = json.dumps(list(urls))
    return resolve(
        "tiny", str(tmp_path / "c.toml"), [*overrides, f"regenerate.urls={urls}", f"data_root={tmp_path}/data"]
    )


def test_answers_equal_the_targets_own(tiny, tmp_path):
    with serving(tiny) as server:
        cfg = config(tmp_path, server.url, concurrency=3)
        documents, record = build_documents(cfg, TargetFront(cfg.target))
        assert server.most_inside <= 3 and len(server.bodies) == 14  # 12 first turns, 2 second ones
        assert record["counts"]["documents"] == 12 and record["answers"]["answers"] == 14
        before = len(server.bodies)
        build_documents(cfg, TargetFront(cfg.target))
        assert len(server.bodies) == before, "a second run asks nothing"
    generator = Generator(tiny, cfg.regenerate)
    for row in documents.to_pylist():
        n = row["prompt_length"]
        if sum(row["loss_mask"]) + n != len(row["token_ids"]):
            continue  # two turns
        (r,) = generator.generate([Request("", row["token_ids"][:n], 12)])
        assert row["token_ids"][n:] == r.token_ids


def test_second_turn_follows_the_targets_own_first(tiny, tmp_path):
    with serving(tiny) as server:
        cfg = config(tmp_path, server.url, rows=2)
        build_documents(cfg, TargetFront(cfg.target))
        second = [b["messages"] for b in server.bodies if len(b["messages"]) == 3]
    assert len(second) == 2
    for messages in second:
        assert messages[0]["content"].startswith("One") and messages[2]["content"].startswith("Two")
        assert messages[1]["role"] == "assistant" and "replaced" not in messages[1]["content"]


def test_retries_until_the_server_has_recovered(tiny, tmp_path):
    with serving(tiny) as server, serving(tiny) as other:
        server.faults = [500, 429, "hang up", 503]
        cfg = config(tmp_path, server.url, other.url)
        documents, _ = build_documents(cfg, TargetFront(cfg.target))
        assert len(documents) == 12 and not server.faults
        assert len(server.bodies) + len(other.bodies) == 14 + 4 and other.bodies


def test_refused_requests_are_rejects_and_asked_again_next_time(tiny, tmp_path):
    with serving(tiny) as server:
        server.faults = [400]
        cfg = config(tmp_path, server.url)
        documents, record = build_documents(cfg, TargetFront(cfg.target))
        assert len(documents) == 11 and record["counts"]["reject_reasons"] == {"regenerate": 1}
        (reject,) = pq.read_table(cfg.work_folder / "rejects.parquet").to_pylist()
        assert "HTTP 400" in reject["reason"] and reject["line"] > 0 and reject["file"].endswith("rows.jsonl")
        asked = len(server.bodies)
        documents, _ = build_documents(cfg, TargetFront(cfg.target))
        assert len(documents) == 12 and asked + 1 <= len(server.bodies) <= asked + 2


def test_a_larger_corpus_asks_only_for_its_new_prompts(tiny, tmp_path):
    with serving(tiny) as server:
        cfg = config(tmp_path, server.url, rows=4)
        build_documents(cfg, TargetFront(cfg.target))
        asked = len(server.bodies)
        cfg = config(tmp_path, server.url, rows=7)
        documents, _ = build_documents(cfg, TargetFront(cfg.target))
        assert len(documents) == 7
        new = sorted(b["messages"][0]["content"] for b in server.bodies[asked:])
    assert new == ["Say 2", "Say 3", "Say 4"]


def test_servers_without_token_ids_and_with_a_key(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(tiny, return_ids=False) as server:
        cfg = config(tmp_path, server.url, rows=4)
        documents, record = build_documents(cfg, TargetFront(cfg.target))
        assert {h["Authorization"] for h in server.headers} == {"Bearer secret"}
    assert len(documents) + record["counts"]["rejects"] == 4
    for row in documents.to_pylist():
        assert 2 <= sum(row["loss_mask"]) < len(row["token_ids"])


def test_what_the_user_can_mend_is_said(tiny, tmp_path):
    with serving(tiny) as server:
        cfg = config(tmp_path, server.url, model="other")
        with pytest.raises(ConfigError, match=r"HTTP 404 .*regenerate\.model = 'other'"):
            build_documents(cfg, TargetFront(cfg.target))
        gone = server.url
    cfg = config(tmp_path, gone, retries=0)
    with pytest.raises(ResourceError, match=r"requests in a row failed .*answered prompts are kept"):
        build_documents(cfg, TargetFront(cfg.target))
    with pytest.raises(ConfigError, match="http:// or https://"):
        build_documents(config(tmp_path, "localhost:8000"), TargetFront(cfg.target))


def test_sampling_fields_are_sent(tiny, tmp_path):
    with serving(tiny) as server:
        cfg = config(tmp_path, server.url, rows=3, temperature=0.7, top_p=0.8, top_k=20)
        build_documents(cfg, TargetFront(cfg.target))
        seeds = {b["seed"] for b in server.bodies}
        assert len(seeds) == len({json.dumps(b["messages"]) for b in server.bodies})
        assert {(b["temperature"], b["top_p"], b["top_k"], b["max_tokens"]) for b in server.bodies} == {
            (0.7, 0.8, 20, 12)
        }
