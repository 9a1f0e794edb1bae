"""This machine: the command itself."""

import sys

from infra.submit.job import Job, Submission
from infra.submit.profile import LocalProfile


def render(job: Job, profile: LocalProfile) -> Submission:
    return Submission((sys.executable, *job.arguments), env=profile.variables())
