"""The statements alone: what a lock costs at least, through psycopg and through Django's cursor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
from django.db import connections, transaction

from tests.support import parameters

from .peers import BARE, GUARDED, PSYCOPG, Block, Peer

_local = threading.local()
SETTINGS = "SELECT set_config('lock_timeout', '30000', true), "


def raw(alias: str) -> psycopg.Connection[Any]:
    """Return a connection of this thread that Django knows nothing of, in autocommit."""
    found: dict[str, psycopg.Connection[Any]] = _local.__dict__
    if alias not in found:
        found[alias] = psycopg.connect(**parameters(alias), autocommit=True, prepare_threshold=None)
    return found[alias]


def close() -> None:
    """Close what this thread has opened."""
    while _local.__dict__:
        _local.__dict__.popitem()[1].close()


@contextlib.contextmanager
def _psycopg(take: str, alias: str, key: int) -> Iterator[bool]:
    session = raw(alias)
    row = session.execute(take, [key]).fetchone()
    acquired = row is not None and row[-1] is not False
    try:
        yield acquired
    finally:
        if acquired:
            session.execute("SELECT pg_advisory_unlock(%s)", [key]).fetchone()


@contextlib.contextmanager
def _django(take: str, alias: str, key: int, pid: int | None = None) -> Iterator[bool]:
    params = [key] if pid is None else [pid, key]
    with connections[alias].cursor() as cursor:
        cursor.execute(take, params)
        acquired = cursor.fetchone()[-1] is not False
    try:
        yield acquired
    finally:
        if acquired:
            with connections[alias].cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [key])
                cursor.fetchone()


@contextlib.contextmanager
def _in_transaction(key: int, alias: str) -> Iterator[bool]:
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [key])
            cursor.fetchone()
        yield True


def with_psycopg() -> Peer:
    return Peer(
        PSYCOPG,
        psycopg.__version__,
        lock=lambda key, alias: _psycopg("SELECT pg_advisory_lock(%s)", alias, key),
        timed=lambda key, alias, seconds: _psycopg(f"{SETTINGS} pg_advisory_lock(%s)", alias, key),
        attempt=lambda key, alias: _psycopg("SELECT pg_try_advisory_lock(%s)", alias, key),
    )


def with_django() -> Peer:
    return Peer(
        BARE,
        lock=lambda key, alias: _django("SELECT pg_advisory_lock(%s)", alias, key),
        timed=lambda key, alias, seconds: _django(f"{SETTINGS} pg_advisory_lock(%s)", alias, key),
        attempt=lambda key, alias: _django("SELECT pg_try_advisory_lock(%s)", alias, key),
        in_atomic=_in_transaction,
    )


def guarded() -> Peer:
    """The same, with a first one that compares the server session with the one that the connection was opened with."""

    def take(function: str, key: int, alias: str) -> Block:
        connections[alias].ensure_connection()
        pid = connections[alias].connection.info.backend_pid
        statement = f"SELECT CASE WHEN pg_backend_pid() = %s THEN {function}(%s) END"
        return _django(statement, alias, key, pid)

    return Peer(
        GUARDED,
        lock=lambda key, alias: take("pg_advisory_lock", key, alias),
        attempt=lambda key, alias: take("pg_try_advisory_lock", key, alias),
    )
