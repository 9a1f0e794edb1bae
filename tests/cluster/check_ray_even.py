"""Two hosts of one CPU write features as fast as one host of two CPUs, and share the work evenly.
Then DeepSpeed under Ray Train on both, as KubeRay runs it: one dies, Ray starts the ranks again, losses continue.
Then an evaluation as a Ray job, and the commands that show, follow and stop a job."""

import json

from hosts import say, wait_for
from small import RECIPE, corpus, records, trainer, write_store

WORKERS = {"a": 1, "b": 1, "c": 2}
ROWS, SHARD, ROUNDS = 1600, 1024, 2
CLOCK = 0.02  # two runs of the same arrangement differ by so much on a quiet machine


def test_two_hosts_are_as_fast_as_one_and_even(cluster, folder):
    """The same job on a and b with one CPU each, and on c with two; what is not used has its CPUs taken and idles."""
    hosts = cluster.hosts
    corpus(folder, ROWS, shard_tokens=SHARD)
    rates, shares = {"two": [], "one": []}, []

    def run(hosts_used: str, others: tuple[str, ...]) -> None:
        job = f"{hosts_used}-{len(rates[hosts_used])}"
        with cluster.held(*others):
            sent = cluster.features(job, f"data_root=data-{job}", f"store_root=s3://bucket/{job}")
            wait_for(lambda: sent.poll() is not None, 400, job, 0.5, report=lambda: hosts.log(job)[-2000:])
        assert sent.returncode == 0, hosts.log(job)[-3000:]
        result = cluster.result(f"data-{job}")
        rates[hosts_used].append(result["throughput"])
        tokens = sorted(result["tokens_by_node"].values())
        assert result["complete"] and len(tokens) == {"two": 2, "one": 1}[hosts_used]
        if hosts_used == "two":
            shares.append(tokens)

    for round_ in range(ROUNDS):  # two, one, one, two: a machine that becomes slower meanwhile is slower for both
        arrangements = [("two", ("c",)), ("one", ("a", "b"))]
        for arrangement in arrangements[:: -1 if round_ % 2 else 1]:
            run(*arrangement)
        if max(rates["two"]) >= max(rates["one"]):
            break
    noise = max(CLOCK, *(max(r) / min(r) - 1 for r in rates.values()))
    ratio = max(rates["two"]) / max(rates["one"])
    uneven = max(2 * max(s) / sum(s) - 1 for s in shares)
    show = {k: " and ".join(f"{x:,.0f}" for x in v) for k, v in rates.items()}
    say(
        f"ray: two hosts of one CPU {show['two']} tokens/s, one host of two CPUs {show['one']} tokens/s: {ratio:.2f} x "
        f"(the same arrangement again differs by up to {noise:.0%}); tokens per host {shares[0]} (±{uneven:.1%})"
    )
    assert uneven <= 0.10
    assert ratio >= 1.0 - noise


def test_ray_train_goes_on_after_a_host_died(cluster, folder):
    hosts, steps = cluster.hosts, 120
    if "c" in hosts.inits:
        hosts.kill("c")  # both ranks would fit there
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


def test_status_logs_and_stop_of_an_evaluation(cluster, folder):
    """`eval`, and the three verbs, by the commands of docs/clusters/ray.md."""
    hosts = cluster.hosts
    store = next((folder / "store" / "tiny").iterdir())
    words = ("DRAFTER=runs/whole", "LIMIT=2", 'suites=["heldout"]', f"store={store}")

    def submit(job: str, *more: str) -> None:
        sent = cluster.submit("eval", job, "--no-wait", *words, *more)
        wait_for(lambda: sent.poll() is not None, 60, "the submission", report=lambda: hosts.log(job))
        assert sent.returncode == 0, hosts.log(job)[-2000:]

    submit("evaluated", "max_new_tokens=16", "out=runs/e")
    log = cluster.control("logs", "evaluated")  # until the job has ended
    assert "SUCCEEDED" in cluster.control("status", "evaluated").upper(), log[-3000:]
    report = json.loads((folder / "runs" / "e" / "report.json").read_text())
    lossless = report["suites"]["heldout"]["lossless"]
    assert "written to" in log and lossless["checked"] == lossless["identical"] > 2
    submit("stopped", "max_new_tokens=2000", "out=runs/stopped")
    cluster.control("stop", "stopped")
    wait_for(lambda: "STOPPED" in cluster.control("status", "stopped").upper(), 60, "the stop", 1)
    assert not (folder / "runs" / "stopped" / "report.json").exists()
    say("ray: an evaluation was submitted, followed and found lossless; another one was stopped")
