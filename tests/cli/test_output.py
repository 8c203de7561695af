"""Printed results: text of users is not read as markup, and numbers that are not finite become null."""

from __future__ import annotations

import json

import pytest

from gnnfleet.cli.output import print_result, table


def test_text_of_users_is_not_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({}, as_json=False, human=["[bold]a[/bold] :smile:", table("[red]t", ["[b]id"], [["[/x]"]])])
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[bold]a[/bold] :smile:", "[red]t", "[b]id", "[/x]"))


def test_numbers_that_are_not_finite_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(
        {"value": float("nan"), "rows": [{"a": (float("-inf"), 1.5)}], "count": 3, "text": "nan"}, as_json=True
    )
    result = json.loads(capsys.readouterr().out, parse_constant=lambda constant: pytest.fail(constant))
    assert result == {"value": None, "rows": [{"a": [None, 1.5]}], "count": 3, "text": "nan"}
