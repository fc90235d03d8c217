"""What a lock costs: ours against the two bare statements, interleaved on one connection.

    python -m benchmarks.pair [--rounds N]

Each round times one pair of acquire and release in every form, one right after the other, so that whatever slows the
machine slows all of them alike. Printed are medians of the ratios within the rounds; the times are for orientation
only.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
django.setup()

from django.db import connection, transaction  # noqa: E402

from benchmarks.measuring import compare, rounds  # noqa: E402
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


if __name__ == "__main__":
    compare(COMPARISONS, rounds(__doc__, 3000))
    connection.close()
