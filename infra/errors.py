"""Typed errors. Each message is one sentence that names the thing, the value and the remedy.

Command lines turn any `FlashdraftError` into that sentence on stderr and exit code 2 (`infra.cli.main`);
everything else is a bug and keeps its stack trace.
"""


class FlashdraftError(Exception):
    """Base of every error that the user can act on."""

    exit_code = 2


class ConfigError(FlashdraftError):
    """A recipe, target, corpus or override that cannot be what the user meant."""


class DataError(FlashdraftError):
    """A corpus, prompt file or suite whose content is unusable."""


class TargetError(FlashdraftError):
    """A target model that is missing, corrupt, or does not have what its file says."""


class StoreError(FlashdraftError):
    """A feature store that is missing, incomplete, or damaged."""


class SpecMismatch(StoreError):
    """Two sides disagree on what the features are (target, taps, dtype, template, ...)."""


class CheckpointError(FlashdraftError):
    """A drafter checkpoint that is missing, damaged or of another layout."""


class TrainingError(FlashdraftError):
    """Training that cannot go on (non-finite steps in a row, nothing supervised)."""


class EngineError(FlashdraftError):
    """A serving engine that does not answer, fails, or does not draft."""


class ResourceError(FlashdraftError):
    """The machine lacks something: disk space, memory, a free port, a program."""
