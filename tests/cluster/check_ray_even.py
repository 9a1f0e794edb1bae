"""Two hosts of one CPU write features as fast as one host of two CPUs, and share the work evenly."""

import sys

import pytest
from hosts import say, wait_for
from ray_hosts import NAMES, RayHosts
from small import corpus

ROWS, SHARD = 2400, 1024


@pytest.fixture(scope="module")
def cluster(make_hosts, folder):
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    with make_hosts(NAMES) as hosts:
        ray = RayHosts(hosts, folder)
        ray.start()
        yield ray


def test_two_hosts_are_as_fast_as_one_and_even(cluster, folder):
    hosts = cluster.hosts
    corpus(folder, ROWS, shard_tokens=SHARD)
    two = cluster.submit("two", "two", "data_root=data-two", "store_root=s3://bucket/two")
    wait_for(lambda: two.poll() is not None, 150, f"two hosts: {hosts.log('two')[-2000:]}", 0.5)
    assert two.returncode == 0, hosts.log("two")[-3000:]
    alone = [sys.executable, "-m", "pipeline", "--model", "tiny", "--corpus", str(folder / "kept.toml")]
    alone += ["ray.address=local", "ray.num_cpus=2", "ray.actors=2", "ray.cpus_per_actor=1"]
    alone += ["data_root=data-one", "store_root=s3://bucket/one"]
    one = hosts.start("a", alone, "one", **cluster.cluster | {"RAY_AUTH_MODE": "disabled"})
    wait_for(lambda: one.poll() is not None, 150, f"one host: {hosts.log('one')[-2000:]}", 0.5)
    assert one.returncode == 0, hosts.log("one")[-3000:]
    a, b = cluster.result("data-two"), cluster.result("data-one")
    ratio = a["throughput"] / b["throughput"]
    share = sorted(a["tokens_by_node"].values())
    uneven = max(share) / (sum(share) / len(share)) - 1
    say(
        f"ray: two hosts {a['throughput']:,.0f} tokens/s, one host with as many CPUs {b['throughput']:,.0f} tokens/s: "
        f"{ratio:.2f} x; tokens per host {share} (±{uneven:.1%})"
    )
    assert len(share) == 2 and uneven <= 0.10
    assert ratio >= 1.0
