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


def first_line(error: BaseException) -> str:
    """The first line of an error's text without its full stop; the name of its type where there is no text."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". ") if text else type(error).__name__
