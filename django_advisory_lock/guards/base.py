"""What the guards share: a lock around the calls of a function, and the order of the bases of a class."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction

from .. import hops, known
from ..awaiting import take_in_task
from ..decorating import finished
from ..exceptions import LockTimeout
from ..locks import advisory_lock, try_advisory_lock
from ..owners import current_owner, task_owner
from .period import NO_PERIOD, read_interval

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from ..handles import LockHandle
    from ..keys import KeyLike
    from ..locks import AdvisoryLock, TryAdvisoryLock
    from .period import Period

F = TypeVar("F", bound="Callable[..., Any]")


class Guard:
    """A lock around the calls of a function, and what is done instead of a call where the lock is busy.

    Busy is `LockTimeout`, raised by the attempt of the guard itself. Every other error passes through, and so does the
    same one from the function that makes the key, or from the body.
    """

    def __init__(self, lock: AdvisoryLock | TryAdvisoryLock[Any]) -> None:
        self.lock = lock

    def covers(self, *args: Any) -> bool:
        """Whether a call needs the lock."""
        return True

    def period(self) -> Period:
        """Return what watches over the interval between two starts; most guards have none."""
        return NO_PERIOD

    def begin(self, handle: LockHandle) -> None:
        """Called when the lock is held, before the function is."""

    def busy(self, error: LockTimeout, /, *args: Any, **kwargs: Any) -> Any:
        """Called instead of the function, and returns what it would; for a coroutine function also an awaitable."""
        raise NotImplementedError

    def too_soon(self, reason: str) -> Any:
        """Called instead of the function where its interval is not over yet, and returns what it would."""
        raise NotImplementedError

    def is_asynchronous(self, function: Any) -> bool:
        """Whether a call returns an awaitable; an object may be marked so, its `__call__`, or what a partial calls."""
        if iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            return True
        return isinstance(function, functools.partial) and self.is_asynchronous(function.func)

    def outlasts(self, result: Any) -> bool:
        """Whether what a call returned still needs the lock."""
        return False

    def hand_over(self, result: Any, handle: LockHandle) -> None:
        """Let the lock go on with the result. Called in the thread that took it."""
        raise NotImplementedError

    def around(self, function: F) -> F:
        """Return the function with the lock around its calls."""
        if self.lock._key_function is None:  # others are made for each request, and tell no name
            known.note(self.lock)
        return cast("F", self._around_coroutine(function) if self.is_asynchronous(function) else self._around(function))

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            if not self.covers(*args):
                return function(*args, **kwargs)
            handle, period = self.lock._handle_for_call(args, kwargs), self.period()
            if not period.look(handle):
                return self.too_soon(period.reason)
            with period:
                try:
                    handle._enter(current_owner())
                    if not handle._acquired:
                        period.require(handle)
                except LockTimeout as error:
                    return finished(self.busy(error, *args, **kwargs))
                with handle:
                    if not period.start():
                        return self.too_soon(period.reason)
                    self.begin(handle)
                    result = finished(function(*args, **kwargs))
                    if self.outlasts(result):
                        self.hand_over(result, handle)
                    return result

        return locked

    def _around_coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def alocked(*args: Any, **kwargs: Any) -> Any:
            if not self.covers(*args):
                return await function(*args, **kwargs)
            made: list[LockHandle] = []

            def make_handle() -> LockHandle:
                made[:] = made or [self.lock._handle_for_call(args, kwargs)]
                return made[0]

            period = self.period()
            if not await period.alook(make_handle):
                return self.too_soon(period.reason)
            try:
                handle = await take_in_task(make_handle, task_owner(), (None, 0))
                if not handle._acquired:
                    period.require(handle)
            except LockTimeout as error:
                if not made:  # it comes from the function that makes the key
                    raise
                answer = self.busy(error, *args, **kwargs)
                return await answer if inspect.isawaitable(answer) else answer
            async with period, handle:
                if not await period.astart():
                    return self.too_soon(period.reason)
                self.begin(handle)
                result = finished(await function(*args, **kwargs))
                if self.outlasts(result):
                    await hops.finish(lambda: self.hand_over(result, handle))
                return result

        return alocked


def guard_lock(
    key: Callable[..., KeyLike],
    using: str | None,
    timeout: float | timedelta | None,
    shared: bool,
    *,
    interval: timedelta | None,
    poll_interval: float | None = None,
) -> AdvisoryLock | TryAdvisoryLock[None]:
    """Return the lock of a class. Where its interval tells who runs it, the server need not be asked for the holder."""
    if interval is not None and timeout == 0:
        return try_advisory_lock(key, using=using, shared=shared)
    return advisory_lock(key, using=using, timeout=timeout, shared=shared, poll_interval=poll_interval)


def refuse_wrong_interval(cls: type) -> None:
    """Refuse a wrong `lock_min_interval` when the class is made; a property is not asked before the first run."""
    value = getattr(cls, "lock_min_interval", None)
    if value is None or hasattr(value, "__get__"):
        return
    try:
        read_interval(value)
    except (TypeError, ValueError, OverflowError) as error:
        refusal = TypeError if isinstance(error, TypeError) else ValueError
        raise refusal(f"{cls.__qualname__}.lock_min_interval: {error}") from error


def refuse_hidden_hook(cls: type, mixin: type, hook: str, *, also_own: bool = False) -> None:
    """Raise TypeError where a class would run unlocked in silence, since the mixin's method is never called.

    A base that comes before the mixin and knows nothing of it may define the method, and so may the class itself. One
    that calls `super()` goes on to the mixin's.
    """
    bases = [base for base in cls.__mro__[1 : cls.__mro__.index(mixin)] if not issubclass(base, mixin)]
    for base in [cls, *bases] if also_own else bases:
        if hook in vars(base) and not _calls_super(vars(base)[hook]):
            raise TypeError(
                f"{cls.__qualname__}: {base.__qualname__} defines {hook}() before {mixin.__qualname__}, without"
                f" super(), so nothing would be locked. Name {mixin.__qualname__} first, or call super().{hook}()."
            )


def _calls_super(method: Any) -> bool:
    return _names_super(getattr(inspect.unwrap(method), "__code__", None))


def _names_super(code: Any) -> bool:
    inner = getattr(code, "co_consts", ())
    return "super" in getattr(code, "co_names", ()) or any(
        _names_super(one) for one in inner if hasattr(one, "co_code")
    )
