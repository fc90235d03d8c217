"""A guard for views: of two requests for the same thing one works, and the other is told to come back later."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.views import View

from .. import known
from ..locks import advisory_lock
from ..notices import warn_caller
from .answers import busy_response, read_retry_after, read_status
from .base import Guard, refuse_hidden_hook
from .streams import hand_over

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from django.http import HttpRequest

    from ..exceptions import LockTimeout
    from ..handles import LockHandle
    from ..keys import KeyLike, LockKey
    from ..locks import AdvisoryLock
    from ..options import Scope

V = TypeVar("V", bound="Callable[..., Any]")

METHODS = frozenset(name.upper() for name in View.http_method_names)


def lock_view(
    *key: KeyLike | Callable[..., KeyLike],
    using: str | None = None,
    timeout: float | timedelta | None = 0,
    shared: bool = False,
    scope: Scope = "auto",
    methods: Iterable[str] | None = None,
    status: int = 409,
    retry_after: float | timedelta | None = 1,
) -> Callable[[V], V]:
    """Return a decorator that runs a view, synchronous or not, under an advisory lock, or answers that it is busy.

    `key` is what `lock_key()` takes, or one function of the request and the arguments of the URL. `timeout` is how
    long a request waits, in seconds or a timedelta: 0 tries once, None waits for ever, and so long it keeps a worker
    of the server. `methods` are the HTTP methods that need the lock, by default all but OPTIONS; HEAD goes with GET.
    A busy view answers with `status` and, unless `retry_after` is None, with a Retry-After header in seconds.

    The lock lasts for the call of the view; under ATOMIC_REQUESTS until the COMMIT; where the response streams, until
    it is closed. The other options, and the errors, are those of `advisory_lock()`. See
    https://docs.djangoproject.com/en/stable/topics/db/transactions/#tying-transactions-to-http-requests.
    """
    lock = advisory_lock(*key, using=using, timeout=timeout, shared=shared, scope=scope)
    guard = _ViewGuard(lock, read_methods(methods), read_status(status), read_retry_after(retry_after))

    def decorate(view: V) -> V:
        check_view(view)
        return guard.around(view)

    return decorate


class AdvisoryLockViewMixin(View):
    """Run the handlers of a view under an advisory lock, or answer that it is busy. Name this class before `View`.

    The lock is taken around the method that handles the request, `get()` or `post()`, synchronous or not, after the
    checks for login, permission and throttling: also in the views and viewsets of Django REST framework. The key is
    `lock_key`, or what `get_lock_key()` returns, which finds `self.request` and `self.kwargs`. The other attributes
    mean what the arguments of `lock_view()` mean. While the handler runs `held_lock` is the handle of the lock, so
    that long work can `held_lock.check()`; it is None for a method that needs no lock.

    Raises `ImproperlyConfigured` where there is no key. The other errors are those of `advisory_lock()`.
    """

    lock_key: KeyLike | None = None
    lock_timeout: float | timedelta | None = 0
    lock_using: str | None = None
    lock_shared: bool = False
    lock_methods: Iterable[str] | None = None
    lock_status: int = 409
    lock_retry_after: float | timedelta | None = 1
    held_lock: LockHandle | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_hidden_hook(cls, AdvisoryLockViewMixin, "dispatch", also_own=True)
        _check_attributes(cls)
        known.note(cls)

    def get_lock_key(self) -> KeyLike:
        """Return the key for this request."""
        if self.lock_key is None:
            raise ImproperlyConfigured(
                f"{type(self).__qualname__} has no key for its lock: set lock_key, or override get_lock_key()."
            )
        return self.lock_key

    @classmethod
    def _known_keys(cls) -> tuple[LockKey, ...]:
        return known.fixed(cls.lock_key)

    def handle_lock_busy(self, error: LockTimeout, request: HttpRequest, /, *args: Any, **kwargs: Any) -> Any:
        """Return the response to a request that finds the lock busy; for a coroutine function also an awaitable."""
        return busy_response(error, request, read_status(self.lock_status), read_retry_after(self.lock_retry_after))

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        # Django and its relatives look the handler up in the end: an attribute of the instance comes before the method.
        # All that need the lock are wrapped, for put() may call post(), as in Django's forms.
        methods = read_methods(self.lock_methods)
        asked = {str(request.method).lower()}.intersection(self.http_method_names) - {"options"}
        self.held_lock = None
        guard = _HandlerGuard(self)
        for name in asked if methods is None else map(str.lower, methods):
            handler = getattr(self, name, None)
            if handler is not None:
                setattr(self, name, guard.around(handler))
        return super().dispatch(request, *args, **kwargs)


def _check_attributes(cls: type[AdvisoryLockViewMixin]) -> None:
    """Refuse wrong values when the class is made, and not when a first request finds the lock busy."""

    def given(name: str, default: Any = None) -> Any:
        value = inspect.getattr_static(cls, name)
        return default if hasattr(type(value), "__get__") else value  # only an instance knows a property

    read_methods(given("lock_methods"))
    read_status(given("lock_status", 409))
    read_retry_after(given("lock_retry_after"))
    key = given("lock_key")
    advisory_lock(
        "none" if key is None else key,
        using=given("lock_using"),
        timeout=given("lock_timeout"),
        shared=given("lock_shared", False),
    )


class _StreamGuard(Guard):
    """A lock around a view, which a streaming response takes over."""

    def is_asynchronous(self, function: Any) -> bool:
        # In a class of coroutine functions dispatch() and options() are none, and return what the others return.
        view = _bound_to(function)
        return super().is_asynchronous(function) or (isinstance(view, View) and view.view_is_async)

    def outlasts(self, response: Any) -> bool:
        return getattr(response, "streaming", False) and not response.closed

    def hand_over(self, response: Any, handle: LockHandle) -> None:
        if handle.scope == "transaction":
            warn_caller(
                f"The lock {handle.key.name!r} on {handle.using!r} ends with the transaction, before the response is"
                f" streamed. Make the view @non_atomic_requests, or take a lock in the generator."
            )
        else:
            hand_over(handle, response)


class _ViewGuard(_StreamGuard):
    """A lock around a function."""

    def __init__(
        self, lock: AdvisoryLock, methods: frozenset[str] | None, status: int, retry_after: int | None
    ) -> None:
        super().__init__(lock)
        self.methods = methods
        self.status = status
        self.retry_after = retry_after

    def covers(self, request: Any = None, *args: Any) -> bool:
        if not hasattr(request, "META"):
            raise TypeError(_METHOD)
        return needs_lock(request, self.methods)

    def busy(self, error: LockTimeout, request: HttpRequest, /, *args: Any, **kwargs: Any) -> HttpResponse:
        return busy_response(error, request, self.status, self.retry_after)


class _HandlerGuard(_StreamGuard):
    """A lock around the handler of one request in a class."""

    def __init__(self, view: AdvisoryLockViewMixin) -> None:
        self.view = view
        super().__init__(
            advisory_lock(
                lambda *args, **kwargs: view.get_lock_key(),
                using=view.lock_using,
                timeout=view.lock_timeout,
                shared=view.lock_shared,
            )
        )

    def covers(self, *args: Any) -> bool:
        # A handler that has the lock may call another one; the next call of one that has ended needs it anew.
        hold = None if self.view.held_lock is None else self.view.held_lock._hold
        return hold is None or not hold.is_certain

    def begin(self, handle: LockHandle) -> None:
        self.view.held_lock = handle

    def busy(self, error: LockTimeout, request: HttpRequest, /, *args: Any, **kwargs: Any) -> Any:
        return self.view.handle_lock_busy(error, request, *args, **kwargs)


def _bound_to(function: Any) -> Any:
    """Return the instance whose method is called in the end, below the other decorators of a method_decorator()."""
    while function is not None and not hasattr(function, "__self__"):
        is_partial = isinstance(function, functools.partial)
        function = function.func if is_partial else getattr(function, "__wrapped__", None)
    return getattr(function, "__self__", None)


_METHOD = (
    "lock_view() got no request as its first argument. If it decorates a method, say"
    " @method_decorator(lock_view(…)), or use AdvisoryLockViewMixin."
)


def check_view(view: object) -> None:
    """Refuse what would run without the lock, or what is no view."""
    function = inspect.unwrap(view) if callable(view) else view
    if isinstance(view, type):
        raise TypeError(f"lock_view() decorates views, not classes: {view.__qualname__}.as_view(), or use its mixin.")
    if not callable(view):
        raise TypeError(f"lock_view() decorates views, not {view!r}. Write @lock_view(…) with a key.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("lock_view() decorates views, not generator functions: return a StreamingHttpResponse.")
    if inspect.isfunction(view) and view.__code__.co_varnames[: view.__code__.co_argcount][:1] == ("self",):
        raise TypeError(_METHOD)


def read_methods(methods: Iterable[str] | None) -> frozenset[str] | None:
    """Check the names of HTTP methods; None stands for all but OPTIONS."""
    if methods is None:
        return None
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        raise TypeError(f"The methods that need a lock are a list of names, such as ['POST'], not {methods!r}.")
    names = frozenset(str(name).upper() for name in methods)
    unknown = sorted(names - METHODS)
    if unknown or not names:
        found = ", ".join(unknown) or "none at all"
        raise ValueError(f"The methods that need a lock are some of {', '.join(sorted(METHODS))}, not {found}.")
    return names | {"HEAD"} if "GET" in names else names


def needs_lock(request: HttpRequest, methods: frozenset[str] | None) -> bool:
    """Whether a request is one that the lock is for."""
    return request.method != "OPTIONS" if methods is None else request.method in methods
