"""What it costs the server to list its advisory locks, on a server of its own, and what it costs in all.

python -m benchmarks.listing [--held N] [--waiting N] [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
django.setup()

import psycopg  # noqa: E402
from django.db import connections  # noqa: E402

from django_advisory_lock import sql  # noqa: E402
from django_advisory_lock.inspection import all_locks  # noqa: E402
from tests.server import Server, new_server  # noqa: E402

ALIAS = "listed"


@contextlib.contextmanager
def locks(server: Server, held: int, waiting: int) -> Iterator[None]:
    """Hold that many locks in ten sessions, and have as many sessions wait for the first ones."""
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(server.connect()) for _ in range(10)]
        for number in range(held):
            holders[number % 10].execute("SELECT pg_advisory_lock(%s, %s)", [1, number])
        for number in range(waiting):
            waiter = stack.enter_context(server.connect())
            waiter.pgconn.send_query(f"SELECT pg_advisory_lock(1, {number % held})".encode())
            stack.callback(waiter.close)
        while count(holders[0]) < held + waiting:
            time.sleep(0.01)
        yield
        for holder in holders:
            holder.close()


def count(raw: psycopg.Connection) -> int:
    row = raw.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone()
    return int(row[0]) if row else 0


def server_time() -> float:
    """Return the milliseconds that the server says the query took, its plan included."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql.ALL_LOCKS}")
        (plan,) = json.loads(value) if isinstance(value := cursor.fetchone()[0], str) else value
        return float(plan["Planning Time"] + plan["Execution Time"])


def whole_time() -> float:
    start = time.perf_counter()
    all_locks(ALIAS)
    return (time.perf_counter() - start) * 1000


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    size = str(arguments.waiting + 30)
    with new_server(max_connections=size, max_locks_per_transaction="64") as server, server.alias(ALIAS):
        with locks(server, arguments.held, arguments.waiting):
            print(f"{len(all_locks(ALIAS))} rows: {arguments.held} held, {arguments.waiting} waiting")
            for name, measure in {"in the server": server_time, "in all": whole_time}.items():
                times = [measure() for _ in range(arguments.rounds)]
                print(f"{name:14} median {statistics.median(times):6.1f} ms, longest {max(times):6.1f} ms")
        connections[ALIAS].close()
