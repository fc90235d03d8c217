"""The two verbs: `advisory_lock` waits, `try_advisory_lock` does not.

What they return holds configuration only. It may live at module level and be shared by threads: every entry makes a
handle of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, overload

from asgiref.sync import iscoroutinefunction

from . import keys, known
from .configured import ConfiguredLock
from .decorating import MISSING, check_decorated, finished
from .handles import LockHandle
from .keys import KeyLike, LockKey
from .options import Options, Scope
from .several import TakeAll
from .single import Take

if TYPE_CHECKING:
    from datetime import timedelta

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")


class AdvisoryLock(ConfiguredLock):
    """A lock to wait for, as `advisory_lock()` returns it: use it as a decorator, in `with`, or by hand."""

    def __call__(self, function: Callable[P, R] = MISSING, /) -> Callable[P, R]:
        """Decorate a function: each call waits for the lock, then runs."""
        check_decorated(function)
        known.note(self)

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._enter_call(args, kwargs):
                return finished(function(*args, **kwargs))

        @functools.wraps(function)
        async def alocked(*args: P.args, **kwargs: P.kwargs) -> Any:
            async with await self._aenter_call(args, kwargs):
                return finished(await cast("Any", function(*args, **kwargs)))

        return cast("Callable[P, R]", alocked) if iscoroutinefunction(function) else locked


class AdvisoryLockAll(AdvisoryLock):
    """Several locks to wait for, as `advisory_lock_all()` returns them: used as `AdvisoryLock` is."""

    def _read_key(self, parts: tuple[Any, ...]) -> Any:
        if not parts:
            raise ValueError("advisory_lock_all() needs at least one key.")
        return [_read_one_of(part) for part in parts]

    def _read_returned(self, returned: Any) -> Any:
        if isinstance(returned, (str, LockKey)) or not isinstance(returned, Iterable):
            raise TypeError(f"The function that makes the keys of {self!r} returns a list of keys, not {returned!r}.")
        return self._read_key(tuple(returned))

    def _handle(self, source: Any) -> LockHandle:
        found = tuple(sorted({keys.derive(one) for one in source}))
        return LockHandle(found, self._alias(), self._options, Take if len(found) == 1 else TakeAll, type(self))


def _read_one_of(part: Any) -> Any:
    part = part.value if isinstance(part, Enum) else part
    if isinstance(part, int) and not isinstance(part, bool):
        raise TypeError(
            f"{part!r} is a bare number: in advisory_lock_all() write LockKey(({part},)) for that very key."
        )
    return keys.read_parts(part if isinstance(part, tuple) else (part,))


class TryAdvisoryLock(ConfiguredLock, Generic[D]):
    """A lock to try for, as `try_advisory_lock()` returns it: use it as a decorator, in `with`, or by hand."""

    def __init__(self, key: tuple[Any, ...], using: str | None, options: Options, default: D) -> None:
        super().__init__(key, using, options)
        self._default = default

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, Coroutine[Any, Any, R | D]]: ...

    @overload
    def __call__(self, function: Callable[P, R] = MISSING, /) -> Callable[P, R | D]: ...

    def __call__(self, function: Callable[..., Any] = MISSING, /) -> Callable[..., Any]:
        """Decorate a function: each call runs if the lock is free, and returns the default if it is busy."""
        check_decorated(function)
        known.note(self)

        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            with self._enter_call(args, kwargs) as lock:
                return finished(function(*args, **kwargs)) if lock else self._default

        @functools.wraps(function)
        async def alocked(*args: Any, **kwargs: Any) -> Any:
            async with await self._aenter_call(args, kwargs) as lock:
                return finished(await function(*args, **kwargs)) if lock else self._default

        return alocked if iscoroutinefunction(function) else locked


def advisory_lock(
    *key: KeyLike | Callable[..., KeyLike],
    using: str | None = None,
    timeout: float | timedelta | None = None,
    shared: bool = False,
    scope: Scope = "auto",
    poll_interval: float | timedelta | None = None,
    dedicated: bool = False,
) -> AdvisoryLock:
    """Return a lock that waits until it is free: a decorator, a context manager, or `acquire()` by hand.

    `key` is what `lock_key()` takes; in a decorator also one function, called with the arguments of the call. `using`
    is the alias of the database that the lock lives on, by default `ADVISORY_LOCK_DATABASE`. `timeout` is in seconds
    or a timedelta: None waits for ever, 0 tries once. A `shared` lock excludes exclusive ones only. `scope` is
    `"session"` (freed when the block ends), `"transaction"` (kept until COMMIT or ROLLBACK), or `"auto"`: the second
    inside a transaction, else the first. `poll_interval`, in seconds, makes the client try and sleep in turn instead
    of waiting in the server's queue, so that no snapshot stays open while it waits. A `dedicated` lock has a database
    session of its own, which the body cannot close or break, and `lock.lost` is set as soon as that session ends.

    Raises `LockTimeout` when the time is up, `LockDeadlock` for a wait that cannot end, `LockNotAcquired` for one that
    was cancelled, `LockTableFull`, and `LockUnsupported` where the database cannot hold such a lock; Django's
    `TransactionManagementError` where `scope` does not fit the transactions that are open; and `LockLost` at the end
    of the block where the lock was lost in it. See
    https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
    """
    return AdvisoryLock(key, using, Options(shared, scope, timeout, poll_interval, dedicated=dedicated))


@overload
def try_advisory_lock(
    *key: KeyLike | Callable[..., KeyLike],
    using: str | None = None,
    shared: bool = False,
    scope: Scope = "auto",
    dedicated: bool = False,
) -> TryAdvisoryLock[None]: ...


@overload
def try_advisory_lock(
    *key: KeyLike | Callable[..., KeyLike],
    using: str | None = None,
    shared: bool = False,
    scope: Scope = "auto",
    dedicated: bool = False,
    default: D,
) -> TryAdvisoryLock[D]: ...


def try_advisory_lock(
    *key: KeyLike | Callable[..., KeyLike],
    using: str | None = None,
    shared: bool = False,
    scope: Scope = "auto",
    dedicated: bool = False,
    default: Any = None,
) -> TryAdvisoryLock[Any]:
    """Return a lock that is taken if it is free and never waited for: the right thing for recurring jobs that pile up.

    As a decorator it skips the body of a call that finds the lock busy, which returns `default`. In `with` the body
    runs in any case: look at the answer, `with try_advisory_lock("x") as lock: if lock: …`; a body that never did is
    warned about. `acquire()` returns a handle that is false where the lock is busy. The other options and errors are
    those of `advisory_lock()`; no `LockTimeout` is raised. See
    https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS.
    """
    return TryAdvisoryLock(key, using, Options(shared, scope, tries_only=True, dedicated=dedicated), default)


def advisory_lock_all(
    *keys: KeyLike | Callable[..., Iterable[KeyLike]],
    using: str | None = None,
    timeout: float | timedelta | None = None,
    shared: bool = False,
    scope: Scope = "auto",
) -> AdvisoryLockAll:
    """Return a lock on several keys, all or nothing: a decorator, a context manager, or `acquire()` by hand.

    Each argument is one key: a `LockKey`, text, a model instance, or a tuple of parts. In a decorator it may also be
    one function, which is called with the arguments of the call and returns the keys. They are taken with one
    statement, each once, in one order for everybody, so that two callers who name them in different orders never
    deadlock. The options and errors are those of `advisory_lock()`; where one key stays busy nothing is kept.
    """
    return AdvisoryLockAll(keys, using, Options(shared, scope, timeout))
