"""What a held lock takes: in the server's shared table, in the session, and in the client."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import psycopg
from django.db import connections

from tests.server import Server, new_server

from .libraries import libraries
from .measuring import Effort, Report, Table
from .peers import Peer

CONNECTIONS, LOCKS, MORE = 100, 64, 128
SHARED = "SELECT sum(allocated_size) FROM pg_shmem_allocations"
LOCAL = "SELECT sum(total_bytes) FROM pg_backend_memory_contexts WHERE name ~ 'LOCALLOCK|TopMemoryContext'"
ROOM = """SELECT CAST(current_setting('max_locks_per_transaction') AS int)
 * (CAST(current_setting('max_connections') AS int) + CAST(current_setting('max_prepared_transactions') AS int))"""


def one(raw: psycopg.Connection[Any], statement: str) -> int:
    row = raw.execute(statement.encode()).fetchone()
    return int(row[0]) if row else 0


def server_memory(locks: int) -> tuple[int, int, int, float]:
    """Return the bytes of a server's shared memory, the locks that the rule promises, those that it took, and the bytes
    that a session takes for each lock of its own.
    """
    settings = {"max_connections": str(CONNECTIONS), "max_locks_per_transaction": str(locks)}
    with new_server(**settings) as server:
        with server.connect() as raw:
            shared, room = one(raw, SHARED), one(raw, ROOM)
        local = session_memory(server)  # before the table is full
        return shared, room, fill(server), local


def fill(server: Server) -> int:
    """Take locks until the table is full, and return how many there were."""
    with server.connect() as raw:
        with contextlib.suppress(psycopg.errors.OutOfMemory):
            raw.execute("SELECT pg_advisory_lock(k) FROM generate_series(1, 1000000) AS k")
        return one(raw, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")


def session_memory(server: Server, number: int = 5000) -> float:
    with server.connect() as raw:
        raw.execute("SELECT pg_advisory_lock(0)")
        before = one(raw, LOCAL)
        raw.execute("SELECT count(pg_advisory_lock(k)) FROM generate_series(1, %s) AS k", [number])
        return (one(raw, LOCAL) - before) / number


def client_memory(peer: Peer, number: int) -> float | None:
    """Return the bytes that a held lock takes in the process that holds it."""
    form: Callable[[Any, str], Any] | None = peer.attempt
    if form is None:
        return None
    with contextlib.ExitStack() as stack:
        bool(stack.enter_context(form(920_000, "default")))
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for key in range(920_001, 920_001 + number):
                bool(stack.enter_context(form(key, "default")))
            gc.collect()
            return (tracemalloc.get_traced_memory()[0] - before) / number
        finally:
            tracemalloc.stop()


def run(effort: Effort) -> Report:
    number = effort.pick(1000, 10)
    found = {str(peer): client_memory(peer, number) for peer in libraries() if peer.uses_django}
    connections.close_all()
    rows = [[f"the client, {name}", f"{value:,.0f}"] for name, value in found.items() if value is not None]
    small, large = server_memory(LOCKS), server_memory(MORE)
    a_lock = (large[0] - small[0]) / (large[2] - small[2])
    rows = [
        ["the server's shared memory", f"{a_lock:,.0f}"],
        ["the server session that holds it, of its own memory", f"{small[3]:,.0f}"],
        *rows,
    ]
    room = [[f"{CONNECTIONS} × {locks}", f"{of[1]:,}", f"{of[2]:,}"] for locks, of in ((LOCKS, small), (MORE, large))]
    return Report(
        [
            Table("memory", ["where", "bytes a lock"], rows),
            Table(
                "room", ["`max_connections` × `max_locks_per_transaction`", "promised", "taken until it was full"], room
            ),
        ],
        [],
        {"promised": [small[1], large[1]], "taken": [small[2], large[2]], "a lock": a_lock, "session": small[3]},
    )
