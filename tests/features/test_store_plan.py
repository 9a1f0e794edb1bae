"""Identity of documents, splits, and the packing into shards."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_kit import make_documents, make_spec

from features.plan import PLAN_SCHEMA, corpus_digest, document_id, make_plan, num_shards, padding_share, split_of
from features.spec import FeatureSpec, parse_spec, store_path
from infra.errors import DataError, SpecMismatch, StoreError


def lengths_table(lengths, ids=None):
    n = len(lengths)
    ids = ids or [f"{i:032x}" for i in range(n)]
    columns = {
        "document": ids,
        "source": ["s"] * n,
        "split": ["train"] * n,
        "prompt_length": [1] * n,
        "length": lengths,
    }
    return pa.table(columns)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=80), st.randoms(use_true_random=False))
def test_packing(lengths, random):
    table = lengths_table(lengths)
    plan = make_plan(table, 128)
    assert plan.schema.equals(PLAN_SCHEMA) and len(plan) == len(lengths)
    used = {}
    for row in plan.to_pylist():  # sorted by shard and start: documents of a shard follow one another without a gap
        assert row["start"] == used.get(row["shard"], 0)
        used[row["shard"]] = row["start"] + row["length"]
    assert max(used.values()) <= 128 and sorted(used) == list(range(num_shards(plan)))
    order = list(range(len(lengths)))
    random.shuffle(order)
    assert make_plan(table.take(order), 128).equals(plan)


def test_padding_of_mixed_lengths():
    rng = np.random.default_rng(0)
    for low, high in ((256, 3072), (16, 3072), (2000, 3072)):
        plan = make_plan(lengths_table(rng.integers(low, high + 1, 3000).tolist()), 32_768)
        assert padding_share(plan, 32_768) < 0.03
    plan = make_plan(lengths_table(np.minimum(3072, rng.lognormal(6.5, 1, 5000).astype(int) + 8).tolist()), 32_768)
    assert padding_share(plan, 32_768) < 0.01


def test_duplicates_are_stored_once():
    documents = make_documents(6)
    twice = pa.concat_tables([documents, documents.slice(2, 3)])
    assert make_plan(twice, 128).equals(make_plan(documents, 128))
    assert corpus_digest(twice) == corpus_digest(documents) != corpus_digest(documents.slice(1))
    assert corpus_digest(make_plan(documents, 128)) == corpus_digest(documents)


def test_document_id_sees_tokens_and_mask():
    base = document_id([1, 2, 3], [0, 1, 1])
    assert len(base) == 32 and base == document_id(np.array([1, 2, 3]), np.array([0, 1, 1]))
    assert (
        len({base, document_id([1, 2, 4], [0, 1, 1]), document_id([1, 2, 3], [0, 0, 1]), document_id([1, 2], [0, 1])})
        == 4
    )


def test_split_is_decided_by_the_key_alone():
    keys = [f"conversation {i}" for i in range(4000)]
    small, large = ({k for k in keys if split_of(k, share) == "heldout"} for share in (0.05, 0.1))
    assert small < large and 150 < len(small) < 250
    assert not {k for k in keys if split_of(k, 0) == "heldout"}


def test_unusable_documents_are_explained():
    with pytest.raises(DataError, match="0 documents"):
        make_plan(lengths_table([]), 128)
    with pytest.raises(DataError, match="of 129 tokens does not fit a shard of 128"):
        make_plan(lengths_table([4, 129]), 128)
    with pytest.raises(DataError, match="share one id"):
        make_plan(lengths_table([4, 5], ["a", "a"]), 128)
    with pytest.raises(DataError, match="lack the columns prompt_length, split"):
        make_plan(lengths_table([4]).drop(["split", "prompt_length"]), 128)


def test_spec():
    documents = make_documents(3)
    spec = make_spec(documents)
    assert FeatureSpec.model_validate_json(spec.canonical()) == spec == parse_spec(spec.canonical(), "here")
    assert store_path("/data/", "tiny", spec) == f"/data/tiny/{spec.fingerprint12}"
    for field, value in {
        "tap_layer_ids": (1, 3, 2),
        "chat_template_args": {"enable_thinking": False},
        "top_k": 8,
    }.items():
        other = spec.model_copy(update={field: value})
        assert other.fingerprint != spec.fingerprint
        with pytest.raises(SpecMismatch, match=f"{field} is .* there and .* here"):
            spec.require_equal(other, "store x")
    wide = make_spec(documents, hidden_size=4096, tap_layer_ids=(1, 9, 17, 25, 33))
    assert wide.hidden_bytes_per_token("bf16") == 40_960 and wide.hidden_bytes_per_token("fp8_e4m3") == 20_500
    with pytest.raises(ValueError, match="shard_tokens = 16 is below max_length = 48"):
        make_spec(documents, shard_tokens=16)
    with pytest.raises(StoreError, match="schema version 9"):
        parse_spec(spec.canonical().replace('"schema_version":1', '"schema_version":9'), "here")
    with pytest.raises(StoreError, match="not a feature spec"):
        parse_spec(b"\x00", "here")
