"""What a failed attempt to take a lock is called, in the words of the errors of this library."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from .exceptions import LockDeadlock, LockNotAcquired, LockTableFull, LockTimeout, PoolerDetected
from .inspection import describe_holders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .inspection import KeyLock
    from .keys import LockKey

LOCK_NOT_AVAILABLE = "55P03"
QUERY_CANCELED = "57014"
DEADLOCK_DETECTED = "40P01"
OUT_OF_MEMORY = "53200"


class Facts(TypedDict):
    """What every error of an attempt knows."""

    key: LockKey
    using: str
    waited: float


def sqlstate(error: BaseException) -> str | None:
    """Return PostgreSQL's code of an error, which Django keeps as the cause of its own."""
    return getattr(error.__cause__, "sqlstate", None)


def timed_out(
    facts: Facts, keys: Sequence[LockKey], timeout: float, locks: Sequence[KeyLock], *, shared: bool
) -> LockTimeout:
    """Return the error for locks that were busy for as long as the caller would wait."""
    busy = [key for key in keys if any(lock.key == key and lock.blocks(shared=shared) for lock in locks)]
    key = busy[0] if busy else keys[0]
    numbers = ", ".join(map(str, key.args))
    within = f"was not free within {timeout:g} s" if timeout else "is busy"
    holders = describe_holders([lock for lock in locks if lock.key == key], shared=shared)
    among = "" if len(keys) == 1 else f" (one of {len(keys)})"
    facts["key"] = key
    error = LockTimeout(f"The lock {key.name!r} ({numbers}){among} on {facts['using']!r} {within}: {holders}.", **facts)
    error.holders = tuple(lock for lock in locks if lock.key == key and lock.blocks(shared=shared))
    return error


def no_slot(facts: Facts, limit: int, timeout: float, locks: Sequence[KeyLock]) -> LockTimeout:
    """Return the error for a semaphore whose slots were all taken."""
    within = f"was free within {timeout:g} s" if timeout else "is free"
    held = [f"this session ({lock})" if lock.own else str(lock) for lock in locks if lock.granted]
    error = LockTimeout(
        f"None of the {limit} slots of {facts['key'].name!r} on {facts['using']!r} {within}:"
        f" {'held by ' + '; '.join(held) if held else 'holder unknown'}.",
        **facts,
    )
    error.holders = tuple(lock for lock in locks if lock.granted)
    return error


def endless_wait(facts: Facts, where: str) -> LockDeadlock:
    """Return the error for a wait that this process itself would keep from ending."""
    lock = f"the lock {facts['key'].name!r} on {facts['using']!r}"
    return LockDeadlock(f"Waiting for {lock} could never end: it is held {where}.", **facts)


def of_database_error(facts: Facts, error: BaseException) -> LockNotAcquired | None:
    """Return the error of this library for one of the database, or None where that stays as it is."""
    code = sqlstate(error)
    lock = f"The lock {facts['key'].name!r} on {facts['using']!r} was not acquired"
    if code == DEADLOCK_DETECTED:
        return LockDeadlock(f"{lock}: the server ended a deadlock of several waits.", **facts)
    if code == QUERY_CANCELED:
        return LockNotAcquired(f"{lock}: the wait was cancelled, or cut by statement_timeout.", **facts)
    if code == OUT_OF_MEMORY and "max_locks_per_transaction" in _hint(error):
        return LockTableFull(
            f"{lock}: the server's lock table is full. Hold fewer locks at once, or raise max_locks_per_transaction;"
            f" while the table is full, new connections fail too.",
            **facts,
        )
    return None


def not_granted(facts: Facts) -> LockNotAcquired:
    """Return the error for a wait that came to an end without the lock, as PostgreSQL's own never does."""
    return LockNotAcquired(
        f"The lock {facts['key'].name!r} on {facts['using']!r} was not acquired: the server answered the wait without"
        f" granting it, so its pg_advisory_lock() is not PostgreSQL's.",
        **facts,
    )


def pooler_detected(facts: Facts) -> PoolerDetected:
    """Return the error for a statement that reached another server session than its connection was opened with."""
    name, alias = facts["key"].name, facts["using"]
    return PoolerDetected(
        f"The connection {alias!r} goes through a connection pooler, where a session lock excludes nobody; nothing was"
        f" taken. Let ADVISORY_LOCK_DATABASE or `using` name an alias that connects to the server directly; or,"
        f" where one transaction is all it is for, take {name!r} inside atomic() on this alias, as a transaction lock;"
        f" or list {alias!r} in ADVISORY_LOCK_SESSION_POOLER if its pooler keeps one server session for each client.",
        **facts,
    )


def _hint(error: BaseException) -> str:
    diag = getattr(error.__cause__, "diag", None)
    return getattr(diag, "message_hint", None) or ""
