"""A chart of who worked when, in characters: one row for each process, seconds from left to right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Interval = tuple[float, float]

IDLE = "·"
SHADES = "░▒▓█"  # how much of a column was worked through: up to a quarter, a half, …
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
LABEL_ROOM = 8  # columns between two labels of the axis, at least
NARROWEST = 20


@dataclass(frozen=True)
class Row:
    """One process: it lived until a second, worked in the bars, and may have a mark where it ended."""

    label: str
    until: float
    bars: Sequence[Interval] = ()
    note: str = ""
    mark: str = ""


def render(rows: Sequence[Row], *, width: int = 80) -> list[str]:
    """Return the lines of the chart, the axis first; none is wider than `width`, as far as labels and notes allow."""
    labels = max(len(row.label) for row in rows)
    notes = max(len(row.note) for row in rows)
    columns = max(width - labels - notes - 6, NARROWEST)
    span = max(max([row.until, *(end for _, end in row.bars)]) for row in rows) or 1.0
    lines = [f"  {row.label:<{labels}}  {cells(row, span, columns)}  {row.note}" for row in rows]
    return [line.rstrip() for line in (" " * (labels + 4) + axis(span, columns), *lines)]


def axis(span: float, columns: int) -> str:
    """Return the labels of the seconds, each at its column."""
    step = next((step for step in STEPS if step * columns / span >= LABEL_ROOM), span)
    text = ""
    for number in range(int(span / step) + 1):
        column = round(number * step * columns / span)
        label = f"{number * step:g} s"
        if column + len(label) <= columns:
            text = text.ljust(column) + label
    return text.ljust(columns)


def cells(row: Row, span: float, columns: int) -> str:
    """Return the columns of one row."""
    size = span / columns
    text = [_cell(row, column * size, (column + 1) * size) for column in range(columns)]
    if row.mark:
        text[min(int(row.until / size), columns - 1)] = row.mark
    return "".join(text)


def _cell(row: Row, start: float, end: float) -> str:
    worked = sum(max(0.0, min(end, bar_end) - max(start, bar_start)) for bar_start, bar_end in row.bars)
    if worked > 0:
        quarters = math.ceil(worked / (end - start) * len(SHADES))
        return SHADES[min(quarters, len(SHADES)) - 1]
    return IDLE if start < row.until else " "
