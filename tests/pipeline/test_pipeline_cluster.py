"""The same call on a cluster of two nodes, with corpus and store on S3."""

import logging
import os
import urllib.request

import pytest
from ray_kit import assert_features_are_the_targets, configured, corpus_file

from pipeline.run import build_features

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
        put(f"http://{host}:{port}/bucket")
        yield f"http://{host}:{port}/bucket"
    server.stop()


def put(url, data=b""):
    kind = {"Content-Type": "application/octet-stream"}  # the default is a form, of which moto keeps no body
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", data=data, headers=kind))


@pytest.fixture(scope="module")
def cluster(bucket):
    """Two nodes of one CPU; started after the bucket, whose address the nodes inherit."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    made = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
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
