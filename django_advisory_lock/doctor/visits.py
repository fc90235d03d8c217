"""The database sessions that the doctor opens: with the settings of an alias, and for a limited time."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.db import Error

from .. import sessions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from ..transactions import RawConnection

# What goes wrong where a database cannot be reached, or does not answer, or answers with an error.
ERRORS = (Error, psycopg.Error, ImproperlyConfigured)

LIMIT = 10.0  # seconds that a session lasts, from the attempt to connect to the last answer


def first_session(alias: str) -> Session:
    """Return a session, to be entered."""
    return Session(alias, LIMIT)


def second_session(alias: str) -> Session:
    """Return one that gives up before the first one does: where it waits for the first one, it must not win."""
    return Session(alias, LIMIT / 2)


class Session:
    """A session of the doctor's own, past Django's pool, which is cut where it outlasts the limit.

    The server's `statement_timeout` would not do: it ends no wait in the queue of a pooler, and nothing on a server
    that stands still.
    """

    def __init__(self, alias: str, limit: float) -> None:
        self._is_over = False
        self._limit = limit
        self._link: socket.socket | None = None
        self._timer = threading.Timer(limit, self._cut)
        self._timer.daemon = True
        self._connection = self._configure(alias)

    def __enter__(self) -> Session:
        self._timer.start()
        try:
            self._connection.ensure_connection()
        except BaseException as error:
            self.close()
            if self._is_over and isinstance(error, Exception):
                raise self._timed_out() from error
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _configure(self, alias: str) -> Any:
        connection: Any = sessions.connection_for(alias).copy()
        options = {name: value for name, value in connection.settings_dict["OPTIONS"].items() if name != "pool"}
        options["connect_timeout"] = _connect_timeout(connection.settings_dict, self._limit)
        options["prepare_threshold"] = None  # a pooler may not know them
        connection.settings_dict.update(AUTOCOMMIT=True, OPTIONS=options)
        connect = connection.get_new_connection

        def connect_and_keep(parameters: dict[str, Any]) -> Any:
            raw = connect(parameters)
            # A descriptor of our own: libpq closes its one when it likes, and the number is then another's.
            self._link = socket.fromfd(raw.fileno(), socket.AF_INET, socket.SOCK_STREAM)
            if self._is_over:
                self._cut()
            return raw

        connection.get_new_connection = connect_and_keep
        return connection

    def _cut(self) -> None:
        self._is_over = True
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the session: the server frees what it held. In the middle of a transaction a pooler drops its own too."""
        self._timer.cancel()
        if self.is_open:
            self.raw.close()
        if self._link is not None:
            self._link.close()

    @property
    def raw(self) -> RawConnection:
        raw: RawConnection = self._connection.connection
        return raw

    @property
    def is_open(self) -> bool:
        """Whether the next question can be asked."""
        return self._connection.connection is not None and not self.raw.closed

    def rows(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a statement."""
        try:
            cursor = self.raw.execute(statement, params)
            rows: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            if self._is_over:
                raise self._timed_out() from error
            raise
        return rows

    def one(self, statement: str, params: Sequence[Any] = ()) -> Any:
        """Return the first value of a statement."""
        rows = self.rows(statement, params)
        return rows[0][0] if rows else None

    def _timed_out(self) -> TimedOut:
        return TimedOut(f"no answer within {self._limit:g} seconds")


def _connect_timeout(settings: dict[str, Any], limit: float) -> int:
    """Return the seconds for each host, so that a dead one leaves time for the next; libpq takes no less than 2."""
    hosts = str(settings["HOST"] or settings["OPTIONS"].get("host") or "").split(",")
    return max(2, int(limit) // len(hosts))


class TimedOut(psycopg.OperationalError):
    """The database did not answer in time."""
