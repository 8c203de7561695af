"""Damaged files are refused in one message or read as they were written, without crash, hang or memory growth.

A few cases of every subject; ``make fuzz`` runs thousands (``python -m tests.fuzz``).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fuzz.subjects import SUBJECTS
from tests.fuzz.trials import problems

CASES = 15


@pytest.fixture(scope="module")
def problems_by_subject() -> dict[str, list[str]]:
    """Problems of all subjects, two at a time: most of the time is spent loading torch."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(SUBJECTS, pool.map(lambda name: problems(name, CASES), SUBJECTS), strict=True))


@pytest.mark.parametrize("name", SUBJECTS)
def test_damage_is_refused_in_one_message(problems_by_subject: dict[str, list[str]], name: str) -> None:
    assert problems_by_subject[name] == []
