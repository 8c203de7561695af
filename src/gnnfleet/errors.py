"""Errors caused by the user, the data or the machine.

    GnnfleetError
    ├── ConfigError       an option or value of the command line, a config or an argument; a fault in a model file
    ├── InputError        a row, column or file of the data being imported
    ├── StoreError        a graph on disk: missing, incomplete, altered, of another version
    ├── PartitionError    an assignment or a partition on disk
    ├── NativeError       the compiled kernels are missing or do not fit the machine
    ├── RunError          a training run: its directory, its checkpoints, a loss that is not finite
    └── ExchangeError     a peer that died, stopped answering or sent an unexpected message

Each message says what happened, what was expected and what to do. Programming errors are asserts, not errors.
"""

import difflib
from collections.abc import Iterable


class GnnfleetError(Exception):
    """Base class; ``exit_code`` is the exit code of the command line."""

    exit_code = 1


class ConfigError(GnnfleetError):
    exit_code = 2


class InputError(GnnfleetError):
    exit_code = 3


class StoreError(GnnfleetError):
    exit_code = 4


class PartitionError(GnnfleetError):
    exit_code = 5


class NativeError(GnnfleetError):
    exit_code = 6


class RunError(GnnfleetError):
    exit_code = 7


class ExchangeError(GnnfleetError):
    exit_code = 8


def suggest(name: str, choices: Iterable[str]) -> str:
    """The most similar choice to an unknown name, or all choices, for a message."""
    similar = difflib.get_close_matches(name, choices := list(choices), n=1, cutoff=0.65)
    return f"did you mean {similar[0]!r}?" if similar else f"choose one of {', '.join(choices)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text without its full stop; the name of its type where there is no text."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". ") if text else type(error).__name__
