"""What each database session holds in this process, and its connection: what leans on the internals of psycopg.

A session is a psycopg connection object, not an alias: Django may replace the connection under an alias at any time,
and a pool lends one connection to many threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import psycopg
from django.conf import settings
from django.db import DatabaseError, connections
from django.utils.connection import ConnectionDoesNotExist
from psycopg.pq import TransactionStatus

from . import pg_locks, sql
from .exceptions import LockUnsupported
from .notices import logger
from .transactions import is_failed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

    from .holds import Hold
    from .keys import LockKey
    from .owners import Owner
    from .transactions import RawConnection


class Session:
    """The locks of one database session by key, and what is to be put right on it at the next chance."""

    def __init__(self, raw: RawConnection) -> None:
        self.raw = ref(raw)
        self.process = os.getpid()
        self.mutex = threading.RLock()
        # The server session that the connection was opened with: every statement has to reach it. None where a pooler
        # stands between that is known to keep one server session for each client.
        self.guard: int | None = raw.info.backend_pid
        self.held: dict[tuple[int, ...], list[Hold]] = {}
        self._transaction_holds: list[Hold] = []
        self._transaction_start: str | None = None
        # Handles that were collected as garbage while they held a lock. A finaliser runs anywhere: it only appends.
        self.abandoned: deque[Hold] = deque()
        # How many session locks the server may count beyond ours: after an interrupt, or a release that was not sent.
        self.doubts: Counter[tuple[LockKey, bool, int | None]] = Counter()
        self.savepoints: list[object] = []
        self._pinning: set[Hold] = set()
        self._close_at: float | None = None
        self.is_pooled = getattr(raw, "_pool", None) is not None
        self.binds_on_server = not issubclass(raw.cursor_factory, psycopg.ClientCursor)
        self._expire_at: float | None = None

    # What is held

    def note(self, hold: Hold, owner: Owner) -> None:
        """Keep a lock that was just taken and, for a session lock, its connection."""
        hold.noted = True
        for key in hold.keys:
            self.held.setdefault(key.args, []).append(hold)
        owner.note(hold)
        if hold.scope == "session":
            self._pin(hold)
        else:
            self._transaction_holds.append(hold)

    def drop(self, hold: Hold) -> None:
        """Forget a lock that the server has freed. After an interrupt it can be called again."""
        for key in hold.keys:
            holds = self.held.get(key.args, [])
            if hold in holds:
                holds.remove(hold)
            if not holds:
                self.held.pop(key.args, None)
        if hold.scope == "session":
            self.unpin(hold)
            if self.is_pooled:
                self.unmark()
        owner = hold.owner()
        if owner is not None:
            owner.forget(hold)
        hold.noted = False
        hold.unwatch()

    def disown(self, hold: Hold) -> None:
        """Forget session locks that may still be there on the server."""
        self.doubt(hold.keys, hold.shared, hold.pid)
        self.drop(hold)

    def place(self, key: LockKey) -> tuple[sql.Numbers, tuple[int, ...]]:
        """Return what a statement on one key has for its numbers, and the parameters for that."""
        return (sql.PLACES[len(key.args)], key.args) if self.binds_on_server else (key.args, ())

    def on(self, key: LockKey) -> Sequence[Hold]:
        """Return what is held here on a key."""
        return self.held.get(key.args, ())

    def known_keys(self) -> set[LockKey]:
        """Return what is held here, or may be."""
        held = {key for holds in list(self.held.values()) for hold in holds for key in hold.keys}
        return held | {key for key, *_ in list(self.doubts)}

    def refuses(self, keys: Sequence[LockKey], shared: bool, owner: Owner) -> bool:
        """Whether another owner on this session holds a key against this one, as another process would."""
        return bool(self.held) and any(
            hold.owner() is not owner and not (shared and hold.shared) for key in keys for hold in self.on(key)
        )

    def covers(self, key: LockKey) -> bool:
        """Whether the session holds the key exclusively, so that a shared lock on it is there for the asking."""
        return any(not hold.shared for hold in self.on(key))

    def transaction_hold(self, keys: tuple[LockKey, ...], shared: bool, owner: Owner) -> Hold | None:
        """Return the transaction lock that this owner holds on just these keys for certain in this mode, if any."""
        for hold in self.on(keys[0]):
            is_same = hold.scope == "transaction" and hold.shared is shared and hold.keys == keys
            if is_same and hold.owner() is owner and hold.is_certain:
                return hold
        return None

    @property
    def is_pinned(self) -> bool:
        """Whether any session lock is held here."""
        return bool(self._pinning)

    def has_session_lock(self, key: LockKey, shared: bool) -> bool:
        """Whether a session lock on the key is held in just this mode."""
        return any(hold.scope == "session" and hold.shared is shared for hold in self.on(key))

    def uncertain(self, keys: Sequence[LockKey]) -> list[Hold]:
        """Return the transaction locks on some keys that a commit or a rollback may have ended since."""
        return [hold for key in keys for hold in self.on(key) if not hold.is_certain] if self.held else []

    def enter_transaction(self, start: str | None) -> None:
        """Forget the transaction locks of any other transaction; `start` is None where none has begun."""
        if self._transaction_holds and start != self._transaction_start:
            with self.mutex:
                for hold in self._transaction_holds:
                    self.drop(hold)
                self._transaction_holds = []
        self._transaction_start = start

    # What is to be put right

    def doubt(self, keys: Iterable[LockKey], shared: bool, pid: int | None) -> None:
        """Note that a server session may count one session lock more on each key than is held here."""
        self.doubts.update((key, shared, pid) for key in keys)

    def is_doubtful(self, keys: Iterable[LockKey], shared: bool) -> bool:
        """Whether the server may still count more session locks on a key than are held here."""
        doubtful = {doubt[:2] for doubt in self.doubts}
        return any((key, shared) in doubtful for key in keys)

    def settle(self, connection: BaseDatabaseWrapper) -> None:
        """Free on the server what nobody here holds any more. Sends something only where there is a doubt.

        In a failed transaction that has to wait; a session that cannot be asked for another reason is closed.
        """
        with self.mutex:
            self._settle(connection)

    def _settle(self, connection: BaseDatabaseWrapper) -> None:
        while self.abandoned:
            self.disown(self.abandoned.popleft())
        raw = self.raw()
        if raw is None or raw.closed or is_failed(raw) or connection.connection is not raw:
            return
        try:
            for shared, pid in {doubt[1:] for doubt in self.doubts}:
                self._free(raw, shared, pid)
            self.unmark()
        except BaseException as error:
            end(connection, self)
            if not isinstance(error, Exception):
                raise

    def _free(self, raw: RawConnection, shared: bool, pid: int | None) -> None:
        while True:
            alike = [key for key, *rest in self.doubts if rest == [shared, pid]]
            keys = [key for key in alike if not self.has_session_lock(key, shared)]
            if not keys:
                return
            freed = ask(raw, sql.free_all(shared, pid), (pg_locks.MODES[shared], *pg_locks.arrays(keys)))
            for key in keys:
                self.doubts[key, shared, pid] -= 1
                if not freed or not self.doubts[key, shared, pid]:
                    del self.doubts[key, shared, pid]

    # Its connection stays while a session lock is held

    def _pin(self, hold: Hold) -> None:
        connection, raw = hold.connection(), self.raw()
        if connection is None or raw is None:  # pragma: no cover - the caller holds both
            return
        # In this order: a finaliser may come in between, and unpin another lock.
        self._pinning.add(hold)
        if self.is_pooled:
            self.mark_for_discard(raw)
        if connection.close_at is not None:
            self._close_at, connection.close_at = connection.close_at, None

    def unpin(self, hold: Hold) -> None:
        """Let Django recycle the connection again once no session lock is left. Safe in a finaliser."""
        self._pinning.discard(hold)
        connection = hold.connection()
        if self._pinning or self._close_at is None or connection is None:
            return
        if connection.connection is self.raw():
            connection.close_at, self._close_at = self._close_at, None

    def mark_for_discard(self, raw: RawConnection) -> None:
        """See to it that a pool closes the connection when it is given back, before anybody can borrow it."""
        if not self.is_pooled or self._expire_at is not None:
            return
        # psycopg_pool 3.1 to 3.3: putconn() closes a connection that has expired.
        expire_at = getattr(raw, "_expire_at", None)
        if expire_at is None:
            logger.warning("This psycopg_pool is unknown: close no pooled connection that holds an advisory lock.")
        else:
            self._expire_at, raw._expire_at = expire_at, 0.0

    def unmark(self) -> None:
        """Let the pool keep the connection again, unless a lock is held on it or left in doubt."""
        raw = self.raw()
        if raw is None or self._expire_at is None or self._pinning or self.doubts or self.abandoned:
            return
        raw._expire_at, self._expire_at = self._expire_at, None


_sessions: WeakKeyDictionary[RawConnection, Session] = WeakKeyDictionary()
# What a fork inherited. Used or closed here it would break the parent's sessions, so it is kept, out of the way.
_inherited: list[object] = []


def _mark_inherited() -> None:
    """Run in a forked child: the connections of the thread that forked, and all pools, are the parent's."""
    if not settings.configured:
        return
    for connection in connections.all(initialized_only=True):
        raw = connection.connection
        if isinstance(raw, psycopg.Connection) and not raw.closed:
            session = attach(connection)
            session.process = 0
            if session.held:
                # Not only at the next lock: the end of an atomic() that the child leaves would end the parent's lock.
                _set_aside(connection)
    postgresql = sys.modules.get("django.db.backends.postgresql.base")
    pools = getattr(getattr(postgresql, "DatabaseWrapper", None), "_connection_pools", {})
    _inherited.extend(pools.values())
    pools.clear()


def _set_aside(connection: BaseDatabaseWrapper) -> None:
    """Let the alias connect anew, and leave the connection that it had to another process."""
    _inherited.append(connection.connection)
    connection.connection = None
    connection.run_on_commit = []


os.register_at_fork(after_in_child=_mark_inherited)


def connection_for(alias: str) -> BaseDatabaseWrapper:
    """Return this thread's connection of the alias: PostgreSQL through psycopg 3, or `LockUnsupported`."""
    try:
        connection = connections[alias]
    except ConnectionDoesNotExist as error:
        known = ", ".join(sorted(connections))
        raise ConnectionDoesNotExist(f"DATABASES has no {alias!r}. Name one of its aliases: {known}.") from error
    raw = connection.connection
    session = _sessions.get(raw) if isinstance(raw, psycopg.Connection) else None
    if session is None:
        _require_support(connection)
    elif session.process != os.getpid():
        _set_aside(connection)
    return connection


def _require_support(connection: BaseDatabaseWrapper) -> None:
    driver = getattr(connection, "Database", psycopg).__name__
    if connection.vendor != "postgresql" or driver != psycopg.__name__:
        raise LockUnsupported(
            f"Advisory locks need PostgreSQL through psycopg 3; the database {connection.alias!r} is"
            f" {connection.display_name} through {driver}. Name another alias in `using` or in ADVISORY_LOCK_DATABASE.",
            using=connection.alias,
        )


def attach(connection: BaseDatabaseWrapper) -> Session:
    """Return the session of an open connection."""
    raw: RawConnection = connection.connection
    session = _sessions.get(raw)
    return _sessions.setdefault(raw, Session(raw)) if session is None else session


def open_sessions() -> list[Session]:
    """Return the sessions of this process, in whatever thread, that are open and have ever held a lock."""
    found = [(raw, _sessions.get(raw)) for raw in (find() for find in _sessions.keyrefs()) if raw is not None]
    return [session for raw, session in found if session and session.process == os.getpid() and not raw.closed]


def settle_abandoned(connection: BaseDatabaseWrapper) -> bool:
    """Free what handles that were dropped have left on a connection; tell whether there was anything."""
    raw = connection.connection
    session = _sessions.get(raw) if isinstance(raw, psycopg.Connection) else None
    if session is None or session.process != os.getpid() or not session.abandoned:
        return False
    session.settle(connection)
    return True


def end(connection: BaseDatabaseWrapper, session: Session) -> None:
    """Close a session that cannot be asked what it holds: the server frees all of its locks."""
    raw = session.raw()
    if raw is not None and connection.connection is raw:
        session.mark_for_discard(raw)
        with contextlib.suppress(Exception):
            if raw.pgconn.transaction_status == TransactionStatus.ACTIVE:
                # A statement that waits for a lock goes on waiting without its client. cancel_safe: psycopg 3.2.
                getattr(raw, "cancel_safe", raw.cancel)()
        with contextlib.suppress(Exception):
            connection.close()


def is_of_this_thread(connection: BaseDatabaseWrapper) -> bool:
    """Whether Django lets this thread use the connection."""
    try:
        connection.validate_thread_sharing()
    except DatabaseError:
        return False
    return True


def close_if_dead(connection: BaseDatabaseWrapper) -> None:
    """Let the alias reconnect after its session died; inside `atomic()` that is for the outermost block to do."""
    is_dead = connection.connection is not None and connection.connection.closed
    if is_dead and not connection.in_atomic_block and is_of_this_thread(connection):
        connection.close()


def ask(raw: RawConnection, statement: str, params: tuple[object, ...] | None = None) -> Any:
    """Return the one value of a statement, past Django's cursor, whose wrappers may forbid or interrupt it."""
    row = raw.execute(statement, params).fetchone()
    return row[0] if row else None
