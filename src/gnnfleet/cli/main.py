"""``gnnfleet``: assemble the commands; turn errors into one message and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from gnnfleet.cli import datasets
from gnnfleet.cli.compare import COMPARE_EXAMPLES, compare
from gnnfleet.cli.demo import demo
from gnnfleet.cli.diagnose import DIAGNOSE_EXAMPLES, diagnose
from gnnfleet.cli.doctor import doctor
from gnnfleet.cli.evaluate import evaluate
from gnnfleet.cli.importing import IMPORT_EXAMPLES, export_graph, import_graph
from gnnfleet.cli.info import info
from gnnfleet.cli.join import JOIN_EXAMPLES, join
from gnnfleet.cli.partition import partition
from gnnfleet.cli.plan import PLAN_EXAMPLES, plan
from gnnfleet.cli.predict import predict
from gnnfleet.cli.report import REPORT_EXAMPLES, report
from gnnfleet.cli.train import TRAIN_EXAMPLES, train
from gnnfleet.cli.watch import watch
from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.report.remarks import print_note

INTERRUPTED = "interrupted; no partial files were left"

# Base class of the parser's errors: click's ClickException, which newer releases of typer carry under another name.
_UsageProblem: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="gnnfleet",
    help="Train graph neural networks on graphs that do not fit on one machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("import", epilog=IMPORT_EXAMPLES)(import_graph)
app.command("export")(export_graph)
app.add_typer(datasets.app)
app.command()(info)
app.command()(partition)
app.command(epilog=DIAGNOSE_EXAMPLES)(diagnose)
app.command(epilog=PLAN_EXAMPLES)(plan)
app.command(epilog=TRAIN_EXAMPLES)(train)
app.command(epilog=JOIN_EXAMPLES)(join)
app.command()(evaluate)
app.command()(predict)
app.command(epilog=COMPARE_EXAMPLES)(compare)
app.command()(watch)
app.command(epilog=REPORT_EXAMPLES)(report)
app.command()(doctor)
app.command()(demo)


def main() -> NoReturn:
    """Run a command. Exit codes: 0 success, 1 defect of gnnfleet, 130 interrupted, otherwise as in errors.py."""
    signal.signal(signal.SIGTERM, _terminate)
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        returned = app(args=arguments, prog_name="gnnfleet", standalone_mode=False)
        code = returned if isinstance(returned, int) else 0
        if code == 130:  # some versions of typer catch Ctrl-C themselves and print nothing
            _fail(INTERRUPTED, code, debug)
    except GnnfleetError as error:
        for note in getattr(error, "__notes__", ()):  # the traceback of a worker
            print_note(note)
        code = _fail(str(error), error.exit_code, debug)
    except typer.Exit as error:
        code = error.exit_code
    except _UsageProblem as error:
        # A command group called without arguments has shown its help; its message is empty.
        code = ConfigError.exit_code
        if error.format_message():
            _fail(_show_usage_error(error, arguments), code, debug)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(INTERRUPTED, 130, debug)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 1, debug)
    except Exception as error:
        print_note("".join(traceback.format_exception(error)))
        code = _fail(f"unexpected {type(error).__name__}: {error}. This is a defect of gnnfleet.", 1, False)
    sys.exit(code)


def _show_usage_error(error: Any, arguments: Sequence[str]) -> str:
    """The parser's message and the command whose help to read; suggests ``--set`` for names of settings."""
    context = getattr(error, "ctx", None)
    message = str(error.format_message()).rstrip(".")
    if hasattr(error, "possibilities") and context is not None:
        parameters = {parameter.name for parameter in context.command.params}
        if {"settings", "config"} <= parameters:  # its --set takes options of a run
            message = _as_setting(error.option_name, arguments) or message
    return f"{message} ({'gnnfleet' if context is None else context.command_path} --help)"


def _as_setting(option: str, arguments: Sequence[str]) -> str | None:
    from gnnfleet.config.suggest import settings_ending_in

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


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
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


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train graph neural networks on graphs that do not fit on one machine."""
