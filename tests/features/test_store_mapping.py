"""Rows as mapped memory: the bytes of the file, private to the tensor, given back with it, and never a SIGBUS."""

import errno
import gc
import mmap
import multiprocessing
import os

import numpy as np
import pytest
import torch
from store_kit import Corpus

from features import mapping
from features.mapping import map_pieces, populate
from features.reader import FeatureStore
from infra.errors import StoreError

PAGE = mmap.PAGESIZE
LONG = {"n": 6, "max_length": 96, "min_length": 20, "hidden_size": 8192, "shard_tokens": 256}  # 49 kB a row


@pytest.fixture
def pages(tmp_path):
    """An open file of eight pages, and its bytes."""
    content = np.random.default_rng(0).integers(0, 256, 8 * PAGE, dtype=np.uint8)
    path = tmp_path / "pages"
    path.write_bytes(content.tobytes())
    fd = os.open(path, os.O_RDWR)
    yield fd, content.reshape(8, PAGE)
    os.close(fd)


def test_pieces_follow_one_another(pages):
    fd, content = pages
    mapped = map_pieces(fd, [5 * PAGE, 0, 2 * PAGE], 2 * PAGE)
    populate(mapped)
    assert np.array_equal(mapped.reshape(6, PAGE), content[[5, 6, 0, 1, 2, 3]])
    mapped[:] = 7  # stays here
    assert os.pread(fd, PAGE, 0) == content[0].tobytes()
    again = map_pieces(fd, [0], PAGE)
    assert np.array_equal(again, content[0])


def test_memory_goes_with_the_last_view(pages):
    fd, content = pages
    gc.collect()
    before = mapping._pieces
    tensor = torch.from_numpy(map_pieces(fd, [0, 3 * PAGE], PAGE))[PAGE + 5 :].view(-1)[:7]
    gc.collect()
    assert mapping._pieces == before + 2 and np.array_equal(tensor.numpy(), content[3, 5:12])
    del tensor
    gc.collect()
    assert mapping._pieces == before


def test_what_cannot_be_mapped_is_left_to_reading(pages, monkeypatch):
    fd, _ = pages
    before = mapping._pieces
    assert map_pieces(fd, [64], PAGE) is None and map_pieces(fd, [0], PAGE + 64) is None
    assert map_pieces(fd, [], PAGE) is None and map_pieces(-1, [0], PAGE) is None
    monkeypatch.setattr(mapping, "MAX_PIECES", before + 1)
    assert map_pieces(fd, [0, PAGE], PAGE) is None
    monkeypatch.setattr(mapping, "libc", None)
    assert map_pieces(fd, [0], PAGE) is None
    assert mapping._pieces == before


def test_pages_that_the_file_has_not_are_an_error(pages):
    fd, _ = pages
    mapped = map_pieces(fd, [4 * PAGE], 4 * PAGE)
    os.ftruncate(fd, 6 * PAGE)
    populate(mapped[: 2 * PAGE])
    with pytest.raises(OSError) as caught:
        populate(mapped)
    assert caught.value.errno == errno.EFAULT


def mapped_rows(store):
    """Rows of the documents whose features come mapped."""
    gc.collect()
    found = []
    for i in range(len(store)):
        before = mapping._pieces
        features = store.read(i)
        found += [i] if mapping._pieces > before else []
        del features
    return found


@pytest.mark.parametrize("verify", ["first_touch", "always", "never"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_long_documents_are_mapped_and_equal_what_is_copied(tmp_path, verify, dtype):
    corpus = Corpus(**LONG, storage_dtype=dtype)
    store = FeatureStore.open(corpus.build(tmp_path).uri, verify=verify)
    assert mapped_rows(store) == list(range(len(store)))
    corpus.check(store)
    for i in range(len(store)):
        n = store.length(i)
        for start, stop in ((0, n), (1, n - 1), (n // 2, n), (0, 12)):
            f = store.read(i, start, stop)
            copy = torch.empty_like(f.hidden_SLD)
            store.read_hidden(i, copy, start)
            assert torch.equal(f.hidden_SLD, copy) and f.hidden_SLD.is_contiguous()
    f = store.read(0)
    f.hidden_SLD.zero_()  # the caller's own
    corpus.check(store)
    del f
    gc.collect()
    assert mapping._pieces == 0


def test_without_mappings_the_same_comes_by_reading(tmp_path, monkeypatch):
    corpus = Corpus(**LONG)
    uri = corpus.build(tmp_path).uri
    monkeypatch.setattr(mapping, "libc", None)
    store = FeatureStore.open(uri)
    assert mapped_rows(store) == []
    corpus.check(store)


def test_where_memory_is_short_rows_are_read(tmp_path, monkeypatch):
    def populate(memory):
        raise OSError(errno.ENOMEM, "no memory")

    corpus = Corpus(**LONG)
    store = FeatureStore.open(corpus.build(tmp_path).uri)
    monkeypatch.setattr("features.shard_object.populate", populate)
    assert mapped_rows(store) == []
    corpus.check(store)


@pytest.mark.parametrize("verify", ["first_touch", "never"])
def test_a_file_cut_short_while_open_is_an_error_not_a_sigbus(tmp_path, verify):
    corpus = Corpus(**LONG)
    writer = corpus.build(tmp_path)
    store = FeatureStore.open(writer.uri, verify=verify)
    last = len(store) - 1
    store.read(last, 0, 12)
    shard = store.documents["shard"][last].as_py()
    os.truncate(writer.files.local(writer.layouts["hidden"].key(shard)), PAGE)
    with pytest.raises(StoreError, match=r"hidden/c/\d+/0/0 is damaged: it ends early or cannot be read.*--repair"):
        store.read(last)


def test_a_flipped_bit_is_found_where_it_is_mapped(tmp_path):
    corpus = Corpus(**LONG)
    writer = corpus.build(tmp_path)
    layout, row = writer.layouts["hidden"], writer.plan.to_pylist()[0]
    path = writer.files.local(layout.key(row["shard"]))
    at = row["start"] // layout.chunk_tokens * layout.chunk_stride + 1000
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
    for verify in ("first_touch", "always"):
        store = FeatureStore.open(writer.uri, verify=verify)
        for _ in range(2):  # and is not taken for checked afterwards
            with pytest.raises(StoreError, match="chunk 0 does not match its checksum"):
                store.read(row["document"])


def _sum_in_child(tensor, queue):
    queue.put(tensor.float().sum().item())


@pytest.mark.spawn
def test_a_forked_child_sees_what_its_parent_mapped(tmp_path):
    store = FeatureStore.open(Corpus(**LONG).build(tmp_path).uri)
    hidden = store.read(0).hidden_SLD
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_sum_in_child, args=(hidden, queue))
    child.start()
    assert queue.get(timeout=60) == hidden.float().sum().item()
    child.join()
