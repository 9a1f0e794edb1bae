"""A real Slurm of two nodes: the rendered scripts run, stop for a preemption, are requeued and go on."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from hosts import ROOT, say, wait_for
from small import RECIPE, records, write_store

CONF = """
ClusterName=flashdraft
SlurmctldHost=a
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
KillWait=20
SlurmdParameters=config_overrides
NodeName=a,b CPUs=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(make_hosts, folder):
    lacking = [p for p in ("slurmctld", "slurmd", "munged", "sbatch", "srun") if not shutil.which(p)]
    if lacking:
        pytest.skip(f"Slurm is not installed ({', '.join(lacking)}): apt-get install slurm-wlm munge")
    with make_hosts(["a", "b"]) as hosts:
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        for name in ("state", "spool-a", "spool-b", "logs"):
            (folder / name).mkdir()
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # named, so that it looks for none
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        folder.chmod(0o755)
        hosts.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        # one munged per host, as on a cluster; the folder is shared, so each has its own socket and pid file
        for name in ("a", "b"):
            conf = folder / f"slurm-{name}.conf"
            conf.write_text(CONF.format(folder=folder).replace("munge.sock", f"munge-{name}.sock"))
            munge = ["munged", "--force", "--foreground", f"--key-file={folder}/munge.key"]
            munge += [f"--socket={folder}/munge-{name}.sock", f"--pid-file={folder}/munge-{name}.pid"]
            munge += [f"--log-file={folder}/munge-{name}.log", f"--seed-file={folder}/munge-{name}.seed"]
            hosts.start(name, munge, f"munged-{name}")
            wait_for((folder / f"munge-{name}.sock").exists, 20, "munge")
        run = lambda name, *command: hosts.run(name, list(command), SLURM_CONF=str(folder / f"slurm-{name}.conf"))  # noqa: E731
        hosts.start("a", ["slurmctld", "-D"], "ctld", SLURM_CONF=str(folder / "slurm-a.conf"))
        for name in ("a", "b"):
            conf = str(folder / f"slurm-{name}.conf")
            hosts.start(name, ["slurmd", "-D", "-N", name], f"slurmd-out-{name}", SLURM_CONF=conf)
        report = lambda: "".join(hosts.log(f"slurmd-out-{n}")[-500:] for n in ("a", "b"))  # noqa: E731
        wait_for(
            lambda: run("a", "sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == "2",
            60,
            "two idle nodes",
            report=report,
        )
        profile = folder / "slurm.toml"
        profile.write_text(
            f'platform = "slurm"\ncode = "{ROOT}"\nworkdir = "{folder}"\npython = "{sys.executable}"\n'
            'nodes = 2\ngpus_per_node = 0\ncpus_per_node = 1\ntime = "0:20:00"\n'
            "[env]\nOMP_NUM_THREADS = \"1\"\nGLOO_SOCKET_IFNAME = \"eth0\"\nHF_HUB_OFFLINE = \"1\"\n"
            f'SLURM_CONF = "{folder}/slurm-a.conf"\n'
        )  # fmt: skip
        yield hosts, run


@pytest.fixture(scope="module")
def store(slurm, folder):
    return write_store(slurm[0], "a", folder)


def submit(run, what: str, *words: str) -> str:
    done = run("a", sys.executable, "-m", "infra", "submit", what, "--on", "slurm", "--profile", "slurm.toml", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ended(run, job: str) -> bool:
    return not run("a", "squeue", "-h", "-j", job).stdout.strip()


def state(run, job: str) -> str:
    shown = run("a", "scontrol", "show", "job", job).stdout
    return next((w.partition("=")[2] for w in shown.split() if w.startswith("JobState=")), "gone")


def test_training_is_stopped_requeued_and_goes_on(slurm, store, folder):
    _hosts, run = slurm
    job = submit(
        run, "train", "MODEL=tiny", "RECIPE=sft-fast", *RECIPE, f"data.store={store}", "train.steps=400", "name=s"
    )
    log = folder / "logs" / f"{job}.log"
    metrics = folder / "runs" / "s"
    wait_for(lambda: len(records(metrics)) >= 8, 240, f"steps of job {job}", 0.5, report=lambda: tail(log))
    the_commands_of_the_docs(run, job)
    run("a", "scancel", "--signal=TERM", "--batch", job)
    wait_for(
        lambda: "saved; the same command goes on" in log.read_text(),
        60,
        f"the stop of job {job}",
        report=lambda: tail(log),
    )
    at = max(records(metrics)) + 1
    say(f"slurm: job {job} on 2 nodes was told to stop (preemption) and saved at step {at} of 400")
    wait_for(lambda: "resuming at step" in log.read_text(), 240, f"the requeued job {job}", 1, report=lambda: tail(log))
    wait_for(lambda: ended(run, job), 300, f"the end of job {job}", 1, report=lambda: tail(log))
    assert sorted(records(metrics)) == list(range(400)), tail(log)
    assert (metrics / "drafter" / "model.safetensors").is_file()
    assert f"resuming at step {at} of 400" in log.read_text() and state(run, job) == "COMPLETED"
    say(f"slurm: requeued, resumed at step {at}, all 400 steps are there, job {state(run, job)}")


def the_commands_of_the_docs(run, running: str) -> None:
    """docs/clusters/slurm.md: test, status, logs and stop, while a job has both nodes."""
    infra = [sys.executable, "-m", "infra", "submit"]
    profile = ["--on", "slurm", "--profile", "slurm.toml"]
    dry = shlex.join([*infra, "train", *profile, "MODEL=tiny", "--dry-run"])
    tested = run("a", "bash", "-o", "pipefail", "-c", f"{dry} | sed '1s/--parsable/--test-only/' | bash")
    assert tested.returncode == 0 and "to start at" in tested.stderr, tested.stderr
    assert running in run("a", *infra, "status", *profile, running).stdout
    followed = run("a", "timeout", "10", *infra, "logs", *profile, running)
    assert followed.returncode == 124 and "400 steps" in followed.stdout, followed.stdout + followed.stderr
    waiting = submit(run, "train", "MODEL=tiny")
    assert state(run, waiting) == "PENDING"
    assert run("a", *infra, "stop", *profile, waiting).returncode == 0
    assert state(run, waiting) == "CANCELLED"
    say("slurm: a script was tested without running it; status, logs and stop of jobs work")


def test_an_array_job_trains_every_setting(slurm, store, folder):
    _hosts, run = slurm
    words = ["MODEL=tiny", "RECIPE=sft-fast", *RECIPE, f"data.store={store}", "train.steps=8"]
    job = submit(run, "train", *words, "--sweep", "loss.weighting=decay,dpace")
    wait_for(lambda: ended(run, job), 300, "the array", 1)
    for name in ("tiny-decay", "tiny-dpace"):
        assert sorted(records(folder / "runs" / name)) == list(range(8)), tail(folder / "logs" / f"{job}_0.log")
    say(f"slurm: array job {job} trained two settings side by side")


def test_features_run_under_symmetric_run(slurm, store, folder):
    _hosts, run = slurm
    job = submit(run, "features", "MODEL=tiny", "CORPUS=kept.toml", "store_root=store-slurm", "data_root=data-slurm")
    log = folder / "logs" / f"{job}.log"
    wait_for(lambda: ended(run, job), 400, f"job {job}", 1, report=lambda: tail(log))
    made = list(folder.glob("store-slurm/tiny/*/manifest.json"))
    assert len(made) == 1 and made[0].parent.name == Path(store).name, tail(log, 3000)
    assert not list((folder / "logs").glob("*.token")), "the token outlives the job"
    assert state(run, job) == "COMPLETED", tail(log, 3000)
    say(f"slurm: features job {job} made its store on two nodes with ray symmetric-run, and removed its token")


def tail(path: Path, characters: int = 1500) -> str:
    return path.read_text(errors="replace")[-characters:] if path.is_file() else "(no log)"
