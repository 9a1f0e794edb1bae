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
from ray_kit import actor_processes, assert_equal_stores, assert_features_are_the_targets, configured, serially

from infra.errors import ResourceError, StoreError
from pipeline.config import RayConfig
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


CHANGES = [
    *("sources.demo.count=28", "sources.demo.heldout=4", "target.max_length=320"),
    *("regenerate.max_new_tokens=10", "regenerate.batch_size=8"),  # 32 prompts: two tasks
    *("prefill.shard_tokens=512", "prefill.storage_dtype=fp32", "prefill.batch_tokens=600"),
]


@pytest.mark.spawn
def test_whatever_is_killed_the_store_is_the_undisturbed_one(ray_local, tmp_path, tiny):
    """A driver while the target writes answers, the next driver while features are computed, then a worker.

    Undisturbed is a run without Ray: serial and parallel writers give the same bytes.
    """
    changes = [
        *("sources.demo.count=28", "sources.demo.heldout=4", "target.max_length=320"),
        *("regenerate.max_new_tokens=10", "regenerate.batch_size=8"),  # 32 prompts: two tasks
        *("prefill.shard_tokens=512", "prefill.storage_dtype=fp32", "prefill.batch_tokens=600"),
        *("ray.actors=1", "ray.cpus_per_actor=1"),
    ]
    expected = serially(configured(tmp_path, "demo", *changes, name="calm"), tiny)
    shards = len(list(Path(expected).glob("commits/*.json")))
    assert shards >= 8

    cfg = configured(tmp_path, "demo", *changes)
    address = ray_local.get_runtime_context().gcs_address  # a Ray of its own would start for some 10 s
    command = [sys.executable, "-m", "pipeline", "--model", "tiny", "--corpus", "demo", *changes]
    command += [f"store_root={cfg.store_root}", f"data_root={cfg.data_root}", f"ray.address={address}"]
    parts, commits = "data-a/tiny/responses-*/part-*.parquet", "store-a/tiny/*/commits/*.json"

    def run_until(pattern):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        deadline = time.monotonic() + 200
        while not list(tmp_path.glob(pattern)):
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read().decode()
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    run_until(parts)
    # one of the two tasks; both, where the machine is so busy that the kill comes late
    answered = {p: p.stat().st_mtime_ns for p in tmp_path.glob(parts)}
    assert not list(tmp_path.glob("data-a/tiny/*/documents.json"))
    run_until(commits)
    time.sleep(0.5)  # the orphaned actor may commit one more before it notices
    committed = {p: p.stat().st_mtime_ns for p in tmp_path.glob(commits)}
    assert 1 <= len(committed) < shards

    killed, before = [], actor_processes()

    def kill_one():
        while not killed:
            time.sleep(0.005)
            if len(list(tmp_path.glob(commits))) > len(committed):
                for pid in set(actor_processes()) - set(before):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    threading.Thread(target=kill_one, daemon=True).start()
    result = build_features(cfg)
    assert killed and result.complete and result.counts["computed_shards"] == shards - len(committed)
    assert {p: p.stat().st_mtime_ns for p in committed} == committed, "a committed shard is computed once"
    assert {p: p.stat().st_mtime_ns for p in answered} == answered, "the answers of a finished task are asked for once"
    assert result.counts["stored_documents"] == result.answers["answers"] == 32 and "32" in text(result)
    assert_equal_stores(result.store_path, expected)
    assert_features_are_the_targets(result.store_path, tiny)

    def files():
        paths = [p for root in ("store-a", "data-a") for p in (tmp_path / root).rglob("*") if p.is_file()]
        rewritten = {"manifest.json", "rejects.parquet", "features.json", "prefill_rate.json", "zarr.json"}
        return {p: p.stat().st_mtime_ns for p in paths if p.name not in rewritten}

    done = files()
    second = build_features(cfg)
    assert second.counts["computed_shards"] == 0 and second.throughput is None and files() == done


class Dies(Work):
    """An actor whose process ends at every task; without torch, whose import takes seconds."""

    def __init__(self, threads, cwd):
        pass

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
