"""The end of a lock: its release, the savepoint around its body, and the question whether it is still there."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from django.db import Error, connections

from . import hops, pg_locks, savepoints, sessions, sql, transactions
from .exceptions import LockLost
from .notices import logger, names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from django.db.backends.base.base import BaseDatabaseWrapper

    from .holds import Hold
    from .transactions import RawConnection


def release(hold: Hold, savepoint: savepoints.BodySavepoint | None = None, *, raised: bool = False) -> None:
    """Release a session lock, or raise LockLost where it turns out to be gone.

    In a failed transaction nothing can be sent: that is logged, and the next lock operation on the session frees the
    lock.
    """
    session, connection = hold.session, hold.connection()
    with session.mutex:
        if not hold.noted:
            return  # released inside its block
        hold.is_ending = True
        raw = session.raw()
        if raw is None or connection is None or not is_open(hold):
            raise _lost_with_session(hold)
        try:
            if savepoint is not None:
                savepoint.end(connection, raw, raised=raised)
        except BaseException as error:
            _free(hold, connection, raw, error)
            raise
        try:
            answer = _unlock(hold, connection, raw)
        except BaseException as error:
            _free(hold, connection, raw, error)
            if not isinstance(error, Error) or session.is_doubtful(hold.keys, hold.shared):
                raise
            return
        if not answer:
            raise lost(hold, "the server says that this session does not hold it")


def _lost_with_session(hold: Hold) -> LockLost:
    """Forget a lock whose session is not there any more, and tell why."""
    raw, connection = hold.session.raw(), hold.connection()
    # It ended by itself, if its alias still has the connection.
    is_ended = raw is not None and connection is not None and connection.connection is raw
    hold.session.disown(hold)
    if connection is not None:
        sessions.close_if_dead(connection)
    return lost(hold, "its session has ended" if is_ended else "its connection was closed, or replaced by another one")


def _unlock(hold: Hold, connection: BaseDatabaseWrapper, raw: RawConnection) -> bool:
    """Send the release, and tell whether the session held all that it released."""
    if transactions.is_failed(raw):
        hold.session.disown(hold)
        logger.error(
            "The lock %s on %r could not be released in a failed transaction. The next lock operation on this"
            " connection frees it.",
            names(hold.keys),
            hold.using,
        )
        return True
    key, *others = hold.keys
    with _cursor(connection, raw) as cursor:
        if others:
            cursor.execute(sql.unlock_all(hold.shared, hold.pid), pg_locks.arrays(hold.keys))
            answer = bool(cursor.fetchone()[0] == [])
        else:
            numbers, bound = hold.session.place(key)
            cursor.execute(sql.unlock(numbers, hold.shared, hold.pid), bound or None)
            answer = cursor.fetchone()[0] is True
    hold.session.drop(hold)
    if hold.session.abandoned or hold.session.doubts:
        hold.session.settle(connection)
    return answer


def _cursor(connection: BaseDatabaseWrapper, raw: RawConnection) -> AbstractContextManager[Any]:
    """Return Django's cursor; in another thread or in a loop psycopg's, which keeps threads apart itself."""
    if sessions.is_of_this_thread(connection) and not hops.can_wait():
        return savepoints.open_cursor(connection)
    return _plain_cursor(connection, raw)


@contextlib.contextmanager
def _plain_cursor(connection: BaseDatabaseWrapper, raw: RawConnection) -> Iterator[Any]:
    # Django's errors, and its note on the connection that one occurred: it is then looked at before the next request.
    with connection.wrap_database_errors, raw.cursor() as cursor:
        yield cursor


def _free(hold: Hold, connection: BaseDatabaseWrapper, raw: RawConnection, error: BaseException) -> None:
    """Free a lock after a failure: past Django's cursor, or by closing the session, or at the next chance."""
    hold.session.disown(hold)
    hold.session.settle(connection)
    sessions.close_if_dead(connection)
    if isinstance(error, Error) and raw.closed:
        raise lost(hold, "its session has ended") from error


def lost(hold: Hold, reason: str) -> LockLost:
    """Log and return the error for a lock that was gone before its end."""
    message = f"The lock {names(hold.keys)} on {hold.using!r} was lost: {reason}. Others may have held it since."
    logger.error("%s", message)
    return LockLost(message, key=hold.keys[0], using=hold.using)


def is_open(hold: Hold) -> bool:
    """Whether the session of a lock is still there, under its alias."""
    raw, connection = hold.session.raw(), hold.connection()
    return raw is not None and not raw.closed and connection is not None and connection.connection is raw


def commits_later(hold: Hold) -> bool:
    """Whether a transaction that began under a lock, and can still commit, goes on without it."""
    raw, connection = hold.session.raw(), hold.connection()
    if raw is None or connection is None or not transactions.can_commit(raw):
        return False
    return transactions.in_transaction(connection)


def end_body(hold: Hold, savepoint: savepoints.BodySavepoint | None) -> None:
    """End the savepoint of a body whose lock goes on."""
    raw, connection = hold.session.raw(), hold.connection()
    if savepoint is not None and raw is not None and connection is not None:
        savepoint.end(connection, raw, raised=False)


def is_inherited(hold: Hold) -> bool:
    """Whether the lock belongs to the process that this one was forked from."""
    return hold.session.process != os.getpid()


def is_held(hold: Hold) -> bool:
    """Ask the server whether the lock is there now."""
    raw, connection = hold.session.raw(), hold.connection() if hold.is_dedicated else connections[hold.using]
    if connection is None or not hold.may_stand or is_inherited(hold) or raw is None:
        return False
    # Another thread asks over its own connection: any session sees the locks of all.
    if hold.connection() is connection:
        if connection.connection is not raw:
            return False
        if transactions.is_failed(raw):
            return hold.scope == "session"
    try:
        with savepoints.open_cursor(connection) as cursor:
            asked = (pg_locks.MODES[hold.shared], hold.pid, *pg_locks.arrays(hold.keys))
            if hold.start is None:
                cursor.execute(pg_locks.COUNT_HELD, asked)
            else:
                cursor.execute(pg_locks.COUNT_HELD_IN, (*asked, hold.pid, hold.start))
            count: int = cursor.fetchone()[0]
            return count == len(hold.keys)
    except Error:
        if raw.closed:
            return False
        raise


def end_transaction_block(hold: Hold) -> None:
    """Raise LockLost where a transaction lock is gone before its block ends. Asks the server only in doubt."""
    raw = hold.session.raw()
    if raw is None or not is_open(hold) or not hold.noted:
        raise lost(hold, "its transaction has ended")
    # In a failed transaction nothing can be asked, and nothing that was written under the lock is committed.
    if not hold.is_certain and not transactions.is_failed(raw) and not is_held(hold):
        hold.session.drop(hold)
        raise lost(hold, "its transaction, or the savepoint that it was taken in, was ended inside the block")
