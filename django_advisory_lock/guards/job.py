"""A guard for jobs: of two workers that are given the same job one works, and the other skips it."""

from __future__ import annotations

import functools
import itertools
from types import MethodType
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction

from .. import known
from ..notices import logger
from .base import Guard, guard_lock, refuse_hidden_hook, refuse_wrong_interval
from .period import NO_PERIOD, NotedPeriod, Period, read_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta

    from typing_extensions import Self

    from ..exceptions import LockTimeout
    from ..keys import KeyLike, LockKey


class AdvisoryLockJobMixin:
    """Run a job under an advisory lock, or skip it where the lock is busy. Name this class before the job's own base.

    The lock is taken around `run()`, or the method that `lock_method` names, synchronous or not, wherever in the class
    or its bases it is defined; a call of `super().run()` inside takes nothing more. The key is `lock_key`, or what
    `get_lock_key()` returns, by default the class: one lock for each job, whatever its arguments. `lock_timeout` is in
    seconds or a timedelta: 0 tries once, None waits for ever. What is busy is skipped: that is logged, and the result
    is None; override `handle_lock_busy()` to do something else, such as to try again later. With `lock_min_interval`,
    in seconds or as a timedelta, a job also skips whose key was started less than that ago: see `periodic_lock()`.

    The lock is a session lock, free right after the job; inside a transaction it lasts until the COMMIT. The errors
    are those of `advisory_lock()`.
    """

    lock_key: KeyLike | None = None
    lock_timeout: float | timedelta | None = 0
    lock_using: str | None = None
    lock_shared: bool = False
    lock_method: str = "run"
    lock_min_interval: float | timedelta | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_hidden_hook(cls, AdvisoryLockJobMixin, cls.lock_method)
        refuse_wrong_interval(cls)
        known.note(cls)
        if not getattr(_find(cls.__mro__, cls.lock_method), "__isabstractmethod__", False):
            _lock_method(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        new = super().__new__
        # object.__new__() refuses arguments, unless __init__() takes them.
        takes_none = new is object.__new__ and cls.__init__ is not object.__init__
        job = new(cls) if takes_none else new(cls, *args, **kwargs)
        # Again: a class decorator may have replaced the method, or a base have kept __init_subclass__() to itself.
        if not _lock_method(cls):
            raise TypeError(f"{cls.__qualname__} has no {cls.lock_method}(): name the method to lock in lock_method.")
        return job

    def get_lock_key(self, /, *args: Any, **kwargs: Any) -> KeyLike:
        """Return the key of this run; the arguments are those of `run()`."""
        return type(self)._default_key() if self.lock_key is None else self.lock_key

    @classmethod
    def _default_key(cls) -> tuple[str, str]:
        return "job", f"{cls.__module__}.{cls.__qualname__}"

    @classmethod
    def _known_keys(cls) -> tuple[LockKey, ...]:
        return known.fixed(cls._default_key() if cls.lock_key is None else cls.lock_key)

    def handle_lock_busy(self, error: LockTimeout, /, *args: Any, **kwargs: Any) -> Any:
        """Called instead of `run()` where the lock is busy, and returns what it would; awaited where `run()` is."""
        logger.info("%s was skipped. %s", type(self).__qualname__, error)
        return None


def _find(classes: Iterable[type], name: str) -> Any:
    """Return what the first of some classes has under a name; its metaclass may have another."""
    return next((vars(base)[name] for base in classes if name in vars(base)), None)


def _lock_method(cls: type[AdvisoryLockJobMixin]) -> bool:
    """Put the lock around the method of a class, and tell whether there is one."""
    method = _find(cls.__mro__, cls.lock_method)
    if method is not None and not isinstance(method, _LockedMethod):
        setattr(cls, cls.lock_method, _LockedMethod(cls, cls.lock_method, method))
    return method is not None


class _LockedMethod:
    """The method of a class that runs under the lock: its own, or what it inherits."""

    def __init__(self, cls: type, name: str, method: Any) -> None:
        self.cls = cls
        self.name = name
        self.own = vars(cls).get(name)
        self.inherited = method
        self.is_static = isinstance(method, (classmethod, staticmethod)) or not hasattr(method, "__get__")
        # One function for all jobs, so that `job.run` is a method like any other: it can be compared, and pickled.
        self.function = _forward(_bind(method, None, cls), lambda *args: (self._locked(*args[:1]), args[1:]))
        # Where it is found: the class that it is inherited from has another one under that name.
        self.function.__module__, self.function.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"
        functools.update_wrapper(self, self.function, updated=())  # type: ignore[arg-type]

    def __get__(self, job: Any, cls: type[AdvisoryLockJobMixin]) -> Any:
        if self._is_inner(cls):
            return _bind(self._find(cls), job, cls)
        if self.is_static:
            # It is called without a job, and needs one for its key.
            return _forward(
                _bind(self._find(cls), job, cls), lambda *args: (self._locked(cls() if job is None else job), args)
            )
        return self.function if job is None else MethodType(self.function, job)

    def _locked(self, job: Any = None) -> Callable[..., Any]:
        """Return the method of a job, with the lock around it."""
        cls = type(job)
        if not issubclass(cls, self.cls) and not self._classes_from_here(cls):
            raise TypeError(
                f"{self.function.__qualname__}() is called with a job of its class, not {cls.__qualname__}."
            )
        method: Callable[..., Any] = _bind(self._find(cls), job, cls)
        return method if self._is_inner(cls) else _JobGuard(job).around(method)

    def _is_inner(self, cls: type[AdvisoryLockJobMixin]) -> bool:
        """Whether a subclass has a method of its own, which calls this one with super(), inside the lock."""
        outermost = _find(cls.__mro__, cls.lock_method)
        return outermost is not self and isinstance(outermost, _LockedMethod)

    def _find(self, cls: type) -> Any:
        if self.own is not None:
            return self.own
        # Anew each time: the bases of a subclass may come in between.
        after = self._classes_from_here(cls)
        return _find(after[1:], self.name) if after else self.inherited

    def _classes_from_here(self, cls: type) -> list[type]:
        """Return the classes from the one that has this method: none where a decorator of the class has replaced it.

        That is not always the class that it was made for: dataclass(slots=True) copies classes.
        """
        return list(itertools.dropwhile(lambda base: vars(base).get(self.name) is not self, cls.__mro__))


def _bind(method: Any, job: Any, cls: type) -> Any:
    return method.__get__(job, cls) if hasattr(method, "__get__") else method


def _forward(function: Any, find: Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]) -> Callable[..., Any]:
    """Return a function that looks like another one, and calls what is found for its arguments."""

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        method, others = find(*args)
        return method(*others, **kwargs)

    @functools.wraps(function)
    async def aforward(*args: Any, **kwargs: Any) -> Any:
        method, others = find(*args)
        return await method(*others, **kwargs)

    is_asynchronous = iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    return aforward if is_asynchronous else forward


class _JobGuard(Guard):
    """A lock around one job."""

    def __init__(self, job: AdvisoryLockJobMixin) -> None:
        self.interval = None if job.lock_min_interval is None else read_interval(job.lock_min_interval)
        super().__init__(
            guard_lock(job.get_lock_key, job.lock_using, job.lock_timeout, job.lock_shared, interval=self.interval)
        )
        self.job = job

    def period(self) -> Period:
        return NO_PERIOD if self.interval is None else NotedPeriod(self.interval)

    def too_soon(self, reason: str) -> None:
        logger.info("%s was skipped, %s.", type(self.job).__qualname__, reason)

    def busy(self, error: LockTimeout, /, *args: Any, **kwargs: Any) -> Any:
        return self.job.handle_lock_busy(error, *args, **kwargs)
