"""Who holds a key and who waits for it, as the server tells it.

The rows come from `pg_locks` and `pg_stat_activity`, of one database only:
https://www.postgresql.org/docs/current/view-pg-locks.html
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from datetime import timezone as fixed
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.utils import timezone

from . import conf, known, pg_locks, sessions
from .keys import lock_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .keys import KeyLike, LockKey


@dataclass(frozen=True, slots=True)
class KeyLock:
    """One row of `pg_locks`: a session that holds a key, or waits for it.

    `key` has a name where one is known, and `model` and `object_pk` where it stands for a row of a model; a name that
    nobody here knows stays a number. `pid` is None for a prepared transaction, and `own` tells whether it is the
    session that asked. `state`, `seconds_in_state`, `client`, `query_start` and `backend_start` are None where this
    role may not look into the session; what `pg_locks` itself tells, it tells everybody. PostgreSQL does not say since
    when a lock is held.

    `client` is the address of the client, None for a unix socket. `waiting_since` and `seconds_waiting` are of those
    that wait, and `blocked_by` the pids in their way, 0 for a prepared transaction. `backend_start`, when the session
    began, tells it from others that had its pid.
    """

    key: LockKey
    pid: int | None
    own: bool
    shared: bool
    granted: bool
    application_name: str
    state: str | None
    seconds_in_state: float | None
    client: str | None = None
    query_start: datetime | None = None
    waiting_since: datetime | None = None
    seconds_waiting: float | None = None
    blocked_by: tuple[int, ...] = ()
    is_named: bool = True
    model: str | None = None
    object_pk: int | None = None
    backend_start: datetime | None = None

    @property
    def mode(self) -> str:
        """The mode as `pg_locks` has it: `ExclusiveLock` or `ShareLock`."""
        return pg_locks.MODES[self.shared]

    def blocks(self, *, shared: bool) -> bool:
        """Whether this one stands in the way of a lock: its holders, or an exclusive request queued ahead."""
        if self.granted:
            return not (shared and self.shared)
        return shared and not self.shared and not self.own

    def __str__(self) -> str:
        if self.pid is None:
            return "a prepared transaction"
        text = f"pid {self.pid}"
        if self.application_name:
            text += f" ({self.application_name})"
        if self.state is not None:
            text += f", {self.state}"
            if self.seconds_in_state is not None:
                text += f" for {self.seconds_in_state:.1f} s"
        return text


def held_locks(using: str | None = None, *, names: Iterable[KeyLike] = ()) -> list[KeyLock]:
    """Return the advisory locks that are held in a database now, by whomever.

    One query asks for them and, where there are any, one for the names of periodic work. `using` is the alias of the
    database, by default `ADVISORY_LOCK_DATABASE`. `names` are keys, as `lock_key()` takes them, that rows may stand for
    beside those that are known: models, installed commands, periodic work, and what decorates or guards the code that
    this process has imported.

    Raises `LockUnsupported` where the database is not PostgreSQL. See
    https://www.postgresql.org/docs/current/view-pg-locks.html.
    """
    return [lock for lock in all_locks(using, names=names) if lock.granted]


def waiting_locks(using: str | None = None, *, names: Iterable[KeyLike] = ()) -> list[KeyLock]:
    """Return the advisory locks that are waited for in a database now, longest first. See `held_locks()`.

    Who polls, as tasks and commands do, waits in the client: the server does not know of it.
    """
    return [lock for lock in all_locks(using, names=names) if not lock.granted]


def holders_of(*key: KeyLike, using: str | None = None) -> list[KeyLock]:
    """Return the sessions that hold a key now, several where it is shared. `key` is what `lock_key()` takes."""
    return [lock for lock in locks_on([lock_key(*key)], using) if lock.granted]


def all_locks(using: str | None = None, *, names: Iterable[KeyLike] = ()) -> list[KeyLock]:
    """Return what `held_locks()` and `waiting_locks()` return, of one moment: holders first."""
    alias, more = conf.get_database() if using is None else using, [lock_key(name) for name in names]
    with sessions.connection_for(alias).cursor() as cursor:
        return read_all_locks(cursor, alias, more)


def locks_on(keys: Sequence[LockKey], using: str | None = None) -> list[KeyLock]:
    """Return who holds some keys and who waits for them, with all columns, holders first. One query."""
    with sessions.connection_for(conf.get_database() if using is None else using).cursor() as cursor:
        cursor.execute(pg_locks.ALL_LOCKS_ON, pg_locks.arrays(keys))
        rows = cursor.fetchall()
    if any(len(key.args) == 2 for key in keys):  # rows of models, maybe
        found = known.Names(None, keys)
        return [_lock(found.read(*row[:3]), row) for row in rows]
    return _named(keys, rows)


def read_key_locks(cursor: Any, keys: Sequence[LockKey]) -> list[KeyLock]:
    """Ask the server who holds some keys and who waits for them, holders first. One query."""
    cursor.execute(pg_locks.KEY_LOCKS, pg_locks.arrays(keys))
    return _named(keys, cursor.fetchall())


def read_all_locks(cursor: Any, using: str | None, names: Iterable[LockKey] = ()) -> list[KeyLock]:
    """Ask the server for all locks; with an alias of None, no table is asked for the names of their keys."""
    cursor.execute(pg_locks.ALL_LOCKS)
    rows = cursor.fetchall()
    if not rows:
        return []
    found = known.Names(using, names)
    return [_lock(found.read(*row[:3]), row) for row in rows]


def _named(keys: Sequence[LockKey], rows: list[Any]) -> list[KeyLock]:
    by_columns = {key.pg_locks: known.Meaning(key, True) for key in keys}
    return [_lock(by_columns[row[:3]], row) for row in rows]


def _lock(meaning: known.Meaning, row: Sequence[Any]) -> KeyLock:
    values: dict[str, Any] = dict(zip(_COLUMNS, row[3:], strict=False))  # an error needs only the first of them
    values["blocked_by"] = tuple(values.get("blocked_by", ()))
    values.update((name, _moment(values.get(name))) for name in _MOMENTS)
    return KeyLock(**meaning._asdict(), **values)


def _moment(microseconds: int | None) -> datetime | None:
    """Return a moment as Django has them: aware, or naive in the default time zone."""
    if microseconds is None:
        return None
    moment = EPOCH + timedelta(microseconds=microseconds)
    return moment if settings.USE_TZ else timezone.make_naive(moment, timezone.get_default_timezone())


EPOCH = datetime(1970, 1, 1, tzinfo=fixed.utc)
_MOMENTS = ("query_start", "waiting_since", "backend_start")
_COLUMNS = [field.name for field in fields(KeyLock) if field.name not in known.Meaning._fields]


def describe_holders(locks: Iterable[KeyLock], *, shared: bool) -> str:
    """Say who stands in the way of a lock: its holders, or an exclusive request queued ahead of a shared one."""
    blocking = [lock for lock in locks if lock.blocks(shared=shared)]
    mine = "another thread or task of this process"
    holders = [f"{mine} ({lock})" if lock.own else str(lock) for lock in blocking if lock.granted]
    queued = [str(lock) for lock in blocking if not lock.granted]
    if holders:
        return f"held by {'; '.join(holders)}"
    if queued:
        return f"an exclusive request is queued ahead: {'; '.join(queued)}"
    return "holder unknown"
