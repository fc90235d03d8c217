"""Helpers for the tests of projects: hold a lock from another session, and ask who holds what.

They open short sessions of their own to the database that an alias uses at that moment, past its connection and its
pool. So they work in every kind of test: inside the transaction of `TestCase`, also once it has failed, in coroutines,
in threads and under any test runner; they count as no query of the code under test. See docs/testing.md.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import psycopg

from . import conf, dedicated, keys, outcomes, sessions, sql, transactions
from .inspection import read_all_locks, read_key_locks
from .notices import logger
from .options import Options, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta
    from types import TracebackType

    from typing_extensions import Self

    from .holds import Hold
    from .inspection import KeyLock
    from .keys import KeyLike, LockKey
    from .transactions import RawConnection

# Seconds that a session which was just closed is given to free its locks: the server notices its end a moment later.
GRACE = 1.0
PAUSE = 0.01


def hold_lock(*key: KeyLike, using: str | None = None, shared: bool = False) -> HeldElsewhere:
    """Return a context manager, for `with` and `async with`, that holds a key from a database session of its own.

    `key` is what `lock_key()` takes, and `using` an alias, by default `ADVISORY_LOCK_DATABASE`. Nothing waits: where
    the key is busy `AssertionError` names the holder. The session ends with the block, whatever happens in it; where
    it was gone before, so that code under test may have had the key, that is an `AssertionError` too. See
    docs/testing.md and https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
    """
    return HeldElsewhere(key, using, shared)


class HeldElsewhere:
    """A key that another session holds for the length of a block, as `hold_lock()` returns it.

    Inside the block `key` is what is held, and `pid` the server process of the session, as `pg_locks` shows it.
    """

    key: LockKey
    pid: int
    _raw: RawConnection | None = None

    def __init__(self, key: tuple[Any, ...], using: str | None, shared: bool) -> None:
        self._source = keys.read_parts(key)
        self._using = using
        self._shared = Options(shared, "session").shared

    def __repr__(self) -> str:
        return f"<hold_lock {self._source!r}: {'over' if self._raw is None else f'held by pid {self.pid}'}>"

    def __enter__(self) -> Self:
        if self._raw is not None:
            raise RuntimeError(f"{self!r} is entered already: call hold_lock() once for each block.")
        alias = _alias(self._using)
        self.key = keys.derive(self._source)
        raw = _connect(alias)
        try:
            self._take(raw, alias)
        except BaseException:
            raw.close()
            raise
        self._process = os.getpid()
        self._raw = raw
        _holding[id(self)] = self
        return self

    def _take(self, raw: RawConnection, alias: str) -> None:
        self._guard = None if alias in conf.session_pooler_aliases() else raw.info.backend_pid
        statement = sql.try_lock(self.key.args, self._shared, False, False, self._guard)
        taken, *pid = raw.execute(statement).fetchone() or (None,)
        self.pid = pid[0] if pid else raw.info.backend_pid
        if taken is None:
            raise outcomes.pooler_detected({"key": self.key, "using": alias, "waited": 0.0})
        if not taken:
            found = read_key_locks(raw.cursor(), [self.key])
            raise AssertionError(
                f"hold_lock() found {tell(self.key, alias)} busy: {tell_locks(found) or 'holder unknown'}."
            )

    def release(self) -> None:
        """Free the key and end the session before the block ends; a second call does nothing."""
        raw = self._raw
        if raw is None or self._process != os.getpid():
            return
        self._raw = None
        _holding.pop(id(self), None)
        try:
            is_freed = sessions.ask(raw, sql.unlock(self.key.args, self._shared, self._guard))
        except psycopg.Error:
            is_freed = False
        finally:
            raw.close()
        if not is_freed:
            raise AssertionError(f"hold_lock() lost {self.key.name!r} on the way: its session, pid {self.pid}, ended.")

    def wait_for_waiters(self, count: int = 1, *, timeout: float | timedelta | None = 10) -> None:
        """Return once so many sessions wait in the server's queue for the key; after `timeout` seconds AssertionError.

        Who polls, as tasks and commands do, waits in the client: the server does not know of it. A timeout of None
        waits for ever.
        """
        limit = seconds(timeout, "timeout")
        end = math.inf if limit is None else time.monotonic() + limit
        while (waiting := self._waiting()) < count:
            if time.monotonic() >= end:
                raise AssertionError(
                    f"{count} should wait for {self.key.name!r}, and {waiting} did within {timeout} s."
                )
            time.sleep(PAUSE)

    def _waiting(self) -> int:
        if self._raw is None:
            raise RuntimeError(f"{self!r}: ask for those who wait inside its block.")
        return sum(not lock.granted for lock in read_key_locks(self._raw.cursor(), [self.key]))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.release()
        except AssertionError as error:
            if exc is None:
                raise
            logger.error("At the end of a block that raised %s: %s", type(exc).__name__, error)
            if hasattr(exc, "add_note"):  # pragma: no branch - Python 3.10 has only the log
                exc.add_note(str(error))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(exc_type, exc, traceback)


# Weakly: one that was dropped is gone with its session.
_holding: WeakValueDictionary[int, HeldElsewhere] = WeakValueDictionary()


def assert_lock_held(*key: KeyLike, using: str | None = None, shared: bool | None = None) -> None:
    """Fail unless some session holds the key now, be it one of this process or not; with `shared`, in that mode.

    It is the server that is asked: a transaction lock counts until its transaction ends. In a `TestCase` that is when
    the test is rolled back.
    """
    wanted, alias = keys.lock_key(*key), _alias(using)
    with _session(alias) as raw:
        locks = read_key_locks(raw.cursor(), [wanted])
    if not any(lock.granted and shared in (None, lock.shared) for lock in locks):
        mode = "" if shared is None else " shared" if shared else " exclusively"
        raise AssertionError(f"{tell(wanted, alias)} is not held{mode}: {tell_locks(locks) or 'it is free'}.")


def assert_lock_free(*key: KeyLike, using: str | None = None) -> None:
    """Fail if any session holds the key now, be it one of this process or not, in whichever mode.

    It is the opposite of `assert_lock_held()`, so inside a `TestCase` a transaction lock is not free before the test is
    rolled back. A session that is just being closed is given a second.
    """
    wanted, alias = keys.lock_key(*key), _alias(using)
    locks = settled(alias, lambda raw: read_key_locks(raw.cursor(), [wanted]))
    if locks:
        raise AssertionError(f"{tell(wanted, alias)} is not free: {tell_locks(locks)}.")


def assert_no_locks(using: str | None = None) -> None:
    """Fail if any session holds or waits for an advisory lock in the database, whatever its key, and name them all.

    A transaction lock of the code under test does not count once only the transaction of a `TestCase` keeps it:
    elsewhere the COMMIT would have freed it. What `hold_lock()` holds counts. A session that is just being closed is
    given a second.
    """
    alias = _alias(using)
    left = settled(alias, lambda raw: [lock for lock in read_locks(raw) if not ends_with_test(lock)])
    if left:
        lines = "".join(f"\n  {tell(lock.key)} is {tell_locks([lock])}" for lock in left)
        raise AssertionError(f"There are advisory locks on {alias!r}:{lines}")


# What the helpers above share with the plugin of pytest


def read_locks(raw: RawConnection) -> list[KeyLock]:
    """Return all locks of a database, with those names that can be told without a query."""
    own = {key for session in sessions.open_sessions() for key in session.known_keys()}
    return read_all_locks(raw.cursor(), None, own | {held.key for held in _held()})


def all_locks(alias: str) -> list[KeyLock]:
    """Return what `read_locks()` does, over a session of its own."""
    with _session(alias) as raw:
        return read_locks(raw)


def ends_with_test(lock: KeyLock) -> bool:
    """Whether it is a transaction lock that stands only because a `TestCase` has not been rolled back yet."""
    holds = _own_holds(lock)
    return bool(holds) and all(hold.scope == "transaction" and _is_in_test_case(hold) for hold in holds)


def is_held_by_helper(lock: KeyLock) -> bool:
    """Whether a block of `hold_lock()` holds it, at whose end it is free for certain."""
    return any(held.pid == lock.pid for held in _held())


def settled(alias: str, read: Callable[[RawConnection], list[KeyLock]]) -> list[KeyLock]:
    """Return what is found; where it may be of sessions that are just ending, look again for a moment."""
    end = time.monotonic() + GRACE
    with _session(alias) as raw:
        while (found := read(raw)) and not any(map(_whose, found)) and time.monotonic() < end:
            time.sleep(PAUSE)
    return found


def tell(key: LockKey, alias: str | None = None) -> str:
    """Name a key with its numbers."""
    return f"{key.name!r} ({', '.join(map(str, key.args))})" + (f" on {alias!r}" if alias else "")


def tell_locks(locks: Sequence[KeyLock]) -> str:
    """Say who holds a key and who waits for it."""
    verbs = {True: "held", False: "waited for"}
    return "; ".join(
        f"{verbs[lock.granted]}{' shared' if lock.shared else ''} by {lock}{_whose(lock)}" for lock in locks
    )


def _whose(lock: KeyLock) -> str:
    """Say which lock of this process it is; nothing where it is none, as far as this process knows."""
    if is_held_by_helper(lock):
        return ", in a block of hold_lock()"
    scopes = {hold.scope for hold in _own_holds(lock)}
    if not scopes:
        return ""
    until = ", until the test is rolled back" if ends_with_test(lock) else ""
    return f", a {' and a '.join(sorted(scopes))} lock of this process{until}"


def _own_holds(lock: KeyLock) -> list[Hold]:
    found = [hold for session in sessions.open_sessions() for hold in session.on(lock.key)]
    return [hold for hold in found if lock.granted and hold.pid == lock.pid and hold.shared == lock.shared]


def _is_in_test_case(hold: Hold) -> bool:
    connection = hold.connection()
    return connection is not None and connection.in_atomic_block and not transactions.in_transaction(connection)


def _held() -> list[HeldElsewhere]:
    return [held for find in _holding.valuerefs() if (held := find()) is not None]


def _alias(using: str | None) -> str:
    if using is not None and not isinstance(using, str):
        raise TypeError(f"using is the alias of a database or None, not {type(using).__name__}.")
    return conf.get_database() if using is None else using


@contextlib.contextmanager
def _session(alias: str) -> Iterator[RawConnection]:
    raw = _connect(alias)
    try:
        yield raw
    finally:
        raw.close()


def _connect(alias: str) -> RawConnection:
    """Open a session to the database that an alias uses now, past its connection and its pool."""
    like = sessions.connection_for(alias).copy()
    like.settings_dict["OPTIONS"]["application_name"] = "hold_lock"
    # In a thread of its own: in a coroutine Django opens no connection.
    with ThreadPoolExecutor(1) as thread:
        raw: RawConnection = thread.submit(dedicated.connect, like).result().connection
    return raw
