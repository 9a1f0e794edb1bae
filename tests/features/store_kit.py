"""Small corpora and stores with features that are a pure function of the document, for the tests of the store."""

import zlib

import numpy as np
import pyarrow as pa
import torch

from features.document import DocumentFeatures
from features.plan import DOCUMENT_SCHEMA, corpus_digest, document_id, make_plan, split_of
from features.spec import FeatureSpec
from features.writer import create_store


def make_documents(n=24, seed=0, max_length=48, min_length=6, vocab=320):
    """A corpus in DOCUMENT_SCHEMA: a prompt of about a third, then supervised tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        length = int(rng.integers(min_length, max_length + 1))
        prompt = max(1, length // 3)
        tokens = rng.integers(0, vocab, length).astype(np.int32)
        mask = np.zeros(length, np.uint8)
        mask[prompt:] = 1
        document = document_id(tokens, mask)
        rows.append(
            {
                "document": document,
                "token_ids": tokens.tolist(),
                "loss_mask": mask.tolist(),
                "source": f"source{i % 3}",
                "split": split_of(document, 0.2),
                "prompt_length": prompt,
            }
        )
    return pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA)


def make_spec(documents, **changes):
    fields = {
        "target": "tiny",
        "source_repo": "random/tiny",
        "source_revision": "0",
        "weights_digest": "w" * 64,
        "tokenizer_digest": "t" * 64,
        "chat_template_digest": "c" * 64,
        "tap_layer_ids": (1, 2, 3),
        "hidden_size": 16,
        "max_length": 48,
        "shard_tokens": 128,
        "corpus_digest": corpus_digest(documents),
    }
    return FeatureSpec(**(fields | changes))


def features_of(row, spec):
    """DocumentFeatures of one document of the corpus; equal calls give equal bits."""
    tokens, mask = np.array(row["token_ids"], np.int32), np.array(row["loss_mask"], np.uint8)
    n = len(tokens)
    g = torch.Generator().manual_seed(zlib.crc32(row["document"].encode()))
    hidden = torch.randn(n, spec.num_taps, spec.hidden_size, generator=g)
    logprob = -torch.rand(n, generator=g).numpy()
    logprob[0] = 0
    k = spec.top_k
    return DocumentFeatures(
        document=row["document"],
        token_ids_S=tokens,
        loss_mask_S=mask,
        hidden_SLD=hidden,
        target_logprob_S=logprob,
        topk_ids_Sk=torch.randint(0, 320, (n, k), generator=g).int().numpy() if k else None,
        topk_logprobs_Sk=-torch.rand(n, k, generator=g).numpy().astype(np.float16) if k else None,
    )


class Killed(BaseException):
    """Stands for the end of the process."""


def die():
    raise Killed


class FragileFiles:
    """Real files, with an accident before, in the middle of, or after their n-th changing operation."""

    def __init__(self, files, at, moment, accident):
        self.files, self.left, self.moment, self.accident = files, at, moment, accident

    def __getattr__(self, name):  # what changes nothing
        return getattr(self.files, name)

    def _step(self, operation, partly=None):
        self.left -= 1
        if self.left == 0 and self.moment == "before":
            self.accident()
        if self.left == 0 and self.moment == "middle" and partly is not None:
            partly()
            self.accident()
        result = operation()
        if self.left == 0 and self.moment == "after":
            self.accident()
        return result

    def write(self, path, data):
        return self._step(lambda: self.files.write(path, data))

    def create(self, path, data):
        aside = getattr(
            self.files, "_aside", None
        )  # a folder is left with a part of the aside file; a PUT with nothing
        return self._step(
            lambda: self.files.create(path, data), aside and (lambda: aside(path, data[: len(data) // 2]))
        )

    def open_parts(self, path, nbytes):
        fragile, parts = self, self.files.open_parts(path, nbytes)
        self.left -= 1
        moment = self.moment if self.left == 0 else None
        if moment == "before":
            self.accident()

        class Parts:
            def write(self, offset, buffers):
                if moment == "middle":
                    parts.write(offset, [bytes(b)[: len(b) // 2] for b in buffers])
                    fragile.accident()
                parts.write(offset, buffers)

            def close(self):
                parts.close()
                if moment == "after":
                    fragile.accident()

            def abandon(self):
                parts.abandon()

        return Parts()

    def move(self, source, destination):
        return self._step(lambda: self.files.move(source, destination))

    def remove(self, path):
        return self._step(lambda: self.files.remove(path))


class Corpus:
    """Documents, spec and plan together."""

    def __init__(self, n=24, seed=0, **changes):
        shape = {k: changes.pop(k) for k in ("max_length", "min_length") if k in changes}
        self.documents = make_documents(n, seed, **shape)
        self.spec = make_spec(
            self.documents, **({"max_length": shape["max_length"]} if "max_length" in shape else {}), **changes
        )
        self.plan = make_plan(self.documents, self.spec.shard_tokens)
        self.rows = {r["document"]: r for r in self.documents.to_pylist()}

    def of_shard(self, writer, shard):
        return [features_of(self.rows[d], self.spec) for d in writer.shard_plan(shard)["document"].to_pylist()]

    def build(self, root, shards=None, **options):
        writer = create_store(str(root), self.spec, self.plan, **options)
        for shard in writer.missing_shards() if shards is None else shards:
            writer.write_shard(shard, self.of_shard(writer, shard))
        writer.finish()
        return writer

    def check(self, store, documents=None):
        """Every document of the store equals what was handed over, bit by bit."""
        for document in store.documents["document"].to_pylist() if documents is None else documents:
            self.check_document(store, document)

    def check_document(self, store, document, start=0, stop=None):
        want, got = features_of(self.rows[document], self.spec), store.read(document, start, stop)
        at = slice(start, stop)
        if self.spec.storage_dtype == "fp32":
            assert torch.equal(got.hidden_SLD, want.hidden_SLD[at])
        elif self.spec.storage_dtype == "bf16":
            assert torch.equal(got.hidden_SLD, want.hidden_SLD[at].bfloat16())
        else:
            error = (got.hidden_SLD.float() - want.hidden_SLD[at]).norm() / want.hidden_SLD[at].norm()
            assert error < 0.04
        np.testing.assert_array_equal(got.token_ids_S, want.token_ids_S[at])
        np.testing.assert_array_equal(got.loss_mask_S, want.loss_mask_S[at])
        np.testing.assert_array_equal(got.target_logprob_S, want.target_logprob_S[at])
        if self.spec.top_k:
            np.testing.assert_array_equal(got.topk_ids_Sk, want.topk_ids_Sk[at])
            np.testing.assert_array_equal(got.topk_logprobs_Sk, want.topk_logprobs_Sk[at])
