"""The pictures of the docs: SVG that is the same for the same numbers, and can be read on light and on dark pages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .measuring import Plot
from .peers import BARE, DLOCK, GUARDED, OURS, PGLOCK, PGWARE, PSYCOPG, WRAPPER

# Each has a contrast of at least 3 with white and with black, and goes with a shape of its own.
COLOURS = ("#d55e00", "#0077bb", "#208a60", "#aa66aa", "#8c7a3f", "#777777")
MARKERS = ("o", "s", "^", "D", "v", "P")
INK = "#777777"
COMPARED = {GUARDED: 0, PSYCOPG: 0, OURS: 1, PGLOCK: 2, PGWARE: 3, DLOCK: 4, WRAPPER: 5, BARE: 5}
SETTINGS = {
    "svg.hashsalt": "django-advisory-lock",
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def look(name: str, number: int) -> int:
    """Return which colour and shape a line has: whoever is compared has the same in every picture."""
    return COMPARED.get(name, number % len(COLOURS))


def draw(plot: Plot, path: Path) -> None:
    with drawing(plot) as axes:
        if plot.x:
            draw_lines(axes, plot)
        else:
            draw_bars(axes, plot)
        axes.set_title(plot.title, loc="left", fontsize=12)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        path.parent.mkdir(exist_ok=True)
        # The two would change with the day, and with the version of matplotlib.
        axes.figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


@contextmanager
def drawing(plot: Plot) -> Iterator[Any]:
    matplotlib: Any = importlib.import_module("matplotlib")
    with matplotlib.rc_context(SETTINGS):
        figure: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(9.5, 4.2), layout="constrained")
        yield figure.subplots()


def draw_lines(axes: Any, plot: Plot) -> None:
    for number, (name, points) in enumerate(plot.lines.items()):
        places = [place for place, _ in points]
        heights = [spread.median for _, spread in points]
        quartiles = [
            [spread.median - spread.low for _, spread in points],
            [spread.high - spread.median for _, spread in points],
        ]
        style = {"color": COLOURS[look(name, number)], "marker": MARKERS[look(name, number)], "linewidth": 1.8}
        axes.errorbar(places, heights, yerr=quartiles, label=name, capsize=2.5, elinewidth=0.8, **style)
    if plot.logarithmic:
        axes.set_xscale("symlog", linthresh=10)
    ticks = sorted({place for points in plot.lines.values() for place, _ in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)


def draw_bars(axes: Any, plot: Plot) -> None:
    places = list(dict.fromkeys(place for points in plot.lines.values() for place, _ in points))
    width = 0.8 / len(plot.lines)
    for number, (name, points) in enumerate(plot.lines.items()):
        left = [places.index(place) + (number - (len(plot.lines) - 1) / 2) * width for place, _ in points]
        heights = [spread.median for _, spread in points]
        quartiles = [
            [spread.median - spread.low for _, spread in points],
            [spread.high - spread.median for _, spread in points],
        ]
        bars = {"color": COLOURS[look(name, number)], "error_kw": {"ecolor": INK, "elinewidth": 0.8}}
        axes.bar(left, heights, width * 0.92, yerr=quartiles, label=name, **bars)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xticks(
        range(len(places)),
        [place.replace("`", "").replace(", ", ",\n").replace(" that ", "\nthat ") for place in places],
    )
    axes.set_ylabel(plot.y)
