"""A database session of its own for one lock, and the watcher that notices at once when it ends."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import psycopg
from psycopg.pq import ConnStatus

from . import conf

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.db.backends.base.base import BaseDatabaseWrapper

    from .transactions import RawConnection

# A link that was cut: the client gives up first, so that the holder knows before the server lets the next one in.
# https://www.postgresql.org/docs/current/libpq-connect.html and runtime-config-connection.html; idle, interval and
# tcp_user_timeout in their units, seconds and milliseconds.
CLIENT = {"keepalives_idle": 3, "keepalives_interval": 1, "keepalives_count": 3, "tcp_user_timeout": 6000}
SERVER = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 2, "tcp_keepalives_count": 3, "tcp_user_timeout": 16000}
CONNECT_TIMEOUT = 10  # seconds, where the alias names none

EVENTS = getattr(select, "EPOLLIN", 0) | getattr(select, "EPOLLRDHUP", 0) | getattr(select, "EPOLLONESHOT", 0)
# Seconds until a session is looked at again that some thread was using; and until those are missed that were dropped,
# and, where there is no epoll, those that were lost.
BUSY, IDLE = 0.05, 1.0


def connect(like: BaseDatabaseWrapper) -> BaseDatabaseWrapper:
    """Open a session with the settings of an alias, past its pool, that any thread may use."""
    connection: Any = like.copy()
    options = {name: value for name, value in connection.settings_dict["OPTIONS"].items() if name != "pool"}
    timeout = {} if "PGCONNECT_TIMEOUT" in os.environ else {"connect_timeout": CONNECT_TIMEOUT}
    # Autocommit, or the lock would be a transaction lock, in a transaction that nobody ends.
    connection.settings_dict.update(AUTOCOMMIT=True, OPTIONS={**timeout, **CLIENT, **options})
    connection.is_dedicated = True
    connection.inc_thread_sharing()
    try:
        with connection.cursor() as cursor:
            connection.close = partial(_close, connection.connection)
            _configure(connection, cursor)
        return connection  # type: ignore[no-any-return]
    except BaseException:
        connection.close()
        raise


def _configure(connection: BaseDatabaseWrapper, cursor: Any) -> None:
    options = f"{connection.settings_dict['OPTIONS'].get('options', '')} {os.environ.get('PGOPTIONS', '')}"
    settings = {name: value for name, value in SERVER.items() if name not in options}
    settings["idle_session_timeout"] = 0
    calls = ", ".join("set_config(%s, %s, false)" for _ in settings)
    params = [text for pair in settings.items() for text in map(str, pair)]
    guard = ""
    if connection.alias not in conf.session_pooler_aliases():
        # Behind a pooler the settings would stay on a server session that is lent to others.
        guard = f" WHERE pg_backend_pid() = {connection.connection.info.backend_pid:d}"
    cursor.execute(f"SELECT {calls}{guard}", params)


def watch(connection: BaseDatabaseWrapper, lost: threading.Event) -> None:
    """Have the event set as soon as the session ends, and the session closed once nobody has the event any more."""
    _watcher.watch(connection.connection, lost)


def close(connection: BaseDatabaseWrapper) -> None:
    """End a dedicated session."""
    with contextlib.suppress(Exception):
        connection.close()


def _close(raw: RawConnection) -> None:
    """Close a session. Django's wrapper keeps its dead connection, so that nobody who asks it opens another one."""
    # psycopg's close() waits for nobody: a query of another thread would go on in memory that libpq has freed, and
    # read from a descriptor that may be another session's by then.
    with raw.lock:
        try:
            _watcher.forget(raw)
        finally:
            raw.close()


class _Watcher:
    """One thread for all dedicated sessions of the process. It sends nothing, and ends with the last of them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a forked child: the thread is the parent's, and so are the sessions."""
        # Re-entrant, for a signal handler that takes or releases a lock may interrupt anything.
        self.mutex = threading.RLock()
        # By descriptor. The event is its handle's: once it is gone nobody can release the lock.
        self.watched: dict[int, tuple[ref[RawConnection], ref[threading.Event]]] = {}
        self.numbers: WeakKeyDictionary[RawConnection, int] = WeakKeyDictionary()
        self.epoll: Any = None
        self.thread: threading.Thread | None = None

    def watch(self, raw: RawConnection, lost: threading.Event) -> None:
        with self.mutex:
            # A lost session may have had this number before: libpq closed it then, and the kernel forgot it.
            number = self.numbers[raw] = raw.fileno()
            self.watched[number] = ref(raw), ref(lost)
            if EVENTS:
                self.epoll = self.epoll or select.epoll()
                self.epoll.register(number, EVENTS)
            # One that could not be started, or was interrupted there, is not alive.
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name="django_advisory_lock", daemon=True)
                self.thread.start()

    def forget(self, raw: RawConnection) -> None:
        """Stop watching a session, before it is closed."""
        with self.mutex:
            number = self.numbers.pop(raw, -1)
            entry = self.watched.get(number)
            if entry is not None and entry[0]() is raw:
                del self.watched[number]
                # Where it is closed libpq has closed the number, which may be another session's by now.
                if self.epoll is not None and not raw.closed:
                    with contextlib.suppress(OSError):
                        self.epoll.unregister(number)

    def _run(self) -> None:
        busy: set[int] = set()
        while True:
            busy.update(self._wait(BUSY if busy else IDLE))
            with self.mutex:
                if self.thread is not threading.current_thread():
                    return
                busy = {number for number in busy if self._look(number)}
                self._end_dropped()
                if not self.watched:
                    self.thread = None
                    return

    def _wait(self, seconds: float) -> Iterable[int]:
        if self.epoll is not None:
            return [number for number, _ in self.epoll.poll(seconds)]
        time.sleep(seconds)
        return list(self.watched)

    def _look(self, number: int) -> bool:
        """Read what came for an idle session; tell whether it is not idle, and has to be looked at again."""
        raw, lost = (found() for found in self.watched.get(number, (_nothing, _nothing)))
        if not isinstance(raw, psycopg.Connection):
            return False
        if not raw.lock.acquire(blocking=False):
            return True
        try:
            raw.pgconn.consume_input()
            is_open = raw.pgconn.status == ConnStatus.OK
            if is_open and self.epoll is not None:
                self.epoll.modify(number, EVENTS)
        except (psycopg.Error, OSError):
            is_open = False
        finally:
            raw.lock.release()
        if not is_open:
            del self.watched[number]
            if isinstance(lost, threading.Event):
                lost.set()
        return False

    def _end_dropped(self) -> None:
        """Close the sessions that nobody can release any more, which else would wait for the garbage collector."""
        for number, (find_raw, find_lost) in list(self.watched.items()):
            raw = find_raw()
            if raw is None:
                del self.watched[number]
            elif find_lost() is None and raw.lock.acquire(blocking=False):
                try:
                    self.forget(raw)
                    raw.close()
                finally:
                    raw.lock.release()


def _nothing() -> None:
    return None


_watcher = _Watcher()
os.register_at_fork(after_in_child=_watcher.reset)
