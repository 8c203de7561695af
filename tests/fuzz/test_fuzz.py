"""Whatever lies on disk: read as it was written, or refused in one message; never a crash, a hang, a great deal of
memory, or something else than was written.

A few cases of every subject here; ``make fuzz`` tries thousands (``python -m tests.fuzz``).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fuzz.subjects import SUBJECTS
from tests.fuzz.trials import problems

CASES = 15


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """All subjects, two at a time: most of the time goes into loading torch."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(SUBJECTS, pool.map(lambda name: problems(name, CASES), SUBJECTS), strict=True))


@pytest.mark.parametrize("name", SUBJECTS)
def test_damage_is_refused_in_one_message(found: dict[str, list[str]], name: str) -> None:
    assert found[name] == []
