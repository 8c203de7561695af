"""``gnnfleet``: hangs the commands together and turns errors into one short message and an exit code."""

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

INTERRUPTED = "interrupted; nothing half-written was left behind"

# The root of what the parser raises: click's ClickException, which newer releases of typer carry under another name.
_UsageProblem: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="gnnfleet",
    help="Train graph neural networks on graphs too big for one machine.",
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
    """Exit 0 on success, 1 for a defect of ours, 130 for Ctrl-C, otherwise the error's own code (errors.py)."""
    signal.signal(signal.SIGTERM, _terminate)
    debug = "--debug" in sys.argv
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        ended = app(args=arguments, prog_name="gnnfleet", standalone_mode=False)
        code = ended if isinstance(ended, int) else 0
        if code == 130:  # some typers catch Ctrl-C themselves, without a word
            _fail(INTERRUPTED, code, debug)
    except GnnfleetError as error:
        for note in getattr(error, "__notes__", ()):  # the traceback of a worker
            print_note(note)
        code = _fail(str(error), error.exit_code, debug)
    except typer.Exit as error:
        code = error.exit_code
    except _UsageProblem as error:
        # A group of commands called without words has shown its help by now and has nothing to add.
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
    """What the parser says, and whose help to read; an option that is the name of a setting is set another way."""
    context = getattr(error, "ctx", None)
    said = str(error.format_message()).rstrip(".")
    if hasattr(error, "possibilities") and context is not None:
        takes = {each.name for each in context.command.params}
        if {"settings", "config"} <= takes:  # its --set is about runs
            said = _as_setting(error.option_name, arguments) or said
    return f"{said} ({'gnnfleet' if context is None else context.command_path} --help)"


def _as_setting(option: str, arguments: Sequence[str]) -> str | None:
    from gnnfleet.config.suggest import settings_ending_in

    names = settings_ending_in(option.lstrip("-").replace("-", "_"))
    if not names:
        return None
    given = (
        after if word == option else word.partition("=")[2]
        for word, after in pairwise([*arguments, ""])
        if word.partition("=")[0] == option
    )
    value = next((text for text in given if text and not text.startswith("-")), "VALUE")
    return f"no option {option}: use " + " or ".join(f"--set {name}={value}" for name in names)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print_note(f"error: {message}")
    return code


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A polite kill ends like Ctrl-C, so that partial output is removed."""
    raise KeyboardInterrupt


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"gnnfleet {version('gnnfleet')}")
        raise typer.Exit


@app.callback()
def _options(
    version_asked: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and end.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train graph neural networks on graphs too big for one machine."""
