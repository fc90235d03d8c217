"""What a dedicated session costs, and how soon the loss of many is noticed.

    python -m benchmarks.dedicated [--rounds N] [--sessions N]

The times of a pair of acquire and release are medians, a plain and a dedicated one in turn. Of the sessions as many
are opened as the server has room for.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import statistics
import threading
import time

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
django.setup()

from django.db import connection  # noqa: E402

from django_advisory_lock import LockLost, advisory_lock  # noqa: E402

NAME = "benchmark-dedicated"


def pair(dedicated: bool) -> float:
    start = time.perf_counter()
    advisory_lock(NAME, dedicated=dedicated).acquire().release()
    return (time.perf_counter() - start) * 1e6


def measure_pairs(rounds: int) -> None:
    times = [(pair(False), pair(True)) for _ in range(rounds)]
    plain, dedicated = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"acquire and release: plain {plain:.0f} µs, dedicated {dedicated:.0f} µs")


def room() -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT CAST(current_setting('max_connections') AS int)"
            " - CAST(current_setting('superuser_reserved_connections') AS int) - count(*)"
            " FROM pg_stat_activity WHERE backend_type = 'client backend'"
        )
        return int(cursor.fetchone()[0])


def state() -> tuple[int, int]:
    """Return the descriptors and the peak memory in KiB of this process."""
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return descriptors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_losses(sessions: int) -> None:
    before = state()
    locks = [advisory_lock(NAME, number, dedicated=True).acquire() for number in range(sessions)]
    used = [now - then for then, now in zip(before, state(), strict=True)]
    print(f"{sessions} held: {threading.active_count()} threads in all, {used[0]} descriptors and {used[1]} KiB more")
    with connection.cursor() as cursor:
        start = time.perf_counter()
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory'"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
    noticed = sum(lock.lost.wait(10) for lock in locks)
    print(f"{noticed} losses noticed within {(time.perf_counter() - start) * 1000:.0f} ms")
    for lock in locks:
        with contextlib.suppress(LockLost):
            lock.release()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--sessions", type=int, default=1000)
    arguments = parser.parse_args()
    logging.getLogger("django_advisory_lock").setLevel(logging.CRITICAL)  # all those losses are meant
    measure_pairs(arguments.rounds)
    measure_losses(min(arguments.sessions, room() - 10))
    connection.close()
