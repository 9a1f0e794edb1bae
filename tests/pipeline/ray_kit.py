"""Small corpora and runs for the tests that start Ray."""

import contextlib
import json

import numpy as np
import psutil
import torch

from features.plan import make_plan
from features.reader import FeatureStore
from features.writer import create_store
from pipeline.config import resolve
from pipeline.corpus import read_corpus
from pipeline.documents import build_documents
from pipeline.front import TargetFront
from pipeline.generate import Generator
from pipeline.prefill import documents_of, features_of, shard_row
from pipeline.regenerate import Dialogue, _identity, _request, chunked
from pipeline.render import Renderer
from pipeline.responses import Responses, repetition
from pipeline.run import feature_spec


def corpus_file(folder, rows=60):
    """A corpus with answers of mixed lengths, and its TOML; nothing to regenerate."""
    data = [
        {"prompt": f"Question {i}: {'why ' * (i % 7)}?", "response": f"Answer {i}. " + "because " * (i * 5 % 17)}
        for i in range(rows)
    ]
    settings = (
        '[regenerate]\nengine = "none"\n[prefill]\nshard_tokens = 512\nstorage_dtype = "fp32"\nbatch_tokens = 600\n'
    )
    return write_corpus(folder, "kept", data, settings)


def write_corpus(folder, name, rows, settings):
    """`<name>.jsonl` and the TOML that reads it, with further sections."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    toml = folder / f"{name}.toml"
    toml.write_text(f'[sources.{name}]\nkind = "files"\npaths = ["{folder}/{name}.jsonl"]\n{settings}')
    return str(toml)


def configured(folder, corpus, *overrides, name="a"):
    return resolve(
        "tiny",
        corpus,
        [f"store_root={folder}/store-{name}", f"data_root={folder}/data-{name}", "ray.actors=1", *overrides],
    )


def serially(cfg, target):
    """The store of a greedy run over single prompts without Ray, with one thread as the actors have; its folder."""
    torch.set_num_threads(1)
    front = TargetFront(cfg.target)
    renderer = Renderer(cfg.target, front.tokenizer, front.chat_template(), front.stop_ids)
    dialogues = [Dialogue(c) for c in read_corpus(cfg)]
    requests = [_request(d, renderer, cfg) for d in dialogues if d.advance()]
    responses = Responses(cfg.work_folder.parent, _identity(cfg, front))
    for chunk in chunked(requests, cfg.regenerate.batch_size):
        answers = Generator(target, cfg.regenerate).generate(chunk)
        responses.add([vars(r) | {"repetition": repetition(r.token_ids)} for r in answers])
    documents, _ = build_documents(cfg, front)
    spec = feature_spec(cfg, front, documents)
    writer = create_store(cfg.store_root, spec, make_plan(documents, cfg.prefill.shard_tokens))
    rows_of = {d: i for i, d in enumerate(documents["document"].to_pylist())}
    for shard in writer.missing_shards():
        part = documents_of(shard_row(writer, shard, rows_of, documents))
        writer.write_shard(shard, features_of(target, part, cfg.prefill.batch_tokens))
    writer.finish()
    return writer.uri


def actor_processes():
    """Pids of the actors of Ray Data below this process; Ray's own list of actors needs its dashboard."""
    names = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            names[child.pid] = " ".join(child.cmdline())
    return [pid for pid, name in names.items() if name.startswith("ray::MapWorker")]


def content(uri):
    """Everything that a reader can see of a store."""
    store = FeatureStore.open(uri, verify="always")
    assert store.complete
    found = {}
    for row in store.documents.to_pylist():
        f = store.read(row["document"])
        arrays = (f.hidden_SLD.numpy(), f.token_ids_S, f.loss_mask_S, f.target_logprob_S)
        found[row["document"]] = (row["source"], row["split"], row["prompt_length"], [np.asarray(a) for a in arrays])
    return found


def assert_equal_stores(a, b):
    a, b = content(a), content(b)
    assert a.keys() == b.keys() and a
    for document in a:
        assert a[document][:3] == b[document][:3]
        for x, y in zip(a[document][3], b[document][3], strict=True):
            np.testing.assert_array_equal(x, y)


def assert_features_are_the_targets(uri, target):
    """Every stored document against a plain pass of the target."""
    store = FeatureStore.open(uri)
    for row in store.documents.to_pylist():
        f = store.read(row["document"])
        ids = torch.as_tensor(np.asarray(f.token_ids_S)).long()[None]
        with torch.no_grad():
            states = target.model(ids, output_hidden_states=True).hidden_states
        for tap, layer in enumerate(target.config.tap_layer_ids):
            expected = states[layer + 1][0]
            assert (f.hidden_SLD[:, tap] - expected).norm() / expected.norm() < 1e-5
