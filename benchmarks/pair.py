"""What a lock costs: ours against the two bare statements, interleaved on one connection.

    python -m benchmarks.pair [--rounds N]

Each round times one pair of acquire and release in every form, one right after the other, so that whatever slows the
machine slows all of them alike. Printed are medians of the ratios within the rounds; the times are for orientation
only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
django.setup()

from django.db import connection, transaction  # noqa: E402

from django_advisory_lock import advisory_lock, lock_key, try_advisory_lock  # noqa: E402

NAME = "benchmark-pair"
KEY = lock_key(NAME).args[0]


def bare() -> None:
    """The two statements through Django's cursor, as a hand-written helper sends them."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [KEY])
        cursor.fetchone()
    try:
        pass
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [KEY])
            cursor.fetchone()


def bare_transaction() -> None:
    """One transaction with the one statement that a transaction lock takes."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [KEY])
        cursor.fetchone()


LOCK = advisory_lock(NAME)


def reused() -> None:
    with LOCK:
        pass


def wait() -> None:
    with advisory_lock(NAME):
        pass


def wait_with_timeout() -> None:
    with advisory_lock(NAME, timeout=5):
        pass


def attempt() -> None:
    with try_advisory_lock(NAME) as lock:
        assert lock


@advisory_lock(NAME)
def decorated() -> None:
    pass


def in_transaction() -> None:
    with transaction.atomic(), advisory_lock(NAME):
        pass


COMPARISONS: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "a lock made once": (reused, bare),
    "@advisory_lock(…)": (decorated, bare),
    "advisory_lock(…)": (wait, bare),
    "advisory_lock(…, timeout=5)": (wait_with_timeout, bare),
    "try_advisory_lock(…)": (attempt, bare),
    "advisory_lock(…) in atomic()": (in_transaction, bare_transaction),
}


def timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(rounds: int) -> None:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMPARISONS}
    for round_number in range(rounds + rounds // 10):
        for name, (ours, theirs) in COMPARISONS.items():
            pair = (timed(ours), timed(theirs)) if round_number % 2 else (timed(theirs), timed(ours))[::-1]
            if round_number >= rounds // 10:  # the first ones only warm up
                times[name].append(pair)
    print(f"{'':32}{'ratio':>7}{'ours':>9}{'bare':>9}   median of {rounds} rounds, times in µs")
    for name, pairs in times.items():
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        ours, theirs = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
        print(f"{name:32}{ratio:7.2f}{ours:9.0f}{theirs:9.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    measure(parser.parse_args().rounds)
    connection.close()
