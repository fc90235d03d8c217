"""The two verbs: `advisory_lock` waits, `try_advisory_lock` does not.

What they return holds configuration only. It may live at module level and be shared by threads: every entry makes a
handle of its own.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from asgiref.sync import iscoroutinefunction
from django.db.models import Model

from . import conf, keys
from .exceptions import AdvisoryLockError
from .handles import LockHandle
from .keys import KeyLike, LockKey
from .options import Options, Scope
from .owners import current_owner

if TYPE_CHECKING:
    from datetime import timedelta
    from types import TracebackType

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")

_MISSING: Any = object()


class _Lock:
    """The configuration of a lock, checked; nothing in it ever changes."""

    def __init__(self, key: tuple[Any, ...], using: str | None, options: Options) -> None:
        self._key_function = key[0] if len(key) == 1 and _is_function(key[0]) else None
        if self._key_function is None:
            self._source = keys.read_parts(key)
        elif iscoroutinefunction(self._key_function):
            raise TypeError("The function that makes a key is simply called, so it cannot be a coroutine function.")
        if using is not None and not isinstance(using, str):
            raise TypeError(f"using is the alias of a database or None, not {type(using).__name__}.")
        self._parts = key
        self._using = using
        self._options = options

    def __repr__(self) -> str:
        using = "" if self._using is None else f" on {self._using!r}"
        return f"<{type(self).__name__} {', '.join(map(repr, self._parts))}{using}>"

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} holds nothing by itself: enter it with `with`, decorate a function, or acquire() it."
        )

    def acquire(self) -> LockHandle:
        """Make the attempt by hand; `release()` of the handle ends it. The errors are those of the `with` block."""
        return self._handle(self._fixed_key())._take(current_owner())

    def __enter__(self) -> LockHandle:
        return self._handle(self._fixed_key())._enter(current_owner(), self, id(sys._getframe(1)))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handle = None
        try:
            owner = current_owner()
            handle = owner.leave(self, id(sys._getframe(1)))
            if handle is None:
                raise AdvisoryLockError(f"{self!r}: only the thread or task that entered a block can leave it.")
            handle._leave(exc, owner)
        except BaseException:
            handle = handle or current_owner().leave(self, id(sys._getframe(1)))
            if handle is not None:
                handle._give_up()
            raise

    def _enter_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LockHandle:
        """Make the attempt for one call of a decorated function."""
        if self._key_function is None:
            key = keys.derive(self._source)
        else:
            parts = self._key_function(*args, **kwargs)
            if parts is None:
                raise TypeError(f"The function that makes the key of {self!r} returned None, which is no key.")
            key = keys.lock_key(parts)
        return self._handle(key)._enter(current_owner())

    def _handle(self, key: LockKey) -> LockHandle:
        return LockHandle(key, conf.get_database() if self._using is None else self._using, self._options)

    def _fixed_key(self) -> LockKey:
        if self._key_function is not None:
            raise TypeError(
                "A function as the key belongs to a decorator, which calls it with the arguments of the call. Here pass"
                " the key itself; and write @advisory_lock(…) with a key, not the bare @advisory_lock."
            )
        return keys.derive(self._source)


class AdvisoryLock(_Lock):
    """A lock to wait for, as `advisory_lock()` returns it: use it as a decorator, in `with`, or by hand."""

    def __call__(self, function: Callable[P, R] = _MISSING, /) -> Callable[P, R]:
        """Decorate a function: each call waits for the lock, then runs."""
        _check_decorated(function)

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._enter_call(args, kwargs):
                return _finished(function(*args, **kwargs))

        return locked


class TryAdvisoryLock(_Lock, Generic[D]):
    """A lock to try for, as `try_advisory_lock()` returns it: use it as a decorator, in `with`, or by hand."""

    def __init__(self, key: tuple[Any, ...], using: str | None, options: Options, default: D) -> None:
        super().__init__(key, using, options)
        self._default = default

    def __call__(self, function: Callable[P, R] = _MISSING, /) -> Callable[P, R | D]:
        """Decorate a function: each call runs if the lock is free, and returns the default if it is busy."""
        _check_decorated(function)

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R | D:
            with self._enter_call(args, kwargs) as lock:
                return _finished(function(*args, **kwargs)) if lock else self._default

        return locked


def advisory_lock(
    *key: KeyLike | Callable[..., KeyLike],
    using: str | None = None,
    timeout: float | timedelta | None = None,
    shared: bool = False,
    scope: Scope = "auto",
    poll_interval: float | timedelta | None = None,
) -> AdvisoryLock:
    """Return a lock that waits until it is free: a decorator, a context manager, or `acquire()` by hand.

    `key` is what `lock_key()` takes; in a decorator also one function, called with the arguments of the call. `using`
    is the alias of the database that the lock lives on, by default `ADVISORY_LOCK_DATABASE`. `timeout` is in seconds
    or a timedelta: None waits for ever, 0 tries once. A `shared` lock excludes exclusive ones only. `scope` is
    `"session"` (freed when the block ends), `"transaction"` (kept until COMMIT or ROLLBACK), or `"auto"`: the second
    inside a transaction, else the first. `poll_interval`, in seconds, makes the client try and sleep in turn instead
    of waiting in the server's queue, so that no snapshot stays open while it waits.

    Raises `LockTimeout` when the time is up, `LockDeadlock` for a wait that cannot end, `LockNotAcquired` for one that
    was cancelled, `LockTableFull`, and `LockUnsupported` where the database cannot hold such a lock; Django's
    `TransactionManagementError` where `scope` does not fit the transactions that are open; and `LockLost` at the end
    of the block where the lock was lost in it. See
    https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
    """
    return AdvisoryLock(key, using, Options(shared, scope, timeout, poll_interval))


@overload
def try_advisory_lock(
    *key: KeyLike | Callable[..., KeyLike], using: str | None = None, shared: bool = False, scope: Scope = "auto"
) -> TryAdvisoryLock[None]: ...


@overload
def try_advisory_lock(
    *key: KeyLike | Callable[..., KeyLike],
    using: str | None = None,
    shared: bool = False,
    scope: Scope = "auto",
    default: D,
) -> TryAdvisoryLock[D]: ...


def try_advisory_lock(
    *key: KeyLike | Callable[..., KeyLike],
    using: str | None = None,
    shared: bool = False,
    scope: Scope = "auto",
    default: Any = None,
) -> TryAdvisoryLock[Any]:
    """Return a lock that is taken if it is free and never waited for: the right thing for recurring jobs that pile up.

    As a decorator it skips the body of a call that finds the lock busy, which returns `default`. In `with` the body
    runs in any case: look at the answer, `with try_advisory_lock("x") as lock: if lock: …`; a body that never did is
    warned about. `acquire()` returns a handle that is false where the lock is busy. The other options and errors are
    those of `advisory_lock()`; no `LockTimeout` is raised. See
    https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS.
    """
    return TryAdvisoryLock(key, using, Options(shared, scope, tries_only=True), default)


def _finished(result: R) -> R:
    """Return the result of a call, unless the work is still to be done with it, when the lock is free again."""
    if isinstance(result, (GeneratorType, AsyncGeneratorType)) or inspect.isawaitable(result):
        if isinstance(result, (CoroutineType, GeneratorType)):  # or Python says that it was never awaited
            result.close()
        raise TypeError(
            f"A lock guards a call, and this one returned a {type(result).__name__}, whose body runs after it. Take the"
            f" lock inside that body; in an async view decorate the handler, not dispatch()."
        )
    return result


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, (type, Model))


def _check_decorated(function: object) -> None:
    """Refuse what would run without the lock, or what a wrapper would break."""
    if function is _MISSING:
        reason = "a call without arguments; write @advisory_lock(…) with a key, not the bare @advisory_lock"
    elif isinstance(function, (classmethod, staticmethod)):
        reason = f"a {type(function).__name__}; put the lock below @{type(function).__name__}"
    elif isinstance(function, type):
        reason = "a class; decorate its method, in a view with method_decorator"
    elif not callable(function) or not (inspect.isroutine(function) or isinstance(function, functools.partial)):
        reason = f"{type(function).__name__}; decorate the function itself, for a task below @task"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        reason = "a generator function, whose body runs after the call has returned; take the lock inside it"
    elif iscoroutinefunction(function):
        reason = "a coroutine function; only synchronous functions can be decorated so far"
    else:
        return
    raise TypeError(f"A lock decorates functions, methods and partials, not {reason}.")
