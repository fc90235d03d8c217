"""Those who are compared, each used as its documentation says.

A form that a library does not offer is None. Keys are numbers or texts, as `key` says; `alias` is one of Django's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any

from django.db import connections, transaction

from django_advisory_lock import LockKey, LockTimeout, advisory_lock, crc32_key, try_advisory_lock

OURS, PGLOCK, PGWARE, DLOCK, WRAPPER = "this library", "django-pglock", "django-pgware", "sqlalchemy-dlock", "a wrapper"
BARE, GUARDED, PSYCOPG = "Django's cursor", "Django's cursor, guarded", "psycopg"
REST = "SELECT pg_sleep(0.001)"  # of a transaction in which a lock was taken: a view goes on after its block
SECONDS = 30.0  # the timeout of the forms that have one, beyond what is waited for

Block = AbstractContextManager[Any]
Form = Callable[[Any, str], Block]
Function = Callable[[], Any]


def execute(alias: str, statement: str, params: Any = ()) -> Any:
    """Run a statement as the body of a block does, and return the first value of its answer."""
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, params or None)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


@dataclass(frozen=True)
class Peer:
    """One library, and its ways to take a lock. Blocks yield whether the lock was acquired."""

    name: str
    version: str = ""
    lock: Form | None = None  # waits for ever
    timed: Callable[[Any, str, float], Block] | None = None  # waits so many seconds
    attempt: Form | None = None  # never waits
    decorate: Callable[[Any, str, Function], Function] | None = None  # skips the body where the lock is busy
    in_atomic: Form | None = None  # the library's usual lock inside a transaction, which it opens
    transaction: Form | None = None  # its lock that lasts until COMMIT, with the transaction
    atimed: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None
    aattempt: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None
    attempt_in_atomic: Form | None = None  # the usual lock, tried, in a transaction that goes on after its block
    execute: Callable[..., Any] = execute
    close: Callable[[], None] = lambda: None
    key: Callable[[int], LockKey] = lambda number: LockKey((number,))
    uses_django: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def inside(form: Form, rest: str = "") -> Form:
    """Return a form around which a transaction is open, with the statement that it ends with."""

    @contextlib.contextmanager
    def block(key: Any, alias: str) -> Iterator[Any]:
        with transaction.atomic(using=alias):
            with form(key, alias) as acquired:
                yield acquired
            if rest and acquired:
                execute(alias, rest)

    return block


# -- This library -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _within(key: Any, alias: str, seconds: float) -> Iterator[bool]:
    try:
        lock = advisory_lock(key, using=alias, timeout=seconds).acquire()
    except LockTimeout:
        yield False
        return
    with lock:
        yield True


def ours() -> Peer:
    return Peer(
        OURS,
        lock=lambda key, alias: advisory_lock(key, using=alias),
        timed=_within,
        attempt=lambda key, alias: try_advisory_lock(key, using=alias),
        decorate=lambda key, alias, function: try_advisory_lock(key, using=alias)(function),
        in_atomic=inside(lambda key, alias: advisory_lock(key, using=alias)),
        transaction=inside(lambda key, alias: advisory_lock(key, using=alias)),
        attempt_in_atomic=inside(lambda key, alias: try_advisory_lock(key, using=alias), REST),
        atimed=lambda key: advisory_lock(key, timeout=SECONDS),
        aattempt=try_advisory_lock,
    )


# -- By hand ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pg_lock(name: str, using: str) -> Iterator[Any]:
    """The helper of the README, on any alias."""
    key = zlib.crc32(name.encode())
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [key])
        acquired = cursor.fetchone()[0]
        try:
            yield acquired
        finally:
            if acquired:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [key])


def wrapper() -> Peer:
    def decorate(key: Any, alias: str, function: Function) -> Function:
        def locked() -> Any:
            with pg_lock(str(key), alias) as acquired:
                return function() if acquired else None

        return locked

    def attempt(key: Any, alias: str) -> Block:
        return pg_lock(str(key), alias)

    return Peer(
        WRAPPER,
        attempt=attempt,
        decorate=decorate,
        in_atomic=inside(attempt),
        attempt_in_atomic=inside(attempt, REST),
        key=lambda number: crc32_key(str(number)),
    )


# -- Other libraries --------------------------------------------------------------------------------------------------


def pglock() -> Peer:
    module: Any = importlib.import_module("pglock")

    def in_transaction(key: Any, alias: str) -> Block:
        block: Block = module.advisory(key, using=alias, xact=True)
        return block

    skip = module.Skip
    return Peer(
        PGLOCK,
        importlib.metadata.version("django-pglock"),
        lock=lambda key, alias: module.advisory(key, using=alias),
        timed=lambda key, alias, seconds: module.advisory(key, using=alias, timeout=seconds),
        attempt=lambda key, alias: module.advisory(key, using=alias, timeout=0),
        decorate=lambda key, alias, function: module.advisory(key, using=alias, timeout=0, side_effect=skip)(function),
        in_atomic=inside(lambda key, alias: module.advisory(key, using=alias)),
        transaction=in_transaction,
        attempt_in_atomic=inside(lambda key, alias: module.advisory(key, using=alias, timeout=0), REST),
    )


def pgware() -> Peer:
    module: Any = importlib.import_module("django_pg_utils")
    lock, alock = module.advisory_lock, module.async_advisory_lock

    def decorate(key: Any, alias: str, function: Function) -> Function:
        def locked() -> Any:
            with lock(key, wait=False, using=alias) as acquired:
                return function() if acquired else None

        return locked

    return Peer(
        PGWARE,
        f"{importlib.metadata.version('django-pgware')}{_same_lock(lock)}",
        lock=lambda key, alias: lock(key, using=alias),
        attempt=lambda key, alias: lock(key, wait=False, using=alias),
        decorate=decorate,
        in_atomic=inside(lambda key, alias: lock(key, using=alias)),
        attempt_in_atomic=inside(lambda key, alias: lock(key, wait=False, using=alias), REST),
        aattempt=lambda key: alock(key, wait=False),
    )


def _same_lock(lock: Any) -> str:
    """Name django-pglocks where it is the same function under another name, as from version 2.1 on."""
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if importlib.import_module("django_pglocks").advisory_lock is lock:
            return f", django-pglocks {importlib.metadata.version('django-pglocks')}"
    return ""
