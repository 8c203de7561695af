"""Results as they are printed: words of users are no markup, what is no number is null."""

from __future__ import annotations

import json

import pytest

from gnnfleet.cli.output import print_result, table


def test_words_of_users_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({}, as_json=False, human=["[bold]a[/bold] :smile:", table("[red]t", ["[b]id"], [["[/x]"]])])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("[bold]a[/bold] :smile:", "[red]t", "[b]id", "[/x]"))


def test_what_is_no_number_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(
        {"value": float("nan"), "rows": [{"a": (float("-inf"), 1.5)}], "count": 3, "text": "nan"}, as_json=True
    )
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert found == {"value": None, "rows": [{"a": [None, 1.5]}], "count": 3, "text": "nan"}
