"""What a dedicated session costs, how soon the loss of many is noticed, and what it costs to list all locks."""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import threading
import time
from collections.abc import Iterator

from django.db import connection, connections

from django_advisory_lock import LockKey, LockLost, advisory_lock, pg_locks
from django_advisory_lock.inspection import all_locks
from tests.server import Server, new_server
from tests.support import wait_until

from .measuring import Effort, Report, Table, interleave, ratio, timed
from .peers import execute

NAME, ALIAS = "benchmark-dedicated", "listed"
FIRST = 930_000  # of the pairs of ints that are keys here
TERMINATE = f"""SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2
 AND classid = {FIRST} AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""


def held(*, dedicated: bool) -> None:
    advisory_lock(NAME, dedicated=dedicated).acquire().release()


def losses(sessions: int) -> tuple[int, int, float]:
    """Return how many threads watch so many sessions, how many losses were noticed, and within how many seconds."""
    locks = [advisory_lock(LockKey.pair(FIRST, number), dedicated=True).acquire() for number in range(sessions)]
    threads = sum(thread.name == "django_advisory_lock" for thread in threading.enumerate())
    start = time.perf_counter()
    execute("default", TERMINATE)
    noticed = sum(lock.lost.wait(10) for lock in locks)
    seconds = time.perf_counter() - start
    for lock in locks:
        with contextlib.suppress(LockLost):
            lock.release()
    return threads, noticed, seconds


def dedicated(effort: Effort) -> Report:
    found = interleave(
        {"plain": timed(lambda: held(dedicated=False)), "dedicated": timed(lambda: held(dedicated=True))},
        effort.scaled(0.1),
    )
    logger = logging.getLogger("django_advisory_lock")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # all those losses are meant
    try:
        sessions = effort.pick(100, 5)
        threads, noticed, seconds = losses(sessions)
    finally:
        logger.setLevel(level)
    connection.close()
    times = {name: statistics.median(values) * 1e6 for name, values in found.items()}
    rows = [
        ["a dedicated lock against a plain one", str(ratio(found, "dedicated", "plain"))],
        ["the two, µs", f"{times['dedicated']:,.0f} and {times['plain']:,.0f}"],
        [f"{sessions} sessions ended at once: losses noticed", f"{noticed}, within {seconds * 1000:.0f} ms"],
        [f"threads that watch {sessions} sessions", str(threads)],
    ]
    figures = {"ratio": ratio(found, "dedicated", "plain").median, "noticed": noticed, "of": sessions}
    return Report([Table("dedicated", ["", "dedicated sessions"], rows)], [], figures)


@contextlib.contextmanager
def locks(server: Server, held: int, waiting: int) -> Iterator[None]:
    """Hold that many locks in ten sessions, and have as many sessions wait for the first ones."""
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(server.connect()) for _ in range(10)]
        for number, holder in enumerate(holders):
            holder.execute(
                "SELECT count(pg_advisory_lock(1, k)) FROM generate_series(%s, %s, 10) k", [number, held - 1]
            )
        for number in range(waiting):
            waiter = server.connect()
            stack.callback(waiter.close)
            waiter.pgconn.send_query(f"SELECT pg_advisory_lock(1, {number % held})".encode())
        count = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        wait_until(lambda: execute(ALIAS, count) == held + waiting, "locks")
        yield


def server_time() -> float:
    """Return the seconds that the server says the query took, its plan included."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {pg_locks.ALL_LOCKS}")
        value = cursor.fetchone()[0]
        (plan,) = json.loads(value) if isinstance(value, str) else value
        return float(plan["Planning Time"] + plan["Execution Time"]) / 1000


def listing(effort: Effort) -> Report:
    """List all locks of a server of its own."""
    rows, figures = [], {}
    sizes = effort.pick(((100, 20), (1000, 20), (1000, 200), (10_000, 200)), ((100, 20),))
    most = max(waiting for _, waiting in sizes)
    with new_server(max_connections=str(most + 30), max_locks_per_transaction="128") as server, server.alias(ALIAS):
        for held, waiting in sizes:
            with locks(server, held, waiting):
                found = interleave({"server": server_time, "all": timed(lambda: all_locks(ALIAS))}, effort.pick(20, 2))
                listed = len(all_locks(ALIAS))
            connections[ALIAS].close()
            wait_until(lambda: not all_locks(ALIAS), "no locks")
            medians = [f"{statistics.median(found[name]) * 1000:.1f}" for name in ("server", "all")]
            rows.append([f"{held:,}", str(waiting), *medians])
            figures[f"{held} {waiting}"] = listed
        connections[ALIAS].close()
    return Report([Table("listing", ["held", "waiting", "in the server, ms", "in all, ms"], rows)], [], figures)
