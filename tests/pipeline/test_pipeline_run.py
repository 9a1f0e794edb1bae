"""The whole command on a local Ray, and what is left after kills."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from ray_kit import actor_processes, assert_equal_stores, assert_features_are_the_targets, configured, corpus_file

from infra.errors import ResourceError, StoreError
from pipeline.config import RayConfig
from pipeline.documents import build_documents
from pipeline.front import TargetFront
from pipeline.pool import Work, run_until_done, start_ray
from pipeline.run import build_features
from pipeline.summary import text

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def ray_local():
    import ray

    start_ray(RayConfig(num_cpus=2))
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def undisturbed(ray_local, tmp_path_factory):
    """(folder, corpus file, result) of a run with nothing in its way."""
    folder = tmp_path_factory.mktemp("undisturbed")
    corpus = corpus_file(folder)
    return folder, corpus, build_features(configured(folder, corpus))


def test_store_holds_the_targets_features(undisturbed, tiny):
    _, _, result = undisturbed
    assert result.complete and result.counts["computed_shards"] == result.counts["shards"] >= 4
    assert result.counts["stored_documents"] == result.counts["documents"] == 60
    assert_features_are_the_targets(result.store_path, tiny)
    assert "60" in text(result)


def test_regenerated_corpus_and_what_a_second_run_does(ray_local, tmp_path, tiny):
    changes = ["sources.demo.heldout=4", "regenerate.max_new_tokens=10", "regenerate.batch_size=8"]
    changes += ["prefill.shard_tokens=1024", "prefill.storage_dtype=fp32", "target.max_length=320"]
    cfg = configured(tmp_path, "demo", "sources.demo.count=12", *changes)
    first = build_features(cfg)
    assert first.complete and first.answers["answers"] == 16
    assert_features_are_the_targets(first.store_path, tiny)

    def files():
        paths = [p for root in ("store-a", "data-a") for p in (tmp_path / root).rglob("*") if p.is_file()]
        return {str(p): p.stat().st_mtime_ns for p in paths if p.suffix in {".parquet", ".json"} or "/c/" in str(p)}

    before = files()
    second = build_features(cfg)
    assert second.counts["computed_shards"] == 0 and second.throughput is None
    rewritten = {"manifest.json", "rejects.parquet", "features.json", "prefill_rate.json", "zarr.json"}
    assert {p: t for p, t in files().items() if Path(p).name not in rewritten} == {
        p: t for p, t in before.items() if Path(p).name not in rewritten
    }

    larger = configured(tmp_path, "demo", "sources.demo.count=15", *changes)
    documents, _ = build_documents(larger, TargetFront(larger.target))
    assert len(documents) == 19
    parts = sorted((tmp_path / "data-a" / "tiny").glob("responses-*/part-*.parquet"))
    answers = sum(pa.parquet.read_table(p).num_rows for p in parts)
    assert answers == 19, "the larger corpus asks only for its three new prompts"


def test_killed_worker(undisturbed, ray_local):
    folder, corpus, expected = undisturbed
    cfg = configured(folder, corpus, name="worker")
    killed, before = [], actor_processes()

    def kill_one():
        while not killed:
            actors = [pid for pid in actor_processes() if pid not in before]
            while actors and not list(folder.glob("store-worker/tiny/*/commits/*.json")):
                time.sleep(0.005)
            for pid in actors:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    result = build_features(cfg)
    assert killed
    assert_equal_stores(result.store_path, expected.store_path)


class Dies(Work):
    """An actor whose process ends at every task."""

    def run(self, row):
        os._exit(17)


class Refuses(Dies):
    def run(self, row):
        raise StoreError("the store is gone; bring it back")


def test_crash_looping_actor_ends_the_job_with_its_reason(ray_local):
    ray_local.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    rows = [pa.table({"x": [i]}) for i in range(2)]
    with pytest.raises(ResourceError, match="died again and again"):
        list(run_until_done(lambda: rows, Dies, {}, RayConfig(actors=1, max_failures=0)))
    with pytest.raises(StoreError, match="bring it back"):
        list(run_until_done(lambda: rows, Refuses, {}, RayConfig(actors=1)))


@pytest.mark.spawn
def test_killed_driver(undisturbed):
    folder, corpus, expected = undisturbed
    cfg = configured(folder, corpus, name="driver")
    command = [sys.executable, "-m", "pipeline", "--model", "tiny", "--corpus", corpus]
    command += [f"store_root={cfg.store_root}", f"data_root={cfg.data_root}", "ray.num_cpus=1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 200
    while not list(folder.glob("store-driver/tiny/*/commits/*.json")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read().decode()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    committed = len(list(folder.glob("store-driver/tiny/*/commits/*.json")))
    result = build_features(cfg)
    # the orphaned actor may have committed one more before it noticed
    assert (
        result.counts["shards"] - committed - 2
        <= result.counts["computed_shards"]
        <= result.counts["shards"] - committed
    )
    assert_equal_stores(result.store_path, expected.store_path)
