"""The same call on a cluster of two nodes, with corpus and store on S3, and from outside through Ray Client."""

import logging
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from ray_kit import assert_equal_stores, assert_features_are_the_targets, configured, corpus_file

from pipeline.run import build_features

ROOT = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.ray, pytest.mark.slow]
moto_server = pytest.importorskip("moto.server", reason="moto[server] is not installed")


@pytest.fixture(scope="module")
def bucket():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")  # see `pipeline.client._connect`
        put(f"http://{host}:{port}/bucket")
        yield f"http://{host}:{port}/bucket"
    server.stop()


def put(url, data=b""):
    kind = {"Content-Type": "application/octet-stream"}  # the default is a form, of which moto keeps no body
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", data=data, headers=kind))


@pytest.fixture(scope="module")
def client_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(bucket, client_port):
    """Two nodes of one CPU; started after the bucket, whose address the nodes inherit."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    head = node | {"include_dashboard": False, "ray_client_server_port": client_port}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(**node)
    yield made.address
    ray.shutdown()
    made.shutdown()


def test_two_nodes_share_the_shards_of_a_store_on_s3(cluster, bucket, tmp_path, tiny):
    corpus = corpus_file(tmp_path, rows=80)
    put(f"{bucket}/corpora/kept.jsonl", (tmp_path / "kept.jsonl").read_bytes())
    overrides = ['sources.kept.paths=["s3://bucket/corpora/kept.jsonl"]', "store_root=s3://bucket/store"]
    overrides += [f"ray.address={cluster}", "ray.actors=2", "ray.cpus_per_actor=1"]
    cfg = configured(tmp_path, corpus, *overrides)
    result = build_features(cfg)
    assert result.complete and result.counts["computed_shards"] == result.counts["shards"] >= 8
    assert result.store_path.startswith("s3://bucket/store/tiny/")
    assert result.counts["stored_documents"] == 80
    tokens = sorted(result.tokens_by_node.values())
    assert len(tokens) == 2 and tokens[0] > 0.25 * sum(tokens), tokens
    assert_features_are_the_targets(result.store_path, tiny)
    assert build_features(cfg).counts["computed_shards"] == 0


def test_from_outside_through_ray_client(cluster, client_port, tmp_path):
    """The driver runs on the cluster; summary and errors come back, and the store is the same."""
    corpus = corpus_file(tmp_path, rows=40)
    here = build_features(configured(tmp_path, corpus, f"ray.address={cluster}", "ray.cpus_per_actor=1", name="here"))

    def outside(*more):
        settings = [f"ray.address=ray://127.0.0.1:{client_port}", "ray.actors=1", "ray.cpus_per_actor=1", *more]
        command = [sys.executable, "-m", "pipeline", "--model", "tiny", "--corpus", corpus, *settings]
        env = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)

    done = outside("store_root=outside", "data_root=data")
    assert done.returncode == 0, done.stderr
    assert "documents    40" in done.stdout
    (there,) = (tmp_path / "outside" / "tiny").iterdir()
    assert_equal_stores(str(there), here.store_path)
    again = outside("store_root=outside", "data_root=data")
    assert again.returncode == 0 and "nothing to compute" in again.stdout, again.stderr
    refused = outside("store_root=outside", "data_root=data", f'sources.kept.paths=["{tmp_path}/absent.jsonl"]')
    assert refused.returncode == 2 and "absent.jsonl" in refused.stderr.splitlines()[-1], refused.stderr
