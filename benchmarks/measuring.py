"""How the benchmarks compare: in rounds, one right after the other, so that what slows the machine slows all alike."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True)
class Table:
    """A table of the report; `name` is that of its place in the docs."""

    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Plot:
    """Lines over an axis, or bars where there is none; a point is where it stands, its height, and its quartiles."""

    name: str
    title: str
    y: str
    lines: Mapping[str, Sequence[tuple[Any, Spread]]]
    x: str = ""
    logarithmic: bool = False


@dataclass
class Report:
    """What a part of the benchmarks found; `figures` are the numbers behind its tables, by name."""

    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    load: tuple[float, float] = (0.0, 0.0)  # of the machine, before and after


@dataclass(frozen=True)
class Effort:
    """How much is measured: a quick run only shows that everything works."""

    rounds: int
    quick: bool

    def scaled(self, share: float) -> int:
        """Return a part of the rounds, for what takes longer."""
        return max(2, round(self.rounds * share))

    def pick(self, whole: Any, quick: Any) -> Any:
        return quick if self.quick else whole


Measure = Callable[[], float]


def interleave(measures: Mapping[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Make each measurement once a round, in an order that changes, and return them; the first rounds warm up."""
    order = list(measures)
    found: dict[str, list[float]] = {name: [] for name in measures}
    shuffle = random.Random(1).shuffle
    for number in range(-max(1, rounds // 10), rounds):
        shuffle(order)
        for name in order:
            value = measures[name]()
            if number >= 0:
                found[name].append(value)
    return found


def timed(function: Callable[[], Any], best_of: int = 1) -> Measure:
    """Return what measures the seconds that a function takes, the best of some calls."""

    def measure() -> float:
        times = []
        for _ in range(best_of):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)

    return measure


def timed_in(loop: asyncio.AbstractEventLoop, function: Callable[[], Awaitable[Any]]) -> Measure:
    """Do the same for a coroutine function, without the time to start a task."""

    async def time_it() -> float:
        start = time.perf_counter()
        await function()
        return time.perf_counter() - start

    return lambda: loop.run_until_complete(time_it())


def ratio(found: Mapping[str, Sequence[float]], name: str, to: str) -> Spread:
    """Return the median of the ratios within the rounds."""
    return Spread.of([ours / theirs for ours, theirs in zip(found[name], found[to], strict=True)])


def microseconds(values: Sequence[float]) -> float:
    return statistics.median(values) * 1e6


def jain(counts: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 where all got the same, 1/n where one of n got everything."""
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0
