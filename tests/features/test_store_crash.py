"""A store survives whatever happens to its writers: deaths at every step, duplicate attempts, torn and lost objects.

In a folder and on an S3 server alike; there with fewer examples and kills, since each operation is several requests.
FLASHDRAFT_HEAVY=1 makes them as many as in the folder (about ten minutes).
"""

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import uuid
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_kit import Corpus, FragileFiles, Killed, die

from features.commits import read_commit
from features.reader import FeatureStore
from features.verify import repair, verify_store
from features.writer import StoreWriter, create_store
from infra.errors import StoreError

HEAVY = bool(os.environ.get("FLASHDRAFT_HEAVY"))
CORPUS = Corpus(n=14, max_length=24, shard_tokens=48, hidden_size=8, storage_dtype="fp8_e4m3")


def documents(writer, shard, variant):
    """The shard's documents; variant 1 differs in every value, as another GPU's rounding would."""
    for d in CORPUS.of_shard(writer, shard):
        d.hidden_SLD = d.hidden_SLD * (1 + variant)
        d.target_logprob_S = d.target_logprob_S * (1 + variant)
        yield d


class StoreMachine(RuleBasedStateMachine):
    """Whatever the order of events, each visible document is wholly one attempt's, and damage is found and repaired."""

    @initialize()
    def begin(self):
        self.root = self.new_root()
        self.writer = create_store(self.root, CORPUS.spec, CORPUS.plan)
        self.uri, self.damaged, self.attempts = self.writer.uri, set(), {}

    def new_root(self):
        return tempfile.mkdtemp()

    def teardown(self):
        if hasattr(self, "root"):
            shutil.rmtree(self.root, ignore_errors=True)  # nothing there for a bucket, which ends with its server

    shards = st.integers(0, CORPUS.plan["shard"].to_numpy().max())
    moments = st.sampled_from(["before", "middle", "after"])

    def fragile(self, at, moment, accident):
        writer = StoreWriter(self.uri)
        writer.files = FragileFiles(writer.files, at, moment, accident)
        return writer

    @rule(shard=shards, variant=st.integers(0, 1))
    def write(self, shard, variant):
        before = read_commit(self.writer.files, shard)
        receipt = self.writer.write_shard(shard, documents(self.writer, shard, variant))
        assert receipt["won"] == (before is None)

    @rule(shard=shards, variant=st.integers(0, 1), at=st.integers(1, 12), moment=moments)
    def write_and_die(self, shard, variant, at, moment):
        writer = self.fragile(at, moment, die)
        with contextlib.suppress(Killed):
            writer.write_shard(shard, documents(writer, shard, variant))

    @rule(shard=shards, at=st.integers(1, 12), moment=st.sampled_from(["before", "after"]), finish=st.booleans())
    def two_writers_at_once(self, shard, at, moment, finish):
        def other():
            rival = StoreWriter(self.uri)
            rival.write_shard(shard, documents(rival, shard, 1))
            if finish:
                rival.finish()

        writer = self.fragile(at, moment, other)
        writer.write_shard(shard, documents(writer, shard, 0))

    @rule(at=st.integers(1, 8), moment=st.sampled_from(["before", "after"]))
    def finish_and_die(self, at, moment):
        with contextlib.suppress(Killed):
            self.fragile(at, moment, die).finish()

    @rule()
    def finish(self):
        summary = self.writer.finish()
        assert summary["missing"] == len(self.writer.missing_shards())

    @rule()
    def restart(self):
        self.writer = create_store(self.root, CORPUS.spec, CORPUS.plan)

    @rule(pick=st.randoms(use_true_random=False), how=st.sampled_from(["flip", "cut", "lose"]))
    def damage(self, pick, how):
        files = self.writer.files
        objects = [p for p in files.list("") if "/c/" in p]
        if not objects:
            return
        path = pick.choice(objects)
        shard = int(path.split("/c/")[1].split("/")[0])
        data = bytearray(files.read(path))
        if not data:  # damaged before
            return
        if how == "flip":
            data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
            files.write(path, bytes(data))
        elif how == "cut":
            files.write(path, bytes(data[: pick.randrange(len(data))]))
        else:
            files.remove(path)
        self.damaged.add(shard)

    @precondition(lambda self: hasattr(self, "damaged"))
    @rule()
    def verify_and_repair(self):
        committed = set(range(self.writer.num_shards)) - set(self.writer.missing_shards())
        bad = verify_store(self.uri)
        assert {b.shard for b in bad} == self.damaged
        assert set(repair(self.uri, bad)) == self.damaged
        assert set(range(self.writer.num_shards)) - set(self.writer.missing_shards()) == committed - self.damaged
        self.damaged = set()
        assert verify_store(self.uri) == []

    @invariant()
    def visible_documents_are_wholly_one_attempts(self):
        if not hasattr(self, "root"):
            return
        store = FeatureStore.open(self.uri, verify="always")
        planned = {r["document"]: r["shard"] for r in CORPUS.plan.to_pylist()}
        for document in store.documents["document"].to_pylist():
            shard = planned[document]
            try:
                f = store.read(document)
            except StoreError:
                assert shard in self.damaged
                continue
            commit = store._commits[shard]
            candidates = {
                v: next(d for d in documents(self.writer, shard, v) if d.document == document) for v in (0, 1)
            }
            variant = next(v for v in (0, 1) if (f.target_logprob_S == candidates[v].target_logprob_S).all())
            assert self.attempts.setdefault((shard, commit.attempt), variant) == variant
            error = (f.hidden_SLD.float() - candidates[variant].hidden_SLD).norm() / candidates[
                variant
            ].hidden_SLD.norm()
            assert error < 0.05


class S3StoreMachine(StoreMachine):
    def new_root(self):
        return f"s3://bucket/{uuid.uuid4().hex[:8]}"


def examples(count):
    return settings(max_examples=count, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = examples(200 if HEAVY else 20)


@pytest.mark.usefixtures("bucket")
class TestS3StoreMachine(S3StoreMachine.TestCase):
    settings = examples(50 if HEAVY else 2)


@pytest.mark.parametrize("moment", ["before", "middle", "after"])
@pytest.mark.parametrize("at", range(1, 12))
def test_death_at_every_step(tmp_path, at, moment):
    """12 operations write a shard of five arrays: five objects, the commit, five moves."""
    create_store(str(tmp_path), CORPUS.spec, CORPUS.plan)
    writer = create_store(str(tmp_path), CORPUS.spec, CORPUS.plan)
    writer.files = FragileFiles(writer.files, at, moment, die)
    for shard in range(writer.num_shards):
        try:
            writer.write_shard(shard, documents(writer, shard, 0))
        except Killed:
            break
    CORPUS.check(FeatureStore.open(writer.uri))
    again = CORPUS.build(tmp_path)
    assert again.missing_shards() == [] and verify_store(again.uri) == []
    assert not list(Path(again.uri).glob("attempts/*"))
    store = FeatureStore.open(again.uri)
    assert store.complete and len(store) == 14
    CORPUS.check(store)


def _work(root, spec, plan, corpus, seed, environment):
    os.environ.update(environment)
    torch.set_num_threads(1)
    writer = create_store(root, spec, plan)
    missing = writer.missing_shards()
    random.Random(seed).shuffle(missing)  # so that two processes meet at the same shard now and then
    for shard in missing:
        writer.write_shard(shard, corpus.of_shard(writer, shard))
    writer.finish()


def kill_at_random_times(root, calm_root, corpus, kills, longest, context):
    """That many SIGKILLs, two writers at a time, each up to `longest` seconds after its start; the store then equals an
    undisturbed one in every document and every byte."""
    undisturbed = corpus.build(calm_root)
    killed, seed, rng, seen = 0, 0, random.Random(0), {}
    uri = create_store(root, corpus.spec, corpus.plan).uri
    environment = {k: v for k, v in os.environ.items() if k.startswith("AWS_")}
    while True:
        workers = [
            context.Process(target=_work, args=(root, corpus.spec, corpus.plan, corpus, seed + i, environment))
            for i in range(2)
        ]
        seed += 2
        for w in workers:
            w.start()
        for w in workers:
            if killed < kills:
                time.sleep(rng.uniform(longest / 12, longest))
                w.kill()  # nothing, if it has ended already
            w.join()
            killed += w.exitcode == -signal.SIGKILL
        writer = StoreWriter(uri)
        for shard in set(range(writer.num_shards)) - set(writer.missing_shards()):
            attempt = read_commit(writer.files, shard).attempt
            assert seen.setdefault(shard, attempt) == attempt, "a committed shard was computed again"
        if not writer.missing_shards():
            if killed >= kills:
                break
            # finished too early: lose a few shards, as `verify --repair` would drop them
            for shard in rng.sample(range(writer.num_shards), writer.num_shards // 2):
                seen.pop(shard)
                writer.files.remove(f"commits/{shard:08d}.json")
            writer.files.remove("manifest.json")
    writer.finish()
    assert verify_store(uri) == []
    assert writer.files.list("attempts") == []
    store, calm = FeatureStore.open(uri, verify="always"), FeatureStore.open(undisturbed.uri)
    assert store.complete and store.documents.equals(calm.documents)
    for row in range(len(store)):
        assert torch.equal(store.read(row).hidden_SLD, calm.read(row).hidden_SLD)
    corpus.check(store)
    objects = [p for p in calm.files.list("") if "/c/" in p]  # not only documents: the very bytes
    assert len(objects) == 4 * store.num_shards
    assert all(writer.files.read(p) == calm.files.read(p) for p in objects)


@pytest.mark.spawn
@pytest.mark.slow
def test_sigkill_at_random_times(tmp_path):
    corpus = Corpus(n=400, max_length=24, shard_tokens=48, hidden_size=8)
    context = multiprocessing.get_context("fork")
    kill_at_random_times(str(tmp_path / "storm"), str(tmp_path / "calm"), corpus, 50, 0.12, context)


@pytest.mark.spawn
@pytest.mark.slow
def test_sigkill_at_random_times_on_s3(bucket, tmp_path):
    """The writers are forked from a process that has never used an object store: its threads do not survive that."""
    corpus = Corpus(n=200 if HEAVY else 24, max_length=24, shard_tokens=48, hidden_size=8)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["features.writer", "store_kit"])
    kills = 50 if HEAVY else 5
    kill_at_random_times(f"{bucket}/storm", str(tmp_path), corpus, kills, 0.9, context)
