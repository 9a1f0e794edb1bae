"""Ray Jobs: `ray job submit` carries the repository and runs the command on the head.

The token comes from $RAY_AUTH_TOKEN, $RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token of the submitting machine and is sent
as a header; it is in no argument, no runtime environment and no log.
"""

import json
import shlex
from pathlib import Path

from infra.submit.job import Job, Submission, gpus
from infra.submit.profile import KubeRayProfile, RayProfile

REPOSITORY = Path(__file__).parent.parent.parent
# what a run makes and what git keeps; Ray also leaves out what .gitignore names
EXCLUDES = [
    "/data/",
    "/runs/",
    "/store/",
    "/mlruns/",
    "/mlartifacts/",
    "/mlflow.db",
    "/.venv/",
    "/.git/",
    "__pycache__/",
]


def render(job: Job, profile: RayProfile, *, submission_id: str = "", wait: bool = True) -> Submission:
    """The submission; the job's files are this repository's, its working folder is the profile's `workdir`."""
    runtime = {"excludes": EXCLUDES, "env_vars": profile.variables()}
    command = ["ray", "job", "submit", "--address", profile.address, "--working-dir", str(REPOSITORY)]
    command += ["--runtime-env-json", json.dumps(runtime, sort_keys=True)]
    command += ["--submission-id", submission_id] if submission_id else []
    if job.what == "eval":  # one process, where the accelerators are; the others start theirs through Ray
        command += ["--entrypoint-num-gpus", "1"] if profile.gpus_per_node else ["--entrypoint-num-cpus", "1"]
    command += [] if wait else ["--no-wait"]
    return Submission((*command, "--", "bash", "-c", script(job, profile)), env=_auth(profile))


def script(job: Job, profile: RayProfile) -> str:
    """Runs in Ray's copy of the repository: remember it as the code, go to the shared folder, run, try again.

    Exit code 2 is an error that the user has to mend and code 130 his own Ctrl-C: these are not tried again.
    """
    command = (
        f"n=0; until {on_ray(job, profile).shell()}; do code=$?; n=$((n+1)); "
        f'if [ "$code" -eq 2 ] || [ "$code" -eq 130 ] || [ "$n" -gt {profile.retries} ]; then exit "$code"; fi; '
        f'echo "flashdraft: ended with code $code, try $n of {profile.retries} begins in 10 s" >&2; sleep 10; done'
    )
    return in_folder(command, profile.workdir, code="$PWD")


def on_ray(job: Job, profile: RayProfile | KubeRayProfile) -> Job:
    """The job's arguments on a Ray cluster, whose address the job server puts into $RAY_ADDRESS."""
    if job.what == "features":
        return job.with_arguments(*gpus(job, profile))
    if job.what == "train":
        ranks = max(profile.gpus_per_node, 1)
        launch = ["--launcher", "ray", "--nodes", str(profile.nodes), "--nproc", str(ranks)]
        return job.with_arguments(*launch, *([] if profile.gpus_per_node else ["--cpu"]))
    return job


def in_folder(command: str, workdir: str, code: str) -> str:
    """Shell: `command` in the shared folder, with the repository importable."""
    folder = shlex.quote(workdir)
    return f'export PYTHONPATH="{code}"; mkdir -p {folder} && cd {folder} || exit 1; {command}'


def control(verb: str, job_id: str, profile: RayProfile) -> Submission:
    """status, logs (followed until the job ends) or stop."""
    command = ["ray", "job", verb, "--address", profile.address, *(["--follow"] if verb == "logs" else []), job_id]
    return Submission(tuple(command), env=_auth(profile))


def _auth(profile: RayProfile) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token" if profile.auth == "token" else "disabled"}
