"""Whether a connection pooler stands in front of the server, and in which mode.

Behind PgBouncer, in whatever mode, a connection was told another process id than that of the server session that
answers. That two clients share a server session, or one client changes it, proves transaction mode; that they do not
proves nothing. https://www.pgbouncer.org/features.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from .findings import Finding

if TYPE_CHECKING:
    from .visits import Session

ROUNDS = 3
PID = "SELECT pg_backend_pid()"
MODES = "SHOW DATABASES and SHOW POOLS on PgBouncer's console tell the mode."


def is_pooled(session: Session) -> bool:
    """Whether something between answers under another process id than the server."""
    return bool(session.one(PID) != session.raw.info.backend_pid)


def find_mode(pair: tuple[Session, Session]) -> str | None:
    """Return "transaction" or "statement" where that mode is proved, else None."""
    first, second = pair
    for _ in range(ROUNDS):
        before = first.one(PID)
        try:
            second.rows("BEGIN")
        except psycopg.OperationalError as error:
            if "statement pooling" not in str(error):  # "transaction blocks not allowed in statement pooling mode"
                raise
            return "statement"
        # If it is the same session, the first one would have to wait for it now.
        is_shared = second.one(PID) == before
        is_changed = not is_shared and first.one(PID) != before
        second.rows("COMMIT")
        if is_shared or is_changed:
            return "transaction"
    return None


def judge_direct(alias: str, is_named: bool) -> Finding:
    """Judge a connection without a pooler."""
    if not is_named:
        return Finding("pooler", "ok", "No connection pooler was seen in front of the server.")
    return Finding(
        "pooler",
        "note",
        f"ADVISORY_LOCK_SESSION_POOLER names {alias!r}, and no connection pooler was seen in front of the server.",
        "Session locks are not guarded there: should a pooler in transaction mode come between, two would be let in.",
        f"Take {alias!r} out of ADVISORY_LOCK_SESSION_POOLER, unless its pooler passes the server's process id on.",
    )


def judge_pooler(alias: str, mode: str | None, is_named: bool) -> Finding:
    """Judge a connection through a pooler: its mode, as far as that is proved, and what the settings say of it."""
    if mode == "statement":
        return Finding(
            "pooler",
            "error",
            "A connection pooler in statement mode stands in front of the server.",
            "It refuses every transaction, so there can be no transaction lock, and session locks are lost on it.",
            "Let ADVISORY_LOCK_DATABASE name an alias that reaches the server directly.",
        )
    if is_named:
        return _judge_named(alias, mode)
    text = " in transaction mode" if mode else ""
    named = "" if mode else " If it is in session mode, name the alias in ADVISORY_LOCK_SESSION_POOLER."
    return Finding(
        "pooler",
        "warning",
        f"A connection pooler{text} stands in front of the server.",
        "Session locks are refused here with PoolerDetected, those of management commands too. Transaction locks,"
        " inside atomic(), work.",
        f"Lock inside atomic(), or let ADVISORY_LOCK_DATABASE name an alias that reaches the server directly.{named}",
    )


def _judge_named(alias: str, mode: str | None) -> Finding:
    if mode is None:
        return Finding(
            "pooler",
            "note",
            f"A connection pooler stands in front of the server, and ADVISORY_LOCK_SESSION_POOLER names {alias!r}.",
            "In session mode that is right. The mode cannot be proved from here; nothing spoke against it.",
            MODES,
        )
    return Finding(
        "pooler",
        "error",
        f"A connection pooler in transaction mode stands in front of the server, and ADVISORY_LOCK_SESSION_POOLER names"
        f" {alias!r}.",
        "Session locks are taken there without a guard: two can be in at once, and a lock may stay behind for good.",
        f"Take {alias!r} out of ADVISORY_LOCK_SESSION_POOLER, and lock inside atomic() or on an alias that reaches the"
        f" server directly. {MODES}",
    )
