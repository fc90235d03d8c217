"""The end of a lock: its release, the savepoint around its body, and the question whether it is still there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from django.db import Error, connections

from . import sessions, sql, transactions
from .exceptions import LockLost
from .notices import logger

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from .sessions import Hold, RawConnection


def release(hold: Hold, savepoint: transactions.BodySavepoint | None = None, *, raised: bool = False) -> None:
    """Release a session lock, or raise LockLost where it turns out to be gone.

    In a failed transaction nothing can be sent: that is logged, and the next lock operation on the session frees the
    lock.
    """
    session, connection = hold.session, hold.connection()
    with session.mutex:
        if not hold.noted:
            return  # released inside its block
        raw = session.raw()
        if raw is None or raw.closed or connection is None or connection.connection is not raw:
            session.disown(hold)
            if connection is not None:
                sessions.close_if_dead(connection)
            raise lost(hold, "its connection was closed, or replaced by another one")
        try:
            if savepoint is not None:
                savepoint.end(connection, raw, raised=raised)
        except BaseException:
            _free(hold, connection)
            raise
        try:
            answer = _unlock(hold, connection, raw)
        except BaseException as error:
            _free(hold, connection)
            if isinstance(error, Error) and raw.closed:
                raise lost(hold, "its session has ended") from error
            if not isinstance(error, Error) or session.is_doubtful(hold.key, hold.shared):
                raise
            return
        if answer is not True:
            raise lost(hold, "the server says that this session does not hold it")


def _unlock(hold: Hold, connection: BaseDatabaseWrapper, raw: RawConnection) -> object:
    if transactions.is_failed(raw):
        hold.session.disown(hold)
        logger.error(
            "The lock %r on %r could not be released in a failed transaction. The next lock operation on this"
            " connection frees it.",
            hold.key.name,
            hold.using,
        )
        return True
    with transactions.open_cursor(connection) as cursor:
        cursor.execute(sql.unlock(len(hold.key.args), hold.shared, hold.pid), hold.key.args)
        answer: object = cursor.fetchone()[0]
    hold.session.drop(hold)
    if hold.session.abandoned or hold.session.doubts:
        hold.session.settle(connection)
    return answer


def _free(hold: Hold, connection: BaseDatabaseWrapper) -> None:
    """Free a lock after a failure: past Django's cursor, or by closing the session, or at the next chance."""
    hold.session.disown(hold)
    hold.session.settle(connection)
    sessions.close_if_dead(connection)


def lost(hold: Hold, reason: str) -> LockLost:
    """Log and return the error for a lock that was gone before its end."""
    message = f"The lock {hold.key.name!r} on {hold.using!r} was lost: {reason}. Others may have held it since."
    logger.error("%s", message)
    return LockLost(message, key=hold.key, using=hold.using)


def is_inherited(hold: Hold) -> bool:
    """Whether the lock belongs to the process that this one was forked from."""
    return hold.session.process != os.getpid()


def is_held(hold: Hold) -> bool:
    """Ask the server whether the lock is there now."""
    raw, connection = hold.session.raw(), connections[hold.using]
    if not hold.may_stand or is_inherited(hold) or raw is None:
        return False
    # Another thread asks over its own connection: any session sees the locks of all.
    if hold.connection() is connection:
        if connection.connection is not raw or (hold.scope == "transaction" and transactions.is_idle(raw)):
            return False
        if transactions.is_failed(raw):
            return hold.scope == "session"
    try:
        with transactions.open_cursor(connection) as cursor:
            row = (hold.pid, sql.MODES[hold.shared], *hold.key.pg_locks)
            if hold.start is None:
                cursor.execute(sql.IS_HELD, row)
            else:
                cursor.execute(sql.IS_HELD_IN, (*row, hold.start))
            return bool(cursor.fetchone()[0])
    except Error:
        if raw.closed:
            return False
        raise


def end_transaction_block(hold: Hold) -> None:
    """Raise LockLost where a transaction lock is gone before its block ends. Asks the server only in doubt."""
    raw, connection = hold.session.raw(), hold.connection()
    is_open = raw is not None and not raw.closed and connection is not None and connection.connection is raw
    if raw is None or not is_open or not hold.noted:
        raise lost(hold, "its transaction has ended")
    # In a failed transaction nothing can be asked, and nothing that was written under the lock is committed.
    if not hold.is_certain and not transactions.is_failed(raw) and not is_held(hold):
        hold.session.drop(hold)
        raise lost(hold, "its transaction, or the savepoint that it was taken in, was ended inside the block")
