"""DeepSpeed on two hosts through torchrun's rendezvous: one dies, the other goes on alone, the losses continue.
Then two trainings at once log to one MLflow server with PostgreSQL behind it."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from hosts import say, wait_for
from small import records, trainer, write_store

STEPS = 48
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


def test_one_of_two_hosts_dies_and_the_other_goes_on(hosts, store, folder):
    together = ("--nodes", "2", "--rendezvous", "a:29500")
    steps = f"train.steps={STEPS}"
    whole = hosts.run("a", trainer(store, steps, "name=undisturbed"))
    assert whole.returncode == 0, whole.stderr[-3000:]
    # the first part runs slowly enough to be killed in the middle: a step is saved and replayed each time
    slow = [*trainer(store, steps, "name=torn", "train.save_every=1", options=together)]
    ranks = [hosts.start(n, slow, f"rank-{n}") for n in ("a", "b")]
    run = folder / "runs" / "torn"
    wait_for(lambda: len(records(run)) >= 6 or ranks[0].poll() is not None, 240, "steps on two hosts", 0.1)
    hosts.kill("b")
    wait_for(lambda: ranks[0].poll() is not None, 90, f"host a to notice: {hosts.log('rank-a')[-2000:]}", 0.2)
    assert ranks[0].returncode != 0, hosts.log("rank-a")[-3000:]
    reached = int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    say(f"deepspeed: killed host b of two; host a ended with code {ranks[0].returncode}, step {reached} is saved")
    assert 0 < reached < STEPS
    alone = hosts.run("a", trainer(store, steps, "name=torn"))
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert f"resuming at step {reached} of {STEPS}" in alone.stdout + alone.stderr
    expected, found = records(folder / "runs" / "undisturbed"), records(run)
    assert sorted(found) == sorted(expected) == list(range(STEPS))
    worst = max(abs(found[s] - expected[s]) / abs(expected[s]) for s in expected)
    say(
        f"deepspeed: host a alone went on from step {reached}; all {STEPS} losses are those of the undisturbed run "
        f"(largest relative difference {worst:.1e}), the last {found[STEPS - 1]:.4f}"
    )
    assert worst < 1e-3


def test_two_hosts_log_to_mlflow_on_postgresql(hosts, store, folder):
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin")) if Path("/usr/lib/postgresql").is_dir() else []
    if not programs or not shutil.which("setpriv"):
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    pytest.importorskip("psycopg2", reason="psycopg2-binary is not installed")
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
    mlflow += ["--allowed-hosts", "db:5000", "--backend-store-uri", "postgresql://mlflow@127.0.0.1/postgres"]
    hosts.start("db", [*mlflow, "--artifacts-destination", str(folder / "artifacts")], "mlflow")
    ping = "import urllib.request as u; u.urlopen('http://db:5000/health', timeout=5)"
    up = lambda: hosts.run("a", [sys.executable, "-c", ping]).returncode == 0  # noqa: E731
    wait_for(up, 240, "MLflow", 1, report=lambda: hosts.log("mlflow")[-1500:])
    names = {"a": "from-a", "b": "from-b"}
    if "b" not in hosts.inits:
        hosts.boot("b")
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
