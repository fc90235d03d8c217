"""Fixtures for pytest, there once the package is installed. They need neither pytest-django nor settings to be loaded.

See docs/testing.md and https://docs.pytest.org/en/stable/how-to/writing_plugins.html.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import pytest
from django.db import DatabaseError, connections

from . import testing
from .exceptions import LockUnsupported
from .holds import open_handles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .inspection import KeyLock
    from .keys import KeyLike
    from .transactions import RawConnection

# Of pytest-django. What is requested beside them is set up after the database, and ends before it does.
_DATABASE_FIXTURES = ("transactional_db", "db")
# What keeps a test from a database: pytest-django, Django's SimpleTestCase, another engine, no such database.
_OUT_OF_REACH = (RuntimeError, AssertionError, LockUnsupported, DatabaseError)


class HoldLock(Protocol):
    """The fixture `hold_lock`, for annotations."""

    def __call__(self, *key: KeyLike, using: str | None = None, shared: bool = False) -> testing.HeldElsewhere: ...


@pytest.fixture
def hold_lock() -> Iterator[HoldLock]:
    """Hold keys from other database sessions until the end of the test: `hold_lock("nightly-report")`.

    The arguments are those of `django_advisory_lock.testing.hold_lock()`; `release()` of what it returns ends it early.
    """
    with contextlib.ExitStack() as stack:

        def hold(*key: KeyLike, using: str | None = None, shared: bool = False) -> testing.HeldElsewhere:
            return stack.enter_context(testing.hold_lock(*key, using=using, shared=shared))

        yield hold


@pytest.fixture
def no_advisory_lock_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves an advisory lock behind, or a handle that it has never released, and name them.

    It looks at every PostgreSQL database that the test may use, once the fixtures that were set up after this one have
    ended, and before the test's transaction is rolled back or its connections are closed.
    """
    for name in _DATABASE_FIXTURES:
        if name in request.fixturenames:
            request.getfixturevalue(name)
    handles_before, locks_before = WeakSet(open_handles()), _all_locks()
    yield
    leaks = [f"{handle!r} was never released" for handle in open_handles() if handle not in handles_before]
    for alias, before in locks_before.items():
        left = _left(alias, before)
        leaks += [f"{testing.tell(lock.key, alias)} is {testing.tell_locks([lock])}" for lock in left]
    if leaks:
        pytest.fail("\n  ".join(["The test has left advisory locks behind:", *leaks]), pytrace=False)


def _all_locks() -> dict[str, list[KeyLock]]:
    """Return what is held in each PostgreSQL database within reach, by one of its aliases."""
    found, seen = {}, set()
    for alias in connections:
        settings = connections[alias].settings_dict
        database = (settings["HOST"], settings["PORT"], settings["NAME"], settings["OPTIONS"].get("service"))
        if database not in seen:
            with contextlib.suppress(*_OUT_OF_REACH):
                found[alias] = testing.all_locks(alias)
                seen.add(database)
    return found


def _left(alias: str, before: list[KeyLock]) -> list[KeyLock]:
    """Return what is held now, was not before, and does not end with the test."""
    known = {_identity(lock) for lock in before}

    def read(raw: RawConnection) -> list[KeyLock]:
        locks = [lock for lock in testing.read_locks(raw) if lock.granted and _identity(lock) not in known]
        return [lock for lock in locks if not testing.ends_with_test(lock) and not testing.is_held_by_helper(lock)]

    with contextlib.suppress(*_OUT_OF_REACH):
        return testing.settled(alias, read)
    return []


def _identity(lock: KeyLock) -> object:
    return lock.key, lock.pid, lock.shared
