"""A small real store: the tiny target's own greedy answers and its hidden states."""

import numpy as np
import pyarrow as pa
import pytest
import torch


@pytest.fixture(scope="session")
def tiny_documents(tiny) -> pa.Table:
    """40 prompts of random bytes, each with 24 greedy tokens of the tiny target; 8 held out."""
    from features.plan import DOCUMENT_SCHEMA, document_id

    rng = np.random.default_rng(0)
    prompts = torch.from_numpy(rng.integers(0, 256, (40, 12)))
    cache, ids, out = tiny.new_cache(), prompts, []
    for _ in range(24):
        ids = tiny.forward(ids, cache=cache, logits="last", taps=False).logits_BSV.argmax(-1)
        out.append(ids)
    tokens = torch.cat([prompts, *out], 1).numpy().astype(np.int32)
    rows = []
    for i, ids_S in enumerate(tokens):
        mask = np.zeros(len(ids_S), np.uint8)
        mask[12 : 36 - i % 5] = 1
        split = "heldout" if i >= 32 else "train"
        rows.append((document_id(ids_S, mask), ids_S.tolist(), mask.tolist(), "random", split, 12))
    columns = [pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), DOCUMENT_SCHEMA, strict=True)]
    return pa.Table.from_arrays(columns, schema=DOCUMENT_SCHEMA)


@pytest.fixture(scope="session")
def tiny_store(tiny, tiny_documents, tmp_path_factory) -> str:
    """URI of a finished store of these documents (bf16)."""
    from features.plan import corpus_digest, make_plan
    from features.spec import FeatureSpec
    from features.writer import create_store

    cfg = tiny.config
    spec = FeatureSpec(
        target=cfg.name,
        **tiny.source_identity(),
        tap_layer_ids=cfg.tap_layer_ids,
        hidden_size=tiny.hidden_size,
        max_length=cfg.max_length,
        shard_tokens=512,
        corpus_digest=corpus_digest(tiny_documents),
    )
    plan = make_plan(tiny_documents, spec.shard_tokens)
    writer = create_store(str(tmp_path_factory.mktemp("store")), spec, plan)
    by_id = {r["document"]: r for r in tiny_documents.to_pylist()}
    for shard in writer.missing_shards():
        writer.write_shard(shard, [features(tiny, by_id[d]) for d in writer.shard_plan(shard)["document"].to_pylist()])
    writer.finish()
    return writer.uri


def features(tiny, row: dict):
    from features.document import DocumentFeatures

    ids = torch.tensor([row["token_ids"]])
    out = tiny.forward(ids)
    logprob = out.logits_BSV[0].float().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None]).flatten()
    return DocumentFeatures(
        row["document"],
        np.array(row["token_ids"], np.int32),
        np.array(row["loss_mask"], np.uint8),
        out.hidden_BSLD[0],
        np.concatenate([[0], logprob.numpy()]).astype(np.float32),
    )


@pytest.fixture(scope="module", autouse=True)
def compiler_as_it_was():
    """Muon on a CPU switches torch's compiler off for the process, which other test files of this process need."""
    import torch._dynamo

    before = torch._dynamo.config.disable
    yield
    torch._dynamo.config.disable = before
