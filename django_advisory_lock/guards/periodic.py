"""A guard for periodic work: at most one start in each interval, on any number of hosts."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from ..decorating import MISSING, check_decorated
from ..locks import try_advisory_lock
from ..notices import logger
from .base import Guard
from .period import NotedPeriod, read_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from datetime import timedelta

    from ..exceptions import LockTimeout

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")


@overload
def periodic_lock(name: str, *, min_interval: float | timedelta, using: str | None = None) -> PeriodicLock[None]: ...


@overload
def periodic_lock(
    name: str, *, min_interval: float | timedelta, using: str | None = None, default: D
) -> PeriodicLock[D]: ...


def periodic_lock(
    name: str, *, min_interval: float | timedelta, using: str | None = None, default: Any = None
) -> PeriodicLock[Any]:
    """Return a decorator for work that is started at most once in each interval, by whoever comes first.

    A call runs only if nobody else runs it, and if the last start was at least `min_interval` ago, in seconds or as a
    timedelta, by the clock of the database; else it returns `default` at once, and says why in the log. A run that
    fails counts as a start. The key of the lock is `("periodic", name)`. What was started when is kept in the table of
    `models.PeriodicRun`, on the alias `using`, by default `ADVISORY_LOCK_DATABASE`.

    A call inside `atomic()` raises `RuntimeError`, and one without the table `ImproperlyConfigured`. The other errors
    are those of `try_advisory_lock()`. See https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
    """
    text = name.value if isinstance(name, Enum) else name
    if not isinstance(text, str):
        raise TypeError(f"periodic_lock() needs the name of the work as text, not {type(name).__name__}.")
    return PeriodicLock(text, read_interval(min_interval), using, default)


class PeriodicLock(Guard, Generic[D]):
    """A decorator, as `periodic_lock()` returns it."""

    def __init__(self, name: str, interval: timedelta, using: str | None, default: D) -> None:
        super().__init__(try_advisory_lock("periodic", name, using=using))
        self.name = name
        self.interval = interval
        self.default = default

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} every {self.interval}>"

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, Coroutine[Any, Any, R | D]]: ...

    @overload
    def __call__(self, function: Callable[P, R] = MISSING, /) -> Callable[P, R | D]: ...

    def __call__(self, function: Callable[..., Any] = MISSING, /) -> Callable[..., Any]:
        """Decorate a function: each call runs if it is due, and returns the default if it is not."""
        check_decorated(function)
        return self.around(function)

    def period(self) -> NotedPeriod:
        return NotedPeriod(self.interval, self.name)

    def busy(self, error: LockTimeout, /, *args: Any, **kwargs: Any) -> D:
        logger.info("%s was skipped. %s", self.name, error)
        return self.default

    def too_soon(self, reason: str) -> D:
        logger.info("%s was skipped, %s.", self.name, reason)
        return self.default
