"""DeepSpeed on two hosts through torchrun's rendezvous: one crashes, later the other loses its power, the one that is
left goes on alone, and the losses are those of an undisturbed run.
Then two trainings at once log to one MLflow server with PostgreSQL behind it."""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from hosts import say, wait_for
from small import records, trainer, write_store

from trainer.machines import LOST

STEPS, PEER_TIMEOUT_S = 48, 15
READ = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient("http://db:5000")
experiment = client.get_experiment_by_name("flashdraft").experiment_id
out = {}
for run in client.search_runs([experiment], max_results=100):
    if run.data.tags.get("stage") == "sft":
        points = client.get_metric_history(run.info.run_id, "train/loss")
        out[run.data.tags["drafter"]] = [run.info.status, sorted(p.step for p in points)]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def hosts(make_hosts):
    with make_hosts(["a", "b", "db"]) as made:
        yield made


@pytest.fixture(scope="module")
def store(hosts, folder):
    return write_store(hosts, "a", folder)


def test_hosts_crash_and_lose_power_and_the_last_one_goes_on(hosts, store, folder):
    steps = f"train.steps={STEPS}"
    # the torn run saves after every step: slow enough to be killed in the middle
    torn = trainer(store, steps, "name=torn", "train.save_every=1")
    together = [*torn, "--nodes", "2", "--rendezvous", "a:29500", "--peer-timeout", str(PEER_TIMEOUT_S)]
    run = folder / "runs" / "torn"
    own = f"sqlite:///{folder}/undisturbed.db"  # both runs at once in one SQLite file would wait for one another
    whole = hosts.start("db", trainer(store, steps, "name=undisturbed"), "undisturbed", MLFLOW_TRACKING_URI=own)

    def both_reach(n: int, log: str):
        ranks = {name: hosts.start(name, together, f"{log}-{name}") for name in ("a", "b")}
        report = lambda: "\n".join(hosts.log(f"{log}-{name}")[-1500:] for name in ranks)  # noqa: E731
        over = lambda: any(p.poll() is not None for p in ranks.values())  # noqa: E731
        wait_for(lambda: len(records(run)) >= n or over(), 240, f"step {n} on two hosts", 0.1, report=report)
        assert not over(), report()
        return ranks

    def ended(process, log: str, seconds: float) -> float:
        began = time.monotonic()
        wait_for(lambda: process.poll() is not None, seconds, "the other host to notice", 0.2, lambda: hosts.log(log))
        return time.monotonic() - began

    ranks = both_reach(5, "first")
    hosts.kill("b")
    seconds = ended(ranks["a"], "first-a", 60)
    crashed = saved(run)
    say(f"deepspeed: host b of two crashed; host a ended {seconds:.0f} s later, step {crashed} is saved")
    assert ranks["a"].returncode not in (0, 2), hosts.log("first-a")[-3000:]

    hosts.boot("b")
    ranks = both_reach(crashed + 5, "second")
    hosts.cut("a")  # first, so that not one connection is closed; and a holds the rendezvous
    hosts.kill("a")
    seconds = ended(ranks["b"], "second-b", PEER_TIMEOUT_S + 60)
    dark = saved(run)
    assert ranks["b"].returncode == LOST and "no sign of life from a" in hosts.log("second-b"), hosts.log("second-b")
    say(f"deepspeed: both went on from step {crashed}; host a lost its power; b ended {seconds:.0f} s later, at {dark}")
    assert crashed < dark < STEPS

    alone = hosts.run("b", torn)
    assert alone.returncode == 0, alone.stderr[-3000:]
    for log, at in ((hosts.log("second-b") + hosts.log("second-a"), crashed), (alone.stdout + alone.stderr, dark)):
        assert f"resuming at step {at} of {STEPS}" in log
    wait_for(lambda: whole.poll() is not None, 120, "the undisturbed run")
    assert whole.returncode == 0, hosts.log("undisturbed")[-3000:]
    expected, found = records(folder / "runs" / "undisturbed"), records(run)
    assert sorted(found) == sorted(expected) == list(range(STEPS))
    worst = max(abs(found[s] - expected[s]) / abs(expected[s]) for s in expected)
    say(
        f"deepspeed: host b alone went on from step {dark}; all {STEPS} losses are those of the undisturbed run "
        f"(largest relative difference {worst:.1e}), the last {found[STEPS - 1]:.4f}"
    )
    assert worst < 1e-3


def saved(run: Path) -> int:
    """Step of the run's last checkpoint."""
    return int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))


def test_deepspeeds_own_launcher(hosts, store, folder):
    """The last command of docs/clusters/slurm.md, started on each host by hand where it would use ssh."""
    up(hosts, "a", "b")
    recipe = (folder / "runs" / "undisturbed" / "config.toml").read_text()
    recipe = re.sub(r'^name = ".*"', 'name = "launched"', recipe, flags=re.M)
    (folder / "launched.toml").write_text(re.sub(r"^steps = \d+", "steps = 4", recipe, flags=re.M))
    (folder / "hostfile").write_text("a slots=1\nb slots=1\n")
    command = ["deepspeed", "--hostfile", "hostfile", "--no_local_rank"]
    command += ["--no_ssh", "--master_addr", "a"]
    for rank, name in enumerate(("a", "b")):
        ranks = [*command, "--node_rank", str(rank), "--module", "trainer.sft", "launched.toml"]
        last = hosts.start(name, ranks, f"launched-{name}")
    wait_for(lambda: last.poll() is not None, 240, "four steps", report=lambda: hosts.log("launched-a")[-2000:])
    assert last.returncode == 0, hosts.log("launched-b")[-3000:]
    expected, found = records(folder / "runs" / "undisturbed"), records(folder / "runs" / "launched")
    assert sorted(found) == [0, 1, 2, 3] and "2 ranks" in hosts.log("launched-a"), hosts.log("launched-a")[-3000:]
    assert abs(found[0] - expected[0]) / expected[0] < 1e-5  # later steps have another learning rate
    say("deepspeed: its own launcher trained on both hosts")


def up(hosts, *names: str) -> None:
    """The hosts that were killed are on again."""
    for name in names:
        if name not in hosts.inits:
            hosts.boot(name)


def test_two_hosts_log_to_mlflow_on_postgresql(hosts, store, folder):
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin")) if Path("/usr/lib/postgresql").is_dir() else []
    if not programs or not shutil.which("setpriv"):
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    pytest.importorskip("psycopg2", reason="psycopg2-binary is not installed")
    names = {"a": "from-a", "b": "from-b"}
    up(hosts, *names)
    data = folder / "pg"
    data.mkdir(mode=0o700)
    shutil.chown(data, "postgres", "postgres")
    for parent in (folder, *folder.parents):  # the server's user must reach its folder
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    initdb = [*user, f"{programs[-1]}/initdb", "-D", str(data), "--auth=trust", "--username=mlflow"]
    made = hosts.run("db", [*initdb, "--encoding=UTF8", "--locale=C"])
    assert made.returncode == 0, made.stderr
    server = [*user, f"{programs[-1]}/postgres", "-D", str(data), "-c", "listen_addresses=127.0.0.1"]
    hosts.start("db", [*server, "-c", f"unix_socket_directories={data}"], "postgres")
    ready = [f"{programs[-1]}/pg_isready", "-h", "127.0.0.1"]
    wait_for(lambda: hosts.run("db", ready).returncode == 0, 30, "PostgreSQL")
    mlflow = [sys.executable, "-m", "mlflow", "server", "--host", "0.0.0.0", "--port", "5000", "--workers", "1"]
    mlflow += ["--allowed-hosts", "db:5000", "--backend-store-uri", "postgresql+psycopg2://mlflow@127.0.0.1/postgres"]
    tracking = hosts.start("db", [*mlflow, "--artifacts-destination", str(folder / "artifacts")], "mlflow")
    ping = "import urllib.request as u; u.urlopen('http://db:5000/health', timeout=5)"
    answers = lambda: tracking.poll() is not None or hosts.run("a", [sys.executable, "-c", ping]).returncode == 0  # noqa: E731
    wait_for(answers, 240, "MLflow", 1, report=lambda: hosts.log("mlflow")[-1500:])
    assert tracking.poll() is None, hosts.log("mlflow")[-1500:]
    runs = {
        host: hosts.start(
            host, trainer(store, "train.steps=40", f"name={name}"), name, MLFLOW_TRACKING_URI="http://db:5000"
        )
        for host, name in names.items()
    }
    for host, process in runs.items():
        wait_for(lambda p=process: p.poll() is not None, 300, f"training on {host}", 0.5)
        assert process.returncode == 0, hosts.log(names[host])[-3000:]
    found = json.loads(hosts.python("a", READ))
    assert found == {name: ["FINISHED", list(range(4, 41, 4))] for name in names.values()}, found
    say(f"mlflow: two trainings at once on hosts a and b, every point of both is in PostgreSQL: {found}")
