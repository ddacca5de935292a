"""Errors a user can act on. Each is one line, and each has the exit code of the process."""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributedError",
    "Interrupted",
    "KernelError",
    "MemoryLimitError",
    "NonFiniteError",
    "RerunError",
    "ResumeError",
    "StorageError",
    "TrainerError",
]


class TrainerError(Exception):
    """Base of all errors that a user can act on.

    The text is always one line: what is wrong and where, what was found, the rule, the fix.

    Args:
        where: the setting or file at fault, as the user knows it.
        problem: what is wrong with it.
        found: the offending value, if there is one.
        rule: what a legal value looks like.
        fix: what to do about it.
    """

    exit_code = 2

    def __init__(
        self,
        where: object,
        problem: str,
        *,
        found: object = None,
        rule: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.where, self.problem, self.found, self.rule, self.fix = where, problem, found, rule, fix
        parts = [f"{where}: {problem}"]
        if found is not None:
            parts.append(f"found {found!r}" if isinstance(found, str) else f"found {found}")
        if rule:
            parts.append(f"must be {rule}")
        if fix:
            parts.append(f"fix: {fix}")
        super().__init__(" ".join("; ".join(parts).split()))

    def __reduce__(self) -> tuple[Callable[..., TrainerError], tuple[object, ...]]:
        # Errors of worker processes travel by pickle, which would call the class with the finished text alone.
        return _rebuild, (type(self), str(self.where), self.problem, self.found, self.rule, self.fix)


def _rebuild(
    kind: type[TrainerError], where: object, problem: str, found: object, rule: str | None, fix: str | None
) -> TrainerError:
    return kind(where, problem, found=found, rule=rule, fix=fix)


class ConfigError(TrainerError):
    """A setting on the command line or in a YAML file is unknown, malformed or out of range."""


class DataError(TrainerError):
    """A data file cannot be read, or holds something that cannot be trained on."""


class CheckpointError(TrainerError):
    """A weight file or checkpoint cannot be read or does not fit the model."""


class KernelError(TrainerError):
    """No kernel backend can run the call, or building one failed."""


class MemoryLimitError(TrainerError):
    """A step needs more memory than there is."""


class ResumeError(TrainerError):
    """Checkpoints exist, but none of them is valid."""

    exit_code = 3


class StorageError(TrainerError):
    """Writing failed: disk full, read-only, or the folder vanished. Older checkpoints are untouched."""

    exit_code = 4


class NonFiniteError(TrainerError):
    """The loss or a gradient is NaN or infinite, with the weights as before the step; or the loss has spiked."""

    exit_code = 5


class DistributedError(TrainerError):
    """The processes of a run could not start together or lost each other, or a step does not end."""

    exit_code = 6


class RerunError(TrainerError):
    """A step that was computed twice has given two results. The weights are those before it."""

    exit_code = 16


class Interrupted(TrainerError):
    """A signal ended the run, after a checkpoint where the text says so."""

    def __init__(self, where: object, problem: str, *, exit_code: int) -> None:
        super().__init__(where, problem)
        self.exit_code = exit_code
