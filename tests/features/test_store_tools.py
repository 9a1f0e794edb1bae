"""Rejects, estimates, verify and repair, conversion, and the command line over them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from store_kit import Corpus, features_of, make_documents, make_spec

from features.__main__ import parser
from features.convert import convert
from features.estimate import check_room, estimate, estimate_tokens, show_bytes
from features.plan import make_plan
from features.reader import FeatureStore
from features.verify import repair, verify_store
from features.writer import StoreWriter, create_store
from infra.cli import main
from infra.errors import ConfigError, DataError, ResourceError, StoreError


@pytest.fixture
def features(capsys):
    """`python -m features ...` in this process: exit code, stdout, stderr."""

    def call(*args):
        parsed = parser().parse_args([str(a) for a in args])
        with pytest.raises(SystemExit) as done:
            main(lambda: parsed.run(parsed))
        return done.value.code, *capsys.readouterr()

    return call


def spoil(d, how):
    if how == "nan":
        d.hidden_SLD[-1, 0, 0] = float("nan")
    elif how == "short":
        d.hidden_SLD = d.hidden_SLD[:-1]
    elif how == "tokens":
        d.token_ids_S[0] += 1
    elif how == "missing":
        d.target_logprob_S = None
    elif how == "logprob":
        d.target_logprob_S[1] = float("-inf")
    elif how == "error":
        d.error = "out of memory"
    return d


SPOILT = {
    "nan": ("not_finite", "NaN or infinite"),
    "short": ("shape", "planned is"),
    "tokens": ("tokens_differ", "not those of the planned"),
    "missing": ("shape", "target_logprob is missing"),
    "logprob": ("not_finite", "log-probability"),
    "error": ("not_computed", "out of memory"),
}


def test_bad_documents_go_to_the_rejects_and_never_into_the_store(tmp_path):
    corpus = Corpus(n=40)
    writer = create_store(str(tmp_path), corpus.spec, corpus.plan, max_reject_share=0.2)
    victims = dict(zip(corpus.plan["document"].to_pylist()[::7], SPOILT, strict=False))
    assert len(victims) == len(SPOILT)
    for shard in writer.missing_shards():
        receipt = writer.write_shard(
            shard, (spoil(d, victims.get(d.document)) for d in corpus.of_shard(writer, shard)[::-1])
        )
        assert len(json.dumps(receipt)) < 300
    summary = writer.finish()
    assert summary["documents"] == 34 and summary["rejected"] == 6 and summary["complete"]
    rejects = pq.read_table(Path(writer.uri) / "rejects.parquet").to_pylist()
    for r in rejects:
        reason, detail = SPOILT[victims[r["document"]]]
        assert r["reason"] == reason and detail in r["detail"]
    store = FeatureStore.open(writer.uri)
    assert store.rejects.to_pylist() == rejects and len(store) == 34
    corpus.check(store)
    with pytest.raises(StoreError, match="rejected"):
        store.read(next(iter(victims)))
    whole = Corpus(n=40).build(tmp_path / "good")
    for row in FeatureStore.open(whole.uri).documents.to_pylist():  # a reject leaves zeros and disturbs no neighbour
        if row["document"] not in victims:
            assert torch.equal(
                store.read(row["document"]).hidden_SLD, FeatureStore.open(whole.uri).read(row["document"]).hidden_SLD
            )


def test_loss_masks_of_nothing_and_of_everything(tmp_path):
    documents = make_documents(6).to_pylist()
    from features.plan import DOCUMENT_SCHEMA, corpus_digest, document_id, pa

    for row, value in ((documents[0], 0), (documents[1], 1), (documents[2], 1)):
        row["loss_mask"] = [value] * len(row["token_ids"])
        row["document"] = document_id(row["token_ids"], row["loss_mask"])
    documents[2]["prompt_length"] = 0  # no prompt: everything may be supervised
    table = pa.Table.from_pylist(documents, schema=DOCUMENT_SCHEMA)
    spec = make_spec(table, corpus_digest=corpus_digest(table))
    writer = create_store(str(tmp_path), spec, make_plan(table, 128), max_reject_share=1)
    rows = {r["document"]: r for r in documents}
    for shard in writer.missing_shards():
        writer.write_shard(
            shard, [features_of(rows[d], spec) for d in writer.shard_plan(shard)["document"].to_pylist()]
        )
    assert writer.finish()["reasons"] == {"nothing_supervised": 1, "all_supervised": 1}


def test_too_many_rejects_stop_the_run(tmp_path):
    corpus = Corpus(n=40)
    writer = create_store(str(tmp_path), corpus.spec, corpus.plan)
    with pytest.raises(DataError, match=r"of \d+ documents were rejected, more than max_reject_share = 0.05"):
        for shard in writer.missing_shards():
            writer.write_shard(shard, [spoil(d, "nan") for d in corpus.of_shard(writer, shard)])
    assert len(writer.missing_shards()) == writer.num_shards


def test_wrong_documents_are_a_callers_error(tmp_path):
    corpus = Corpus(n=12)
    writer = create_store(str(tmp_path), corpus.spec, corpus.plan)
    with pytest.raises(StoreError, match="got 0 of its"):
        writer.write_shard(0, [])
    with pytest.raises(StoreError, match="not planned for shard 0 or came twice"):
        writer.write_shard(0, corpus.of_shard(writer, 0) * 2)
    with pytest.raises(StoreError, match="shard 99 is not in the plan"):
        writer.write_shard(99, [])


def test_estimates_are_the_real_sizes(tmp_path):
    for storage in ("bf16", "fp8_e4m3"):
        corpus = Corpus(n=30, storage_dtype=storage, top_k=2)
        writer = corpus.build(tmp_path)
        found = estimate(corpus.spec, corpus.plan, tokens_per_second=1000)
        assert found.bytes[storage] == FeatureStore.open(writer.uri).bytes
        objects = sum(p.stat().st_size for p in Path(writer.uri).rglob("c/**/*") if p.is_file())
        assert found.bytes[storage] == objects
        assert found.tokens == sum(corpus.plan["length"].to_pylist()) and found.shards == writer.num_shards
        assert found.hours == pytest.approx(found.tokens / 3.6e6)
    wide = make_spec(corpus.documents, hidden_size=4096, tap_layer_ids=(1, 9, 17, 25, 33), shard_tokens=32_768)
    big = estimate_tokens(wide, 1_200_000_000, 1_000_000)
    assert show_bytes(big.bytes["bf16"]) == "49.2 TB" and show_bytes(big.bytes["fp8_e4m3"]) == "24.6 TB"


def test_overruns_stop_before_the_first_prefill(tmp_path, monkeypatch):
    corpus = Corpus(n=30, hidden_size=256)
    need = estimate(corpus.spec, corpus.plan)
    uri = str(tmp_path / "not" / "there" / "yet")
    check_room(uri, corpus.spec, corpus.plan, max_bytes=need.bytes["bf16"])
    small = show_bytes(need.bytes["fp8_e4m3"])
    with pytest.raises(ResourceError, match=f"more than max_bytes = .* storage_dtype = 'fp8_e4m3' needs {small}"):
        check_room(uri, corpus.spec, corpus.plan, max_bytes=need.bytes["bf16"] - 1)
    monkeypatch.setattr("features.estimate.free_bytes", lambda uri: 100_000)
    with pytest.raises(ResourceError, match=r"its disk has 100.0 kB free; .*fp8_e4m3"):
        check_room(uri, corpus.spec, corpus.plan)
    check_room(uri, corpus.spec, corpus.plan, missing=[])
    check_room("s3://bucket/x", corpus.spec, corpus.plan)


def objects_of(uri, name):
    return sorted((Path(uri) / name / "c").rglob("*"), key=str)


def test_one_flipped_bit_one_cut_object_one_deleted_shard(tmp_path):
    corpus = Corpus(n=40)
    writer = corpus.build(tmp_path)
    uri = writer.uri
    assert verify_store(uri) == []
    hidden = Path(uri) / "hidden" / "c"
    flipped, cut, gone = (hidden / str(s) / "0" / "0" for s in (1, 3, 5))
    data = bytearray(flipped.read_bytes())
    data[1234] ^= 4
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    # each is noticed by a reader ...
    store = FeatureStore.open(uri)
    plan = store.documents.to_pylist()
    for shard, problem in ((1, "chunk 0 does not match"), (3, "its commit says"), (5, "the object is gone")):
        with pytest.raises(StoreError, match=f"hidden/c/{shard}/0/0 is damaged: .*{problem}.*--repair"):
            for row in plan:
                if row["shard"] == shard:
                    store.read(row["document"])
    # ... and named by verify, and repaired by recomputing only its shard
    bad = verify_store(uri)
    assert [(b.shard, b.path) for b in bad] == [(s, f"hidden/c/{s}/0/0") for s in (1, 3, 5)]
    assert repair(uri, bad) == [1, 3, 5]
    again = create_store(str(tmp_path), corpus.spec, corpus.plan)
    assert again.missing_shards() == [1, 3, 5]
    before = {p: p.stat().st_mtime_ns for p in objects_of(uri, "hidden") if p.is_file()}
    corpus.build(tmp_path)
    assert verify_store(uri) == [] and all(p.stat().st_mtime_ns == t for p, t in before.items())
    corpus.check(FeatureStore.open(uri, verify="always"))


def test_damage_to_the_stores_own_files(tmp_path):
    corpus = Corpus(n=20)
    writer = corpus.build(tmp_path)
    root = Path(writer.uri)
    (root / "hidden" / "zarr.json").write_text("{}")
    (root / "manifest.json").write_text("{")
    (root / "commits" / "00000001.json").write_text("{")
    with pytest.raises(StoreError, match=r"manifest.json of .* not readable"):
        FeatureStore.open(writer.uri)
    bad = verify_store(writer.uri)
    assert [(b.shard, b.path) for b in bad] == [
        (None, "hidden/zarr.json"),
        (None, "manifest.json"),
        (1, "commits/00000001.json"),
    ]
    assert repair(writer.uri, bad) == [1]
    corpus.build(tmp_path)
    assert verify_store(writer.uri) == []
    # an object of another attempt is intact in itself and yet not the one that was committed
    objects = root / "target_logprob" / "c"
    (objects / "0").write_bytes((objects / "1").read_bytes())
    problem = verify_store(writer.uri)[0].problem
    assert "its commit names" in problem or "its commit says" in problem
    plan = bytearray((root / "plan.parquet").read_bytes())
    plan[100] ^= 1
    (root / "plan.parquet").write_bytes(plan)
    with pytest.raises(StoreError, match=r"plan.parquet of .* restore it"):
        FeatureStore.open(writer.uri)


def test_first_touch_looks_once_and_always_looks_again(tmp_path):
    corpus = Corpus(n=6)
    uri = corpus.build(tmp_path).uri
    stores = {policy: FeatureStore.open(uri, verify=policy) for policy in ("first_touch", "always", "never")}
    for store in stores.values():
        corpus.check(store)
    with open(Path(uri) / "hidden" / "c" / "0" / "0" / "0", "r+b") as f:  # in place: the readers keep the file open
        f.seek(40)
        f.write(b"\x00\x01\x02\x03")
    stores["first_touch"].read(0)
    stores["never"].read(0)
    with pytest.raises(StoreError, match="chunk 0 does not match its checksum"):
        stores["always"].read(0)
    with pytest.raises(StoreError, match="chunk 0 does not match its checksum"):
        FeatureStore.open(uri).read(0)


def test_convert_to_fp8_without_the_target(tmp_path):
    corpus = Corpus(n=30, top_k=2)
    source = corpus.build(tmp_path, shards=[0, 2, 3])
    summary = convert(source.uri, str(tmp_path), "fp8_e4m3")
    assert summary["missing"] == source.num_shards - 3
    assert set(summary["relative_error"]) == {1, 2, 3} and 0.01 < max(summary["relative_error"].values()) < 0.035
    corpus.build(tmp_path)
    summary = convert(source.uri, str(tmp_path), "fp8_e4m3")
    assert summary["complete"]
    a, b = FeatureStore.open(source.uri), FeatureStore.open(summary["uri"])
    assert b.spec.storage_dtype == "fp8_e4m3" and a.documents.equals(b.documents) and b.bytes < 0.8 * a.bytes
    for row in range(len(a)):
        x, y = a.read(row), b.read(row)
        assert (y.hidden_SLD.float() - x.hidden_SLD.float()).norm() < 0.035 * x.hidden_SLD.float().norm()
        np.testing.assert_array_equal(x.target_logprob_S, y.target_logprob_S)
        np.testing.assert_array_equal(x.topk_ids_Sk, y.topk_ids_Sk)
    with pytest.raises(ConfigError, match="would not make it smaller"):
        convert(summary["uri"], str(tmp_path), "bf16")


def test_command_line(tmp_path, features):
    corpus = Corpus(n=40)
    writer = corpus.build(tmp_path / "store")
    info = json.loads(features("inspect", writer.uri, "--json")[1])
    assert info["documents"] == 40 and info["complete"] and sum(info["lengths"].values()) == 40
    assert "documents   40" in features("inspect", writer.uri)[1]
    path = Path(writer.uri) / "hidden" / "c" / "2" / "0" / "0"
    path.write_bytes(path.read_bytes()[:-9])
    code, out, _ = features("verify", writer.uri)
    assert code == 1 and "shard 2: hidden/c/2/0/0" in out
    code, out, _ = features("verify", writer.uri, "--repair")
    assert code == 0 and "dropped 1 shards (2)" in out
    assert StoreWriter(writer.uri).missing_shards() == [2]
    assert json.loads(features("merge-manifest", writer.uri)[1])["missing"] == 1
    code, _, err = features("inspect", tmp_path)
    assert code == 2 and "is no feature store" in err
    code, out, _ = features("convert", writer.uri, tmp_path / "store")
    assert code == 0 and "relative error" in out
    assert "supervised" in features("sample", writer.uri, "--documents", 2)[1]
    pq.write_table(corpus.documents, tmp_path / "documents.parquet")
    plan = ("estimate", "--documents", tmp_path / "documents.parquet", "--target", "qwen3-8b", "--hidden-size", 4096)
    code, out, _ = features(*plan, "--tokens-per-second", 10_000, "--root", tmp_path)
    assert code == 0 and "fp8_e4m3" in out and "hours       0.0" in out
    code, _, err = features(*plan, "--max-bytes", "1e6", "--root", tmp_path)
    assert code == 2 and "more than max_bytes = 1.0 MB" in err
    _, out, _ = features("estimate", "--tokens", "1.2e9", "--target", "qwen3-8b", "--hidden-size", 4096)
    assert "49.2 TB" in out and "24.6 TB" in out
    code, _, err = features("estimate", "--tokens", "1.2e9", writer.uri)
    assert code == 2 and "give one" in err
    assert "tokens" in features("estimate", writer.uri, "--root", tmp_path)[1]


@pytest.mark.spawn
def test_command_line_as_a_process(tmp_path):
    command = [sys.executable, "-m", "features", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "is no feature store" in done.stderr
