"""``gnnfleet``: assemble the commands; turn errors into one message and an exit code."""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import version
from itertools import pairwise
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from gnnfleet.cli.compare import COMPARE_EXAMPLES, compare, demo
from gnnfleet.cli.datasets import list_datasets, make_dataset, show_dataset
from gnnfleet.cli.diagnose import DIAGNOSE_EXAMPLES, diagnose
from gnnfleet.cli.doctor import doctor
from gnnfleet.cli.evaluate import evaluate, predict
from gnnfleet.cli.importing import IMPORT_EXAMPLES, export_graph, import_graph
from gnnfleet.cli.info import info
from gnnfleet.cli.partition import partition
from gnnfleet.cli.plan import PLAN_EXAMPLES, plan
from gnnfleet.cli.report import REPORT_EXAMPLES, report, watch
from gnnfleet.cli.train import JOIN_EXAMPLES, TRAIN_EXAMPLES, join, train
from gnnfleet.cli.tune import TUNE_EXAMPLES, tune
from gnnfleet.errors import ConfigError, GnnfleetError, suggest
from gnnfleet.report.remarks import print_note

INTERRUPTED = "interrupted; no partial files were left"


class Command(TyperCommand):
    """A command that accepts --debug, which is an option of ``gnnfleet`` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        shared = (parameter for parameter in ctx.find_root().command.params if parameter.name == "debug")
        return [*super().get_params(ctx), *shared]


def _add_command(group: typer.Typer, name: str, function: Callable[..., Any], examples: str | None = None) -> None:
    """Add a command with its docstring as help: prose wraps at the width of the terminal, tables keep their lines."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    text = "\n\n".join(part if "  " in part else part.replace("\n", " ") for part in paragraphs)
    group.command(name, cls=Command, help=text, epilog=examples)(function)


app = typer.Typer(
    name="gnnfleet",
    help="Train graph neural networks on graphs that do not fit on one machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
datasets = typer.Typer(name="datasets", help="Generate graphs from a seed.", no_args_is_help=True)
_add_command(datasets, "list", list_datasets)
_add_command(datasets, "show", show_dataset)
_add_command(datasets, "make", make_dataset)
_add_command(app, "demo", demo)
_add_command(app, "import", import_graph, IMPORT_EXAMPLES)
_add_command(app, "export", export_graph)
_add_command(app, "info", info)
_add_command(app, "partition", partition)
_add_command(app, "plan", plan, PLAN_EXAMPLES)
_add_command(app, "train", train, TRAIN_EXAMPLES)
_add_command(app, "tune", tune, TUNE_EXAMPLES)
_add_command(app, "join", join, JOIN_EXAMPLES)
_add_command(app, "watch", watch)
_add_command(app, "report", report, REPORT_EXAMPLES)
_add_command(app, "evaluate", evaluate)
_add_command(app, "predict", predict)
_add_command(app, "compare", compare, COMPARE_EXAMPLES)
_add_command(app, "diagnose", diagnose, DIAGNOSE_EXAMPLES)
_add_command(app, "doctor", doctor)
app.add_typer(datasets)


def main() -> NoReturn:
    """Run a command. Exit codes: 0 success, 1 defect of gnnfleet, 130 interrupted, otherwise as in errors.py."""
    signal.signal(signal.SIGTERM, _terminate)
    flags: set[str] = set()
    try:
        returned = app(args=sys.argv[1:], prog_name="gnnfleet", standalone_mode=False, obj=flags)
        code = returned if isinstance(returned, int) else 0
        if code == 130:  # some versions of typer catch Ctrl-C themselves and print nothing
            _fail(INTERRUPTED, code, flags)
    except GnnfleetError as error:
        for note in getattr(error, "__notes__", ()):  # the traceback of a worker
            print_note(note)
        code = _fail(str(error), error.exit_code, flags)
    except typer.Exit as error:
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(INTERRUPTED, 130, flags)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 1, flags)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error: click and typer have no common base class for it
            code = ConfigError.exit_code
            # A command group called without arguments has shown its help; its message is empty.
            if error.format_message():
                _fail(_show_usage_error(error, sys.argv[1:]), code, flags)
        else:
            print_note("".join(traceback.format_exception(error)))
            code = _fail(f"unexpected {type(error).__name__}: {error}. This is a defect of gnnfleet.", 1)
    sys.exit(code)


def _show_usage_error(error: Any, arguments: Sequence[str]) -> str:
    """The parser's message and the command whose help to read; suggests ``--set`` for names of settings."""
    context = getattr(error, "ctx", None)
    message = str(error.format_message()).rstrip(".").replace(": Value error, ", ": ")
    if (choice := re.search(r"'(\S+)' is not one of (.+)$", message)) is not None:
        message += _nearest_choice(choice[1], re.findall(r"'(\S+?)'", choice[2]))
    if hasattr(error, "possibilities") and context is not None:
        parameters = {parameter.name for parameter in context.command.params}
        if {"settings", "config"} <= parameters:  # its --set takes options of a run
            message = _as_setting(error.option_name, arguments) or message
    return f"{message} ({'gnnfleet' if context is None else context.command_path} --help)"


def _nearest_choice(choice: str, choices: Sequence[str]) -> str:
    if choice == "metis":
        return ": METIS is mincut, or super for many small clusters"
    hint = suggest(choice, choices)
    return f": {hint}" if hint.startswith("did") else ""


def _as_setting(option: str, arguments: Sequence[str]) -> str | None:
    from gnnfleet.config.suggest import UNSUPPORTED, settings_ending_in

    if option == "--device":
        return UNSUPPORTED["device"]
    names = settings_ending_in(option.lstrip("-").replace("-", "_"))
    if not names:
        return None
    values = (
        following if argument == option else argument.partition("=")[2]
        for argument, following in pairwise([*arguments, ""])
        if argument.partition("=")[0] == option
    )
    value = next((text for text in values if text and not text.startswith("-")), "VALUE")
    return f"no option {option}: use " + " or ".join(f"--set {name}={value}" for name in names)


def _fail(message: str, code: int, flags: Collection[str] = ()) -> int:
    if "debug" in flags:
        traceback.print_exc()
    print_note(f"error: {message}")
    return code


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a command like Ctrl-C, so that partial output is removed."""
    raise KeyboardInterrupt


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"gnnfleet {version('gnnfleet')}")
        raise typer.Exit


def _set_debug(context: typer.Context, requested: bool) -> None:
    if requested:
        context.obj.add("debug")


_VersionFlag = typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
_DebugFlag = typer.Option(
    "--debug", is_eager=True, expose_value=False, callback=_set_debug, help="Show the traceback of an error."
)


@app.callback()
def _options(show_version: Annotated[bool, _VersionFlag] = False, debug: Annotated[bool, _DebugFlag] = False) -> None:
    """Train graph neural networks on graphs that do not fit on one machine."""
