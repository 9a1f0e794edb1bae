"""What is to run: the same command lines that a person types, and how a submission of one looks."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from infra.errors import ConfigError
from infra.submit.profile import LocalProfile, Profile, check_text

What = Literal["features", "train", "eval"]

# words of the Makefile -> options of each command line
OPTIONS: dict[str, dict[str, str]] = {
    "features": {"MODEL": "--model", "CORPUS": "--corpus", "RUN": "--run"},
    "train": {"MODEL": "--model", "RECIPE": "--recipe", "STAGE": "--stage", "INIT": "--init"},
    "eval": {"MODEL": "--model", "DRAFTER": "--drafter", "SUITES": "--suites-from", "LIMIT": "--limit"},
}
MODULE = {"features": "pipeline", "train": "trainer", "eval": "eval"}
NEEDED = {"features": ("MODEL",), "train": ("MODEL",), "eval": ("MODEL", "DRAFTER")}


@dataclass(frozen=True)
class Job:
    """One stage with its words.

    Attributes:
        arguments: of python: `-m pipeline --model …`; never shell syntax, each is quoted where it is written.
    """

    what: What
    name: str
    arguments: tuple[str, ...]

    def with_arguments(self, *more: str) -> "Job":
        return Job(self.what, self.name, (*self.arguments, *more))

    def shell(self, python: str = "python") -> str:
        return shlex.join([python, *self.arguments])


@dataclass(frozen=True)
class Submission:
    """A command to be run here, and what it reads: all that leaves this machine.

    Attributes:
        env: set for the command; modes and addresses, never secrets.
    """

    command: tuple[str, ...]
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The same as a shell script: the dry run."""
        line = " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.env.items()), shlex.join(self.command)])
        if not self.stdin:
            return line + "\n"
        end = "EOF"
        while f"\n{end}\n" in f"\n{self.stdin}":
            end += "_"
        return f"{line} <<'{end}'\n{self.stdin}{end}\n"


def make_job(what: What, words: list[str], profile: Profile) -> Job:
    """`features`, `["MODEL=qwen3-8b", "prefill.top_k=32"]` -> the job.

    Raises:
        ConfigError: a word that the stage does not know, a missing one, control characters, a password in a URI,
            or a store on object storage that is not named.
    """
    known, options, overrides = OPTIONS[what], {}, []
    for word in words:
        key, eq, value = word.partition("=")
        if not eq or not key:
            raise ConfigError(f"{word!r} is not of the form NAME=value; write for example MODEL=qwen3-8b")
        try:
            check_text(word)
        except ValueError as e:
            raise ConfigError(f"the value of {key} is not accepted: {e}") from None
        if key in known:
            options[key] = value
        elif key.isupper():
            raise ConfigError(
                f"{what} does not know {key}; it takes {', '.join(known)} and dotted overrides like a.b=1"
            )
        elif key.startswith("-"):
            raise ConfigError(f"{word!r} is an option; jobs take NAME=value words, see docs/clusters/")
        else:
            overrides.append(word)
    for key in NEEDED[what]:
        if not options.get(key):
            raise ConfigError(f"{what} needs {key}=; add it")
    arguments = ["-m", MODULE[what]]
    if what == "train":
        options.setdefault("STAGE", "sft")
    for key, option in known.items():
        if options.get(key):
            arguments += [option, options[key]]
    arguments += _store(what, overrides, profile)
    return Job(what, _slug(what, options["MODEL"], overrides), (*arguments, *overrides))


def _store(what: What, overrides: list[str], profile: Profile) -> list[str]:
    """Where the features are: all stages look below `store/` of the working folder unless told."""
    if what == "features":
        return [] if profile.store == "store" else [f"store_root={profile.store}"]
    key = "data.store" if what == "train" else "store"
    if profile.store != "store" and not any(o.startswith(f"{key}=") for o in overrides):
        raise ConfigError(
            f"the profile's store is {profile.store}, where {what} cannot look for the newest one; add {key}= with the "
            "address that the features job printed"
        )
    return []


def gpus(job: Job, profile: Profile) -> list[str]:
    """Overrides of a features job that runs on several machines."""
    assert job.what == "features" and not isinstance(profile, LocalProfile)
    asked = any(a.startswith("ray.gpus_per_actor=") for a in job.arguments)
    return ["ray.gpus_per_actor=1"] if profile.gpus_per_node and not asked else []


def _slug(what: str, model: str, overrides: list[str]) -> str:
    """A DNS label that leaves room for what is added: KubeRay's operator refuses a RayJob of more than 47 characters,
    and Kubernetes adds a dash and five of its own."""
    named = next((o.partition("=")[2].strip("\"'") for o in overrides if o.startswith("name=")), "")
    text = f"{what}-{named or Path(model).stem}".lower()
    return re.sub(r"[^a-z0-9-]+", "-", text)[:41].strip("-")
