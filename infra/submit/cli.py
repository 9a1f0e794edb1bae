"""`python -m infra submit features|train|eval --on ray|kuberay|slurm|local MODEL=… [--profile …] [--dry-run]`
`python -m infra submit status|logs|stop --on ray|kuberay|slurm JOB`"""

import argparse
import os
import shutil
import subprocess
import sys

from infra.errors import ConfigError, FlashdraftError, ResourceError
from infra.submit import kuberay, local, ray_jobs, slurm
from infra.submit.job import OPTIONS, Submission, make_job
from infra.submit.profile import KINDS, load_profile

CONTROLS = ("status", "logs", "stop")
PLATFORMS = {"ray": ray_jobs, "kuberay": kuberay, "slurm": slurm}


class SubmissionFailed(FlashdraftError):
    """The platform's own command refused; it has said why."""


def parse(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m infra submit", description="Run a stage on a cluster.")
    p.add_argument("what", choices=[*OPTIONS, *CONTROLS])
    p.add_argument("--on", required=True, choices=list(KINDS), help="platform")
    p.add_argument("--profile", default="", help="a name in infra/profiles or a TOML file (default: the platform's)")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the profile: nodes=4")
    p.add_argument("--sweep", action="append", default=[], metavar="KEY=A,B", help="slurm: an array job, one per value")
    p.add_argument("--no-wait", action="store_true", help="ray: return when the job is accepted, do not follow its log")
    p.add_argument("--submission-id", default="", help="ray: name of the job")
    p.add_argument("--dry-run", action="store_true", help="print what would be sent, as a shell script, and stop")
    p.add_argument("words", nargs="*", metavar="NAME=value", help="MODEL=, CORPUS=, ... and dotted overrides; or a job")
    return p.parse_intermixed_args(argv)


def submit(argv: list[str]) -> int:
    """Render, then print or send.

    Raises:
        ConfigError: words or profile. ResourceError: the platform's program is absent. SubmissionFailed: it refused.
    """
    args = parse(argv)
    submission = plan(args)
    if args.dry_run:
        print(submission.text(), end="")
        return 0
    return send(submission)


def plan(args: argparse.Namespace) -> Submission:
    """What would be run here for these arguments."""
    profile = load_profile(args.on, args.profile, args.set)
    if args.what in CONTROLS:
        if args.on == "local" or len(args.words) != 1 or not args.words[0].replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"{args.what} needs --on ray, kuberay or slurm and the id of one job")
        return PLATFORMS[args.on].control(args.what, args.words[0], profile)
    job = make_job(args.what, args.words, profile)
    if args.sweep and args.on != "slurm":
        raise ConfigError(f"--sweep is for --on slurm; with --on {args.on} submit one job per setting")
    match args.on:
        case "local":
            return local.render(job, profile)
        case "ray":
            return ray_jobs.render(job, profile, submission_id=args.submission_id, wait=not args.no_wait)
        case "kuberay":
            return kuberay.render(job, profile)
    return slurm.render(job, profile, args.sweep)


def send(submission: Submission) -> int:
    program = submission.command[0]
    beside = os.path.join(os.path.dirname(sys.executable), program)  # `ray` of this environment, not of another
    path = beside if os.path.isfile(beside) else shutil.which(program)
    if path is None:
        raise ResourceError(f"the program {program!r} is not on this machine; install it, or look with --dry-run")
    done = subprocess.run(
        [path, *submission.command[1:]],
        input=submission.stdin if submission.stdin else None,
        text=True,
        env=os.environ | dict(submission.env),
    )
    if done.returncode:
        raise SubmissionFailed(f"{program} ended with code {done.returncode}; see its message above")
    return 0
