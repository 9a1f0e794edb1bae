"""What is written comes back, through our reader and through plain zarr."""

import dataclasses
import multiprocessing
import pickle
import resource

import numpy as np
import pytest
import torch
from store_kit import Corpus, features_of

from features.commits import commit_path, read_commit
from features.layout import ObjectRecord, decode_index
from features.reader import FeatureStore
from features.threads import crc32c
from features.verify import verify_store
from features.writer import create_store
from infra.errors import ResourceError, SpecMismatch, StoreError


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3", "fp32"])
@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("verify", ["first_touch", "always", "never"])
def test_documents_come_back(tmp_path, storage, top_k, verify):
    corpus = Corpus(storage_dtype=storage, top_k=top_k, shard_tokens=120)
    writer = corpus.build(tmp_path)
    store = FeatureStore.open(writer.uri, corpus.spec, verify=verify)
    assert store.complete and len(store) == 24
    for _ in range(2):
        corpus.check(store)
    for document in store.documents["document"].to_pylist()[:6]:
        corpus.check_document(store, document, 1, 5)


def test_opens_in_plain_zarr(tmp_path):
    zarr = pytest.importorskip("zarr")
    corpus = Corpus(top_k=4)
    writer = corpus.build(tmp_path)
    group = zarr.open(writer.uri, mode="r")
    hidden = group["hidden"]
    assert hidden.attrs["logical_dtype"] == "bfloat16" and hidden.attrs["tap_layer_ids"] == [1, 2, 3]
    assert hidden.shape == (writer.num_shards * 128, 3, 16)
    for row in writer.plan.to_pylist():
        want = features_of(corpus.rows[row["document"]], corpus.spec)
        a = row["shard"] * 128 + row["start"]
        bits = hidden[a : a + row["length"]]
        assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16), want.hidden_SLD.bfloat16())
        for name, value in {"token_ids": want.token_ids_S, "target_logprob": want.target_logprob_S}.items():
            np.testing.assert_array_equal(group[name][a : a + row["length"]], value)


WIDE = {"n": 4, "max_length": 48, "hidden_size": 8192, "shard_tokens": 128}  # 16 rows of 49 kB make a chunk


@pytest.mark.parametrize("verify", ["first_touch", "always", "never"])
def test_chunks_are_aligned_and_readers_do_not_rely_on_it(tmp_path, verify):
    """Objects with nothing between their chunks, which stand in another order, are read as well."""
    corpus = Corpus(**WIDE)
    writer = corpus.build(tmp_path)
    layout = writer.layouts["hidden"]
    for shard in range(writer.num_shards):
        commit, path = read_commit(writer.files, shard), layout.key(shard)
        data = writer.files.read(path)
        tail = data[-layout.index_bytes :]
        index = decode_index(layout, tail, len(data), path)
        there = [i for i in range(layout.num_chunks) if index[i, 0] >= 0]
        assert len(there) > 1 and not (index[there, 0] % 4096).any()
        packed, raw = b"", np.frombuffer(tail[:-4], "<u8").reshape(-1, 2).copy()
        for i in reversed(there):
            raw[i, 0] = len(packed)
            packed += data[index[i, 0] : index[i, 0] + layout.chunk_bytes + 4]
        tail = raw.tobytes() + crc32c(raw.tobytes()).to_bytes(4, "little")
        writer.files.write(path, packed + tail)
        objects = commit.objects | {"hidden": ObjectRecord(len(packed + tail), "")}
        writer.files.write(commit_path(shard), dataclasses.replace(commit, objects=objects).to_json())
    writer.files.remove("manifest.json")
    store = FeatureStore.open(writer.uri, verify=verify)
    for _ in range(2):
        corpus.check(store)


def test_taps_are_layer_ids(tmp_path):
    corpus = Corpus(n=4)
    store = FeatureStore.open(corpus.build(tmp_path).uri)
    whole = store.read(0).hidden_SLD
    assert torch.equal(store.read(0, taps=(3, 1)).hidden_SLD, whole[:, [2, 0]])
    with pytest.raises(StoreError, match=r"tap 9 is not stored .* 1, 2, 3"):
        store.read(0, taps=(9,))


def test_another_spec_is_named(tmp_path):
    corpus = Corpus(n=4)
    uri = corpus.build(tmp_path).uri
    other = corpus.spec.model_copy(update={"hidden_size": 17, "weights_digest": "x"})
    with pytest.raises(
        SpecMismatch, match=r"weights_digest is 'w.*' there and 'x' here; hidden_size is 16 there and 17 here"
    ):
        FeatureStore.open(uri, other)
    with pytest.raises(SpecMismatch, match="corpus"):
        create_store(str(tmp_path), corpus.spec, Corpus(n=5).plan)


def test_wrong_reads_are_explained(tmp_path):
    corpus = Corpus(n=4)
    store = FeatureStore.open(corpus.build(tmp_path).uri)
    with pytest.raises(StoreError, match="rows 0 to 99999 are outside"):
        store.read(0, 0, 99999)
    with pytest.raises(StoreError, match="document 'nope' is not in"):
        store.read("nope")
    with pytest.raises(StoreError, match="row 4 is outside the 4 documents"):
        store.read(4)
    with pytest.raises(StoreError, match="no feature store"):
        FeatureStore.open(str(tmp_path))


def _digest_in_worker(store, queue):
    queue.put([store.read(i).hidden_SLD.float().sum().item() for i in range(len(store))])


@pytest.mark.spawn
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_forked_and_spawned_workers(tmp_path, method):
    corpus = Corpus(n=6)
    store = FeatureStore.open(corpus.build(tmp_path).uri)
    here = [store.read(i).hidden_SLD.float().sum().item() for i in range(len(store))]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_digest_in_worker, args=(store, queue))
    process.start()
    assert queue.get(timeout=60) == here
    process.join()
    assert len(pickle.dumps(store)) < 100_000


def test_arrays_stored_again_with_compression_are_read_through_zarr(tmp_path):
    zarr = pytest.importorskip("zarr")
    corpus = Corpus(n=12)
    writer = corpus.build(tmp_path)
    old = zarr.open_array(writer.uri, path="hidden", mode="r")
    bits, attributes = old[:], old.attrs.asdict()
    new = zarr.create_array(
        writer.uri,
        name="hidden",
        shape=bits.shape,
        dtype=bits.dtype,
        shards=old.shards,
        chunks=old.chunks,
        overwrite=True,
    )  # zstd, zarr's own default
    new[:] = bits
    new.attrs.update(attributes)
    corpus.check(FeatureStore.open(writer.uri))


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "fp32"])
def test_documents_over_several_chunks_in_any_order(tmp_path, dtype):
    """Whole chunks go straight to the file, shared ones wait for both documents, and a refused one leaves zeros."""
    zarr = pytest.importorskip("zarr")
    corpus = Corpus(n=8, max_length=48, min_length=30, hidden_size=8192, shard_tokens=128, storage_dtype=dtype)
    writer = create_store(str(tmp_path), corpus.spec, corpus.plan, max_reject_share=0.5)
    assert writer.layouts["hidden"].chunk_tokens <= 32
    refused = writer.shard_plan(0)["document"][1].as_py()
    for shard in range(writer.num_shards):
        documents = corpus.of_shard(writer, shard)[::-1]
        for d in documents:
            if d.document == refused:
                d.hidden_SLD[-1, -1, -1] = float("inf")
        writer.write_shard(shard, documents)
    writer.finish()
    assert verify_store(writer.uri) == []
    store = FeatureStore.open(writer.uri, verify="always")
    assert store.rejects["document"].to_pylist() == [refused] and len(store) == 7
    corpus.check(store)
    row = next(r for r in writer.plan.to_pylist() if r["document"] == refused)
    bits = zarr.open(writer.uri, mode="r")["hidden"][row["start"] : row["start"] + row["length"]]
    assert not bits.any()


def test_without_room_the_shard_is_refused_and_leaves_nothing(tmp_path):
    """Room is reserved before the first byte: a limit on file sizes stands for the full disk."""
    corpus = Corpus(n=4, hidden_size=4096)
    writer = create_store(str(tmp_path), corpus.spec, corpus.plan)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(ResourceError, match=r"no room for the \d+ MB of .*hidden .*make room there"):
            writer.write_shard(0, corpus.of_shard(writer, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert writer.files.list("attempts") == [] and 0 in writer.missing_shards()
    corpus.build(tmp_path)
    corpus.check(FeatureStore.open(writer.uri))
