"""Ending a session that holds advisory locks, or waits for one.

See https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADMIN-SIGNAL
"""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

from django.db import Error, connections, transaction
from django.utils import timezone

from . import pg_locks, sessions
from .inspection import EPOCH

if TYPE_CHECKING:
    from .inspection import KeyLock


class Outcome(Enum):
    """What became of a session that was to be ended."""

    ENDED = "ended"
    STAYS = "stays"  # it was told to end, and has not done so in time
    GONE = "gone"  # nothing was ended: it was gone, or neither holds nor waits for a lock of this database any more


def start_of(lock: KeyLock) -> int | None:
    """Return the start of a session in microseconds, which tells it from others that had its pid.

    None is that of a prepared transaction, or of a session that this role may not look into.
    """
    start = lock.backend_start
    if start is None:
        return None
    aware = timezone.make_aware(start, timezone.get_default_timezone()) if timezone.is_naive(start) else start
    return (aware - EPOCH) // timedelta(microseconds=1)


def own_sessions() -> set[tuple[int, int]]:
    """Return pid and start of each session that this thread has open on a PostgreSQL server, on whatever alias."""
    found = set()
    for connection in connections.all(initialized_only=True):
        if connection.vendor == "postgresql" and connection.connection is not None:
            try:
                with connection.cursor() as cursor:
                    cursor.execute(pg_locks.OWN_SESSION)
                    found.update(cursor.fetchall())
            except Error:
                continue  # it is dead, or its transaction has failed
    return found


def end_session(pid: int, start: int | None, using: str, *, timeout: float) -> Outcome:
    """End a session, but never the one that this is asked over, and wait for its end, at most `timeout` seconds.

    `start` is what `start_of()` returned of it: None for one that this role may not look into.

    Raises the database's `ProgrammingError` where the role may not end it: that takes the session's own role, or
    `pg_signal_backend`, and a superuser where it is a superuser's.
    """
    # The error leaves a transaction that is open usable.
    with transaction.atomic(using=using), sessions.connection_for(using).cursor() as cursor:
        cursor.execute(pg_locks.END_SESSION, [round(timeout * 1000), pid, start])
        row = cursor.fetchone()
    if row is None:
        return Outcome.GONE
    return Outcome.ENDED if row[0] else Outcome.STAYS
