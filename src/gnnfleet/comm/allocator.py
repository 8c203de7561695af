"""How torch gets its memory. Has to be said before torch allocates for the first time, so nothing here imports it."""

from __future__ import annotations

import os


def prefer_huge_pages() -> None:
    """Let torch ask for huge pages, unless the user decided: fresh tensors then cost far fewer page faults."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
