"""The same store over the S3 protocol, against moto's server on a loopback port of its own."""

import contextlib
import itertools
import multiprocessing
import uuid

import numpy as np
import pytest
import torch
from store_kit import Corpus, FragileFiles, Killed, die

from features.commits import read_commit
from features.convert import convert
from features.files import ObjectFiles, is_remote, open_files
from features.reader import FeatureStore
from features.stream import AnchorStream, StreamConfig
from features.verify import repair, verify_store
from features.writer import StoreWriter, create_store
from infra.errors import StoreError

pytest.importorskip("moto.server", reason="moto[server] is not installed")


@pytest.fixture
def root(bucket):
    return f"{bucket}/{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def corpus():
    return Corpus(n=9, max_length=24, shard_tokens=64)


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_documents_come_back(root, tmp_path, storage):
    corpus = Corpus(n=6, storage_dtype=storage, top_k=3)
    writer = corpus.build(root)
    store = FeatureStore.open(writer.uri, corpus.spec)
    assert store.complete and verify_store(writer.uri) == []
    corpus.check(store)
    for document in store.documents["document"].to_pylist()[:4]:
        corpus.check_document(store, document, 2, 5)
    local = corpus.build(tmp_path)  # the same bytes as in a folder
    files, there = open_files(writer.uri), open_files(local.uri)
    objects = [p for p in there.list("") if "/c/" in p or p.endswith("zarr.json") or p == "spec.json"]
    assert len(objects) > 10 and all(files.read(p) == there.read(p) for p in objects)
    assert files.list("attempts") == []


@pytest.mark.parametrize("verify", ["first_touch", "always", "never"])
def test_documents_of_several_chunks_come_back(root, verify):
    corpus = Corpus(n=4, max_length=48, hidden_size=8192, shard_tokens=128)  # 16 rows of 49 kB make a chunk
    store = FeatureStore.open(corpus.build(root).uri, verify=verify)
    for _ in range(2):
        corpus.check(store)


def test_opens_in_plain_zarr(root, corpus):
    zarr = pytest.importorskip("zarr")
    writer = corpus.build(root)
    group = zarr.open(zarr.storage.ObjectStore(writer.files.store, read_only=True), mode="r")
    row = writer.plan.to_pylist()[3]
    at = row["shard"] * 64 + row["start"]
    tokens = group["token_ids"][at : at + row["length"]]
    np.testing.assert_array_equal(tokens, corpus.rows[row["document"]]["token_ids"])
    bits = group["hidden"][at : at + row["length"]]
    want = FeatureStore.open(writer.uri).read(row["document"]).hidden_SLD
    assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16), want)


@pytest.mark.parametrize(
    "at, moment", [(1, "middle"), (4, "after"), (5, "before"), (5, "after"), (6, "after"), (9, "after")]
)
def test_death_at_a_step(root, corpus, at, moment):
    writer = create_store(root, corpus.spec, corpus.plan)
    writer.files = FragileFiles(writer.files, at, moment, die)  # four objects, the commit, four moves
    with contextlib.suppress(Killed):
        writer.write_shard(0, corpus.of_shard(writer, 0))
    corpus.check(FeatureStore.open(writer.uri))
    again = corpus.build(root)
    assert again.missing_shards() == [] and verify_store(again.uri) == [] and again.files.list("attempts") == []
    corpus.check(FeatureStore.open(again.uri))


@pytest.mark.parametrize("at", [1, 5, 6])
def test_two_writers_of_one_shard(root, corpus, at):
    writer = create_store(root, corpus.spec, corpus.plan)

    def rival():
        other = StoreWriter(writer.uri)
        other.write_shard(0, corpus.of_shard(other, 0))

    mine = StoreWriter(writer.uri)
    mine.files = FragileFiles(mine.files, at, "before", rival)
    receipt = mine.write_shard(0, corpus.of_shard(mine, 0))
    commit = read_commit(writer.files, 0)
    assert receipt["won"] == (at == 6) and receipt["attempt"] == commit.attempt
    assert verify_store(writer.uri) == [] and writer.files.list("attempts") == []
    corpus.check(FeatureStore.open(writer.uri))


def test_damage_is_found_and_repaired(root, corpus):
    writer = corpus.build(root)
    files = writer.files
    data = bytearray(files.read("hidden/c/0/0/0"))
    data[77] ^= 1
    files.write("hidden/c/0/0/0", bytes(data))
    files.write("token_ids/c/1", files.read("token_ids/c/1")[:-5])
    files.remove("loss_mask/c/2")
    store = FeatureStore.open(writer.uri)
    for shard, problem in enumerate(["chunk 0 does not match", "its commit says", "the object is gone"]):
        with pytest.raises(StoreError, match=problem):
            for row in store.documents.to_pylist():
                if row["shard"] == shard:
                    store.read(row["document"])
    bad = verify_store(writer.uri)
    assert [b.path for b in bad] == ["hidden/c/0/0/0", "token_ids/c/1", "loss_mask/c/2"]
    assert repair(writer.uri, bad) == [0, 1, 2] == StoreWriter(writer.uri).missing_shards()
    corpus.build(root)
    assert verify_store(writer.uri) == []
    corpus.check(FeatureStore.open(writer.uri, verify="always"))


def test_stream_and_conversion_are_those_of_a_folder(root, tmp_path, corpus):
    here, there = corpus.build(tmp_path).uri, corpus.build(root).uri
    cfg = StreamConfig(block_size=4, anchors_per_document=4, documents_per_micro_batch=2, global_batch=4)
    streams = [AnchorStream(FeatureStore.open(uri), cfg) for uri in (here, there)]
    for a, b in itertools.islice(zip(*streams, strict=True), 5):
        assert a.documents == b.documents and torch.equal(a.hidden_SLD, b.hidden_SLD)
        assert torch.equal(a.labels_AK, b.labels_AK) and torch.equal(a.step_supervised_K, b.step_supervised_K)
    summary = convert(there, root, "fp8_e4m3")
    assert summary["complete"] and verify_store(summary["uri"]) == []


def test_prefix_reads_fetch_only_their_chunks(root):
    corpus = Corpus(n=4, max_length=48, hidden_size=8192, shard_tokens=128)  # 16 rows of 49 kB make a chunk
    store = FeatureStore.open(corpus.build(root).uri)
    fetched = []

    class Counting(ObjectFiles):
        def read_ranges(self, path, starts, ends):
            fetched.append((path, sum(ends) - sum(starts)))
            return super().read_ranges(path, starts, ends)

    store.files = Counting(store.uri)
    row = int(store.documents["length"].to_numpy().argmax())
    store.read(row, stop=4)
    hidden = sum(n for path, n in fetched if path.startswith("hidden"))
    layout = store.layouts["hidden"]
    assert layout.chunk_tokens == 16
    assert hidden <= 2 * layout.chunk_stride + layout.index_bytes


def _read_all(store, queue):
    try:
        queue.put([store.read(i).hidden_SLD.float().sum().item() for i in range(len(store))])
    except StoreError as e:
        queue.put(str(e))


@pytest.mark.spawn
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(root, corpus, method):
    store = FeatureStore.open(corpus.build(root).uri)
    here = [store.read(i).hidden_SLD.float().sum().item() for i in range(len(store))]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_read_all, args=(store, queue))
    process.start()
    got = queue.get(timeout=60)
    process.join()
    if method == "spawn":
        assert got == here
    else:  # the client's threads are gone there: a sentence, not a hang
        assert "start such workers with the 'spawn' method" in got


def test_addresses(bucket):
    assert is_remote("s3://b/x") and is_remote("gs://b") and not is_remote("/data/x") and not is_remote("file:///x")
    with pytest.raises(StoreError, match="has the scheme 'ftp'"):
        is_remote("ftp://x")
    with pytest.raises(StoreError, match="is no feature store"):
        FeatureStore.open(f"{bucket}/nothing")
    with pytest.raises(StoreError, match=r"cannot be reached .* check the address"):
        FeatureStore.open("az://container/x")  # no account in the environment
