"""Two hosts of one CPU write features as fast as one host of two CPUs, and share the work evenly.
Then DeepSpeed under Ray Train on both, as KubeRay runs it: one dies, Ray starts the ranks again, losses continue."""

import sys

from hosts import say, wait_for
from small import RECIPE, corpus, records, trainer, write_store

ROWS, SHARD = 2400, 1024


def test_two_hosts_are_as_fast_as_one_and_even(cluster, folder):
    hosts = cluster.hosts
    corpus(folder, ROWS, shard_tokens=SHARD)
    two = cluster.features("two", "data_root=data-two", "store_root=s3://bucket/two")
    wait_for(lambda: two.poll() is not None, 300, f"two hosts: {hosts.log('two')[-2000:]}", 0.5)
    assert two.returncode == 0, hosts.log("two")[-3000:]
    alone = [sys.executable, "-m", "pipeline", "--model", "tiny", "--corpus", str(folder / "kept.toml")]
    alone += ["ray.address=local", "ray.num_cpus=2", "ray.actors=2", "ray.cpus_per_actor=1"]
    alone += ["data_root=data-one", "store_root=s3://bucket/one"]
    one = hosts.start("a", alone, "one", **cluster.cluster | {"RAY_AUTH_MODE": "disabled"})
    wait_for(lambda: one.poll() is not None, 300, f"one host: {hosts.log('one')[-2000:]}", 0.5)
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


def test_ray_train_goes_on_after_a_host_died(cluster, folder):
    hosts, steps = cluster.hosts, 300
    store = write_store(hosts, "a", folder)
    whole = hosts.run("a", trainer(store, f"train.steps={steps}", "name=whole", nproc=2))
    assert whole.returncode == 0, whole.stderr[-3000:]
    job = cluster.submit(
        "train", "torn", "RECIPE=sft-fast", *RECIPE, f"data.store={store}", f"train.steps={steps}", "name=torn"
    )
    run = folder / "runs" / "torn"
    report = lambda: hosts.log("torn")[-3000:]  # noqa: E731
    wait_for(lambda: len(records(run)) >= 20 or job.poll() is not None, 240, "steps", report=report)
    hosts.kill("b")
    at = len(records(run))
    say(f"ray train: killed host b of two after {at} of {steps} steps; it is replaced")
    assert at < steps and job.poll() is None, report()
    hosts.boot("b")
    cluster.start_worker("b")
    wait_for(lambda: job.poll() is not None, 400, "the end of the training", 0.5, report=report)
    assert job.returncode == 0 and "resuming at step" in hosts.log("torn"), report()
    expected, found = records(folder / "runs" / "whole"), records(run)
    assert sorted(found) == sorted(expected) == list(range(steps))
    worst = max(abs(found[s] - expected[s]) / abs(expected[s]) for s in expected)
    say(f"ray train: went on by itself; all {steps} losses are those of torchrun undisturbed (to {worst:.0e})")
    assert worst < 1e-3
