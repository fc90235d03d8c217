"""How the cost of one lock grows with what else there is: keys that are held, sessions that are open or that wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
from django.db import connections

from django_advisory_lock import advisory_lock, lock_key
from tests.support import extra_alias, parameters, wait_until

from . import bare
from .measuring import Effort, Measure, Plot, Report, Spread, Table, interleave, microseconds, ratio, timed
from .peers import BARE, OURS, execute

OTHER = 910_000
HELD, SESSIONS = (0, 100, 1000, 5000), (0, 20, 50, 100)
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s"


def pair(alias: str) -> dict[str, Callable[[], float]]:
    """Return the two that are compared on one connection."""
    of_django = bare.with_django().lock
    assert of_django is not None
    number = lock_key("benchmark-growth", alias).args[0]

    def ours() -> None:
        with advisory_lock("benchmark-growth", alias, using=alias):
            pass

    def theirs() -> None:
        with of_django(number, alias):
            pass

    return {OURS: timed(ours), BARE: timed(theirs)}


def with_held(effort: Effort) -> dict[int, dict[str, list[float]]]:
    """Measure on sessions that hold so many locks each, side by side."""
    with contextlib.ExitStack() as stack:
        measures: dict[str, Measure] = {}
        sizes: Sequence[int] = effort.pick(HELD, HELD[:2])
        for size in sizes:
            alias = stack.enter_context(extra_alias(f"held{size}"))
            for number in range(size):
                stack.enter_context(advisory_lock(OTHER + 10_000 * size + number, using=alias))
            measures |= {f"{name} {size}": measure for name, measure in pair(alias).items()}
        found = interleave(measures, effort.scaled(0.25))
    return {size: {name: found[f"{name} {size}"] for name in (OURS, BARE)} for size in sizes}


@contextlib.contextmanager
def idle(number: int) -> Iterator[None]:
    """Keep so many sessions open."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(psycopg.connect(**parameters(), autocommit=True))
        yield


@contextlib.contextmanager
def waiting(number: int) -> Iterator[None]:
    """Have so many sessions wait for another key."""
    with psycopg.connect(**parameters(), autocommit=True) as holder, contextlib.ExitStack() as stack:
        holder.execute("SELECT pg_advisory_lock(%s)", [OTHER])
        for _ in range(number):
            waiter = psycopg.connect(**parameters(), autocommit=True)
            stack.callback(waiter.close)
            waiter.pgconn.send_query(f"SELECT pg_advisory_lock({OTHER})".encode())
        wait_until(lambda: execute("default", WAITING, [OTHER]) == number, "waiters")
        yield
    # The next one gets the lock, finds that its client has gone, and so on.
    wait_until(lambda: execute("default", WAITING, [OTHER]) == 0, "the end of the waiters")


def beside(effort: Effort, others: Callable[[int], Any]) -> dict[int, dict[str, list[float]]]:
    """Measure while there are so many other sessions; several times around, as a size cannot be interleaved."""
    found: dict[int, dict[str, list[float]]] = {}
    rounds = effort.scaled(0.05)
    for _ in range(effort.pick(3, 1)):
        for size in effort.pick(SESSIONS, SESSIONS[:2]):
            with others(size):
                for name, values in interleave(pair("default"), rounds).items():
                    found.setdefault(size, {}).setdefault(name, []).extend(values)
    return found


def run(effort: Effort) -> Report:
    parts = {
        "locks that the session holds": with_held(effort),
        "other sessions, idle": beside(effort, idle),
        "other sessions that wait for another key": beside(effort, waiting),
    }
    connections.close_all()
    rows, lines, figures = [], {}, {}
    for what, found in parts.items():
        least = microseconds(found[0][OURS])
        for size, of_size in found.items():
            against = ratio(of_size, OURS, BARE)
            grown = microseconds(of_size[OURS]) / least
            rows.append([what, f"{size:,}", f"{grown:.2f}", str(against)])
            figures[f"{what} {size}"] = {"grown": grown, "ratio": against.median}
        values = [(size, Spread.of([value / least * 1e6 for value in each[OURS]])) for size, each in found.items()]
        lines[what] = values
    header = ["", "how many", "cost, against none", f"against {BARE} at the same time"]
    plot = Plot(
        "growth", "One lock, with more and more else", "times the cost with none", lines, x="how many", logarithmic=True
    )
    return Report([Table("growth", header, rows)], [plot], figures)
