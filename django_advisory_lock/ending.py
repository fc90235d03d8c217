"""The end of somebody else's session, and with it of the locks that it holds or waits for."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from django.db import ProgrammingError, transaction
from psycopg.errors import InsufficientPrivilege

from . import conf, sessions, sql

if TYPE_CHECKING:
    from datetime import datetime

PATIENCE = 5.0  # seconds for a session to end in


class Outcome(Enum):
    """What became of a session that was to be ended."""

    ENDED = "ended"
    GONE = "gone"  # before it was told to end; or it holds and waits for nothing any more
    STAYS = "stays"  # it was told to, and has not done so yet
    DENIED = "denied"  # this role may not end it


def session_start(pid: int, using: str | None = None) -> datetime | None:
    """Return when a session began, which tells it from a later one with its pid; None where this role may not know."""
    row = _session(pid, using)
    return row[0] if row else None


def _session(pid: int, using: str | None) -> tuple[datetime | None] | None:
    with sessions.connection_for(conf.get_database() if using is None else using).cursor() as cursor:
        cursor.execute(sql.SESSION_START, (pid,))
        row: tuple[datetime | None] | None = cursor.fetchone()
    return row


def end_session(pid: int, started: datetime | None, using: str | None = None, patience: float = PATIENCE) -> Outcome:
    """End a session that holds an advisory lock of a database, or waits for one, and no other.

    `started` is what `session_start()` said when it was looked at. It is waited for until it has ended, for `patience`
    seconds. See https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADMIN-SIGNAL.
    """
    alias = conf.get_database() if using is None else using
    try:
        with transaction.atomic(using=alias), sessions.connection_for(alias).cursor() as cursor:
            cursor.execute(sql.END_SESSION, (round(patience * 1000), pid, started))
            row = cursor.fetchone()
    except ProgrammingError as error:
        if isinstance(error.__cause__, InsufficientPrivilege):
            return Outcome.DENIED
        raise
    if row is None:
        return Outcome.GONE
    # False also where it ended by itself right before it was told to.
    return Outcome.ENDED if row[0] or _session(pid, alias) is None else Outcome.STAYS
