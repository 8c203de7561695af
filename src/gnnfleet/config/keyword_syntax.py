"""Messages for Python programs: ``--split 0.6/0.2/0.2`` and ``--set model.hidden=64`` as arguments of gf.train."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from gnnfleet.config.resolve import parse_value
from gnnfleet.config.suggest import settings_of_all_strategies
from gnnfleet.errors import GnnfleetError
from gnnfleet.report.remarks import rewrite

_COMMAND = re.compile(r"(gnnfleet (?:train|plan|join|predict|evaluate|info|partition|import) [^.;:)]*)")
_FLAG = re.compile(
    r"--([a-z-]*[a-z])(?:[ =](?!(?:or|and|is|has|to|if|for|does|allows)\b)((?:[\w{}+…-]|[/.:|](?=\w)|(?<= )/)+))?"
)
_SETTING = re.compile(r"(?:'(?=[\w.]+=))?\b(\w+\.\w+)(?:=(\[[^]]*\]|(?:[^\s.,;:)'?]|[.:](?=\w))+)'?|(?=(\?)))?")


@contextmanager
def keyword_syntax() -> Iterator[None]:
    """Rewrite the errors and notes inside."""
    token = rewrite.set(as_keywords)
    try:
        yield
    except GnnfleetError as error:
        error.args = (as_keywords(str(error)),)
        raise
    finally:
        rewrite.reset(token)


def as_keywords(text: str) -> str:
    """Rewrite flags and settings of the command line as keyword arguments; commands stay as they are."""
    parts = _COMMAND.split(text.replace("--resume", "resume=True").replace("--set ", ""))
    parts[::2] = [_FLAG.sub(_flag, _SETTING.sub(_setting, part)) for part in parts[::2]]
    return "".join(parts)


def _setting(match: re.Match[str]) -> str:
    name, value, is_suggested = match.groups()
    group, _, option = name.partition(".")
    if name not in settings_of_all_strategies():
        return match[0]
    if value is None and is_suggested is None:
        return option if group in ("train", "strategy") else name
    text = "…" if value is None else _literal(value)
    if group in ("train", "strategy"):
        return f"{option}={text}"
    return f'model={{"{option}": {text}}}' if group == "model" else f'**{{"{name}": {text}}}'


def _flag(match: re.Match[str]) -> str:
    name = match[1].replace("-", "_")
    return name if match[2] is None else f"{name}={_literal(match[2])}"


def _literal(text: str) -> str:
    """A value of the command line as Python writes it; placeholders such as SIZE stay."""
    value = parse_value(text)
    if text.isupper() or not isinstance(value, str):
        return text if text.isupper() else repr(value)
    return "|".join(f'"{choice}"' for choice in text.split("|"))
