"""Slurm: one batch script per job, sent to `sbatch` on standard input.

Features: `ray symmetric-run` starts Ray on every node of the allocation, runs the command on the first and stops Ray.
Training: one `python -m trainer` per node, which finds the others by torchrun's rendezvous on the first node.
Ablations: an array job, one setting per task.
"""

import itertools
import shlex

from infra.errors import ConfigError
from infra.submit.job import Job, Submission, gpus
from infra.submit.profile import SlurmProfile

GRACE_S = 300  # between the warning and the end of the time limit: a step, a checkpoint of 16 bytes per parameter


def render(job: Job, profile: SlurmProfile, sweep: list[str] | None = None) -> Submission:
    return Submission(("sbatch", "--parsable"), stdin=script(job, profile, sweep or []))


def script(job: Job, profile: SlurmProfile, sweep: list[str]) -> str:
    """The batch script. Values are quoted where they are written; Slurm's own variables are not expanded here."""
    cases = settings(job, sweep)
    if cases and job.what != "train":
        raise ConfigError(f"--sweep is for train and not for {job.what}; leave it out")
    nodes = 1 if job.what == "eval" or cases else profile.nodes
    body = {"features": _features, "train": _train, "eval": _eval}[job.what](job, profile, bool(cases))
    return "\n".join(
        [*_header(job, profile, nodes, len(cases)), "", *_prologue(profile), *_cases(cases), "", *body, ""]
    )


def settings(job: Job, sweep: list[str]) -> list[str]:
    """`["loss.weighting=decay,dpace", "train.seed=1,2"]` -> the four combinations, each with a name of its own.

    Raises:
        ConfigError: not of the form key=a,b.
    """
    axes = []
    for text in sweep:
        key, eq, values = text.partition("=")
        if not eq or not key or not all(values.split(",")):
            raise ConfigError(
                f"--sweep {text!r} is not of the form key=a,b; write for example loss.weighting=decay,dpace"
            )
        axes.append([f"{key}={value}" for value in values.split(",")])
    if not axes:
        return []
    out = []
    for combination in itertools.product(*axes):
        name = "-".join([job.name.removeprefix("train-"), *(c.partition("=")[2] for c in combination)])
        out.append(shlex.join([*combination, f"name={name}"]))
    return out


def control(verb: str, job_id: str, profile: SlurmProfile) -> Submission:
    """status, logs (followed) or stop (SIGTERM to every rank, which then saves; SIGKILL after Slurm's KillWait)."""
    command = {
        "status": ["squeue", "--job", job_id, "--long"],
        "logs": ["tail", "--lines=+1", "--follow=name", "--retry", f"{profile.workdir}/logs/{job_id}.log"],
        "stop": ["scancel", job_id],
    }[verb]
    return Submission(tuple(command))


def _header(job: Job, profile: SlurmProfile, nodes: int, cases: int) -> list[str]:
    options = {
        "job-name": job.name,
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "time": profile.time,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(profile.cpus_per_node),
        "gres": f"{profile.gres}:{profile.gpus_per_node}" if profile.gpus_per_node else "",
        "chdir": profile.workdir,
        "output": f"logs/{'%A_%a' if cases else '%j'}.log",
        "open-mode": "append",  # a requeued job goes on in its log
        "export": "NONE",  # nothing of the submitting shell, so no secret of it in Slurm's state
        "signal": f"B:TERM@{GRACE_S}",
        "array": f"0-{cases - 1}%{profile.array_limit}" if cases else "",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    return ["#!/bin/bash", *lines, "#SBATCH --requeue"]


def _prologue(profile: SlurmProfile) -> list[str]:
    lines = ["set -euo pipefail", "export SLURM_EXPORT_ENV=ALL"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in profile.variables().items()]
    lines += [f"export PYTHONPATH={shlex.quote(profile.code)}"]
    if profile.secrets:
        path = profile.secrets_file
        file = f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
        lines += [
            f"secrets={file}",
            'if [ "$(stat -L -c %a "$secrets")" != 600 ]; then',
            '  echo "flashdraft: $secrets can be read by others; run chmod 600 on it" >&2',
            "  exit 2",
            "fi",
            "set -a",
            "# shellcheck source=/dev/null",
            '. "$secrets"',
            "set +a",
            *(f': "${{{name}:?is not in the secrets file}}"' for name in profile.secrets),
        ]
    return lines


def _cases(cases: list[str]) -> list[str]:
    if not cases:
        return []
    return [
        "cases=(",
        *(f"  {shlex.quote(c)}" for c in cases),
        ")",
        'read -ra case <<< "${cases[$SLURM_ARRAY_TASK_ID]}"',
    ]


def _python(profile: SlurmProfile) -> str:
    return profile.python or f"{profile.code}/.venv/bin/python"


def _rendezvous() -> list[str]:
    return [
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 20000))",
    ]


def _again(profile: SlurmProfile, what: str) -> list[str]:
    """Code 2 is an error that the user has to mend."""
    return [
        f"# a lost node, or one that did not start: {what}, but not for ever",
        f'if [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {profile.retries} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]


def _features(job: Job, profile: SlurmProfile, _sweep: bool) -> list[str]:
    command = job.with_arguments("ray.address=auto", *gpus(job, profile)).shell(_python(profile))
    start = "--disable-usage-stats --num-cpus="
    start += '"$SLURM_CPUS_PER_TASK"' + (f" --num-gpus={profile.gpus_per_node}" if profile.gpus_per_node else "")
    ray = shlex.quote(_python(profile).rsplit("/", 1)[0])
    return [
        *_rendezvous(),
        f'export PATH={ray}:"$PATH"',
        "# every node of this job, and nobody else, knows the token",
        'export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/logs/$SLURM_JOB_ID.token"',
        '(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d " \\n" > "$RAY_AUTH_TOKEN_PATH")',
        "trap 'rm -f \"$RAY_AUTH_TOKEN_PATH\"' EXIT",
        "# nodes that read their packages from a shared disk need longer than the default of 30 s",
        "export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300",
        "# the warning before the time limit: begin anew, committed shards stay",
        "trap 'scontrol requeue \"$SLURM_JOB_ID\"; exit 0' TERM",
        "# workers notice the head's end only after a minute, and call it a failure: this code is what counts",
        'result="$PWD/logs/$SLURM_JOB_ID.code"',
        'rm -f "$result"',
        "# shellcheck disable=SC2016  # expanded by the inner shell",
        'srun --kill-on-bad-exit=0 ray symmetric-run --address "$head:$port" --min-nodes "$SLURM_NNODES" \\',
        f"  {start} -- \\",
        f'  bash -c \'"$@"; echo $? > "$0"\' "$result" {command} &',
        "step=$!",
        'while [ ! -s "$result" ] && kill -0 "$step" 2> /dev/null; do sleep 2; done',
        'scancel "$SLURM_JOB_ID.0" 2> /dev/null || true',
        'wait "$step" || true',
        'code=$(cat "$result" 2> /dev/null || echo 1)',
        'rm -f "$result"',
        *_again(profile, "compute the missing shards"),
        'exit "$code"',
    ]


def _train(job: Job, profile: SlurmProfile, sweep: bool) -> list[str]:
    ranks = str(max(profile.gpus_per_node, 1))
    command = job.with_arguments("--nproc", ranks).shell(_python(profile))
    lines = [
        *_rendezvous(),
        "# the warning before the time limit, and a preemption, let the trainer finish its step and save; the signal",
        "# goes to the ranks through Slurm: srun itself would answer it with SIGKILL for all of them",
        "stopped=0",
        "trap 'stopped=1; scancel --signal=TERM \"$SLURM_JOB_ID.0\"' TERM",
        f"srun --kill-on-bad-exit=1 {command} \\",
        '  --nodes "$SLURM_NNODES" --rendezvous "$head:$port"' + (' "${case[@]}"' if sweep else "") + " &",
        "step=$!",
        "code=0",
        'wait "$step" || code=$?',
        "# a signal ends the first wait at once; this one gives the step's own code",
        'if [ "$stopped" -eq 1 ]; then code=0; wait "$step" || code=$?; fi',
        'if [ "$stopped" -eq 1 ] && [ "$code" -eq 0 ]; then scontrol requeue "$SLURM_JOB_ID"; exit 0; fi',
        *_again(profile, "go on from the last checkpoint"),
        'exit "$code"',
    ]
    return lines


def _eval(job: Job, profile: SlurmProfile, _sweep: bool) -> list[str]:
    return [f"srun {job.shell(_python(profile))}"]
