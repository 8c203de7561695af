"""Inspection of table columns: remarks on times, ids, categories, text and other magnitudes, with what to do.

One query per table computes statistics of each column, on a sample of about a million rows if there are more.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gnnfleet.graph.ingest import duck as sql
from gnnfleet.graph.ingest.columns import FeatureSource, list_item_type
from gnnfleet.graph.ingest.labels import LabelSource
from gnnfleet.graph.ingest.source import TableSource

SCALE_RATIO = 100
"""Root mean squares of columns that differ by more than this factor are named."""

_SAMPLE_ROWS, _MAX_COLUMNS, _SHOWN_COLUMNS = 1_000_000, 500, 10
_MIN_ROWS = 10  # that ids and labels are judged by
_FEW_VALUES, _MANY_VALUES = 20, 50
_EPOCHS = (("seconds", 1.0), ("milliseconds", 1e3), ("microseconds", 1e6))
_FIRST_TIME, _LAST_TIME = 473_385_600, 4_102_444_800  # the years 1985 to 2099, in unix seconds
_TIME_NAME = re.compile(r"(.*_)?(at|ts|time|date|datetime|timestamp)", re.IGNORECASE)
_ID_NAME = re.compile(r"(.*_)?(id|key|no|nr|number)", re.IGNORECASE)
_CATEGORY_NAME = re.compile(r"(.*_)?(code|type|kind|category|class|group|zip|country|region|plan)", re.IGNORECASE)


@dataclass(frozen=True)
class ColumnStats:
    """Statistics of the values of a column; ``low`` to ``scale`` are of those that are numbers."""

    name: str
    kind: str
    count: int
    distinct: int  # approximate
    numbers: int
    whole: int
    low: float
    high: float
    scale: float  # root mean square
    spaced: int  # texts with a space inside
    times: int  # texts that are dates or timestamps

    @property
    def shown(self) -> str:
        detail = self.time_unit or (f"{self.distinct} values" if self.is_category else "")
        return f"{self.name} ({detail})" if detail else self.name

    @property
    def largest(self) -> float:
        return max(abs(self.low), abs(self.high))

    @property
    def is_time(self) -> bool:
        """True for timestamps and dates, as types or as texts."""
        return self.kind.startswith(("TIMESTAMP", "DATE")) or self.times == self.count > self.numbers

    @property
    def time_unit(self) -> str:
        """The unit of a column that looks like a time; empty for others."""
        if self.is_time:
            return "timestamps"
        if not self.numbers or self.whole < self.numbers:
            return ""
        for unit, factor in _EPOCHS:
            if _FIRST_TIME * factor <= self.low < self.high <= _LAST_TIME * factor:
                return f"unix {unit}"
        return "by its name" if _TIME_NAME.fullmatch(self.name) and self.distinct > 2 else ""

    @property
    def is_id(self) -> bool:
        """True for distinct integers, or distinct texts without spaces."""
        is_whole = self.whole == self.count
        return self.count >= _MIN_ROWS and self.distinct > 0.9 * self.count and (is_whole or not self.spaced)

    @property
    def is_category(self) -> bool:
        """True for texts of few values, and for integers of few values whose name says so."""
        if self.numbers == self.count:
            return bool(_CATEGORY_NAME.fullmatch(self.name)) and 2 < self.distinct <= _FEW_VALUES
        return 2 * self.distinct <= self.count


def inspect_features(source: TableSource, features: FeatureSource, used: Iterable[str | None], kind: str) -> list[str]:
    """Remarks on the features and the columns without a role; ``kind`` names the node or edge type."""
    roles = set(used) - set(features.names)
    is_edge, option = features.option == "edge-features", features.option
    name_time = "name the time of an edge with --time, " if is_edge else ""
    one_hot = "use category= after the files of --edges" if is_edge else "use --category"
    remarks: dict[tuple[str, str], list[str]] = {}
    stats = column_stats(source, [c for c in source.types if c not in roles])
    numbers = [s for s in stats if s.name in features.names and s.name not in features.categories]
    scales = [s.scale for s in numbers if s.scale and not s.time_unit]
    reference = statistics.median_low(scales) if len(scales) > 1 else 10.0
    for s in numbers:
        title, advice, text = "", "", s.shown
        is_scaled = s.name in features.scales
        if s.time_unit and not is_scaled:
            title, advice = "look like times", f"{name_time}use --standardize, or leave them out of --{option}"
        elif s.is_id and _ID_NAME.fullmatch(s.name):
            title, advice = "look like ids", f"leave them out of --{option}"
        elif s.is_category:
            title, advice = "may be categories", f"{one_hot} if their numbers have no order"
        elif s.scale and not is_scaled and (s.scale > SCALE_RATIO * reference or s.largest < reference / SCALE_RATIO):
            size = f"{s.scale:,.0f}" if s.scale >= 10 else f"{s.scale:.2g}"
            title, advice, text = "have another magnitude than others", "use --standardize", f"{s.name} (about {size})"
        if title:
            remarks.setdefault((title, advice), []).append(text)
    for s in (s for s in stats if s.name not in features.names and s.count and (s.numbers < s.count or s.is_time)):
        if s.time_unit:
            title, advice = "look like times and are left out", name_time and "name the time of an edge with --time"
        elif s.is_category:
            title, advice = "look like categories and are left out", one_hot
        else:
            title, advice = ("look like ids" if s.is_id else "are text") + " and are left out", ""
        remarks.setdefault((title, advice), []).append(s.shown)
    return [
        f"{kind}: columns that {title}: {_listed(columns)}" + f". {advice[:1].upper()}{advice[1:]}" * bool(advice)
        for (title, advice), columns in remarks.items()
    ]


def _listed(columns: Sequence[str]) -> str:
    more = len(columns) - _SHOWN_COLUMNS
    return ", ".join(columns[:_SHOWN_COLUMNS]) + f" and {more} more" * (more > 0)


def inspect_labels(source: TableSource, labels: LabelSource | None, kind: str) -> list[str]:
    """A remark if labels of one class per row look continuous."""
    if labels is None or labels.form not in ("number", "name"):
        return []
    for s in column_stats(source, labels.columns):
        has_fractions = s.numbers == s.count and s.whole < s.numbers
        if has_fractions or (s.whole == s.count and s.distinct > max(_MANY_VALUES, s.count / 2)):
            return [
                f"{kind}: the label {s.name} looks continuous ({s.distinct:,} values in {s.count:,} rows), and every "
                f"value became a class. Predict values with --value {s.name} instead"
            ]
    return []


def column_stats(source: TableSource, columns: Sequence[str]) -> list[ColumnStats]:
    """Statistics of columns, without lists and beyond the first 500."""
    columns = [c for c in columns if list_item_type(source.types[c]) is None][:_MAX_COLUMNS]
    if not columns or not source.rows:
        return []
    aggregates = []
    for position in range(len(columns)):
        text, number = f"c{position}", f"n{position}"
        aggregates += [
            f"count({text})",
            f"approx_count_distinct({text})",
            f"count({number})",
            f"count(*) FILTER ({number} = floor({number}))",
            f"min({number})",
            f"max({number})",
            f"sqrt(avg({number} * {number}))",
            f"count(*) FILTER (contains(trim({text}), ' '))",
            f"count(try_cast({text} AS TIMESTAMP))",
        ]
    cells = [f"{sql.sql_name(c)}::VARCHAR AS c{position}" for position, c in enumerate(columns)]
    numbers = [f"try_cast(c{position} AS DOUBLE) AS n{position}" for position in range(len(columns))]
    finite = [f"CASE WHEN isfinite(n{i}) AND abs(n{i}) < 1e150 THEN n{i} END AS n{i}" for i in range(len(columns))]
    query = f"SELECT {', '.join(['*', *numbers])} FROM ({source.scan(', '.join(cells))})"
    query = f"SELECT * EXCLUDE ({', '.join(f'n{i}' for i in range(len(columns)))}), {', '.join(finite)} FROM ({query})"
    share = f" USING SAMPLE {100 * _SAMPLE_ROWS / source.rows:.6f} PERCENT (system, 1)"
    query = f"SELECT {', '.join(aggregates)} FROM ({query})" + share * (source.rows > 2 * _SAMPLE_ROWS)
    row, width = source.duck.row(query), 9
    stats = []
    for position, column in enumerate(columns):
        values = row[position * width : (position + 1) * width]
        stats.append(ColumnStats(column, source.types[column], *(0 if value is None else value for value in values)))
    return stats
