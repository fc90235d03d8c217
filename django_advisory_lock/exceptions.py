"""The errors of this library, on one screen. None is a `django.db.Error`: the database's own is the `__cause__`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from .inspection import KeyLock
    from .keys import LockKey


class AdvisoryLockError(Exception):
    """Something about an advisory lock went wrong."""

    # The message is the only positional argument: pickle and copy then rebuild the error, and restore the attributes.
    def __init__(
        self, message: str = "", *, key: LockKey | None = None, using: str | None = None, waited: float | None = None
    ) -> None:
        super().__init__(message)
        self.key = key
        self.using = using
        self.waited = waited


class LockNotAcquired(AdvisoryLockError):
    """The lock was not acquired."""


class LockTimeout(LockNotAcquired, TimeoutError):
    """The lock is held by somebody else, and stayed so for as long as the caller would wait."""

    holders: tuple[KeyLock, ...] = ()  # who was in the way, as far as that could be found out


class LockDeadlock(LockNotAcquired):
    """The wait for the lock could never have ended."""


class LockTableFull(LockNotAcquired):
    """The server's lock table is full; while that lasts, new connections fail too."""


class LockLost(AdvisoryLockError):
    """The lock was held, and was gone before its block ended."""


class LockUnsupported(AdvisoryLockError, ImproperlyConfigured):
    """This database, as it is configured, cannot hold the lock."""


class PoolerDetected(LockUnsupported):
    """A connection pooler stands in front of the server, where a session lock would exclude nobody."""
