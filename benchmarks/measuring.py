"""How the benchmarks compare: in rounds, one right after the other, so that what slows the machine slows both."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Comparisons = Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]]
Pair = tuple[float, float]


def rounds(description: str | None, default: int) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=default)
    number: int = parser.parse_args().rounds
    return number


def compare(comparisons: Comparisons, rounds: int) -> None:
    """Time functions against each other and print the medians of the ratios."""
    times: dict[str, list[Pair]] = {name: [] for name in comparisons}
    for number in range(-rounds // 10, rounds):  # the first ones only warm up
        for name, (ours, theirs) in comparisons.items():
            pair = (_timed(ours), _timed(theirs)) if number % 2 else (_timed(theirs), _timed(ours))[::-1]
            if number >= 0:
                times[name].append(pair)
    _report(times)


async def acompare(comparisons: Mapping[str, tuple[Callable[[], Awaitable[None]], ...]], rounds: int) -> None:
    """Do the same with coroutine functions, in one task."""
    times: dict[str, list[Pair]] = {name: [] for name in comparisons}
    for number in range(-rounds // 10, rounds):
        for name, functions in comparisons.items():
            took = [0.0, 0.0]
            for index in (0, 1) if number % 2 else (1, 0):
                start = time.perf_counter()
                await functions[index]()
                took[index] = time.perf_counter() - start
            if number >= 0:
                times[name].append((took[0], took[1]))
    _report(times)


def _timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _report(times: Mapping[str, list[Pair]]) -> None:
    print(f"{'':36}{'ratio':>7}{'ours':>9}{'bare':>9}   medians, times in µs")
    for name, pairs in times.items():
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        ours, theirs = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
        print(f"{name:36}{ratio:7.2f}{ours:9.0f}{theirs:9.0f}   {len(pairs)} rounds")
