"""Two requests for the same thing: one works, the other is told to come back later."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import gc
import inspect
import io
import json
import logging
import threading
import unittest
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from wsgiref.util import FileWrapper

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.mixins import LoginRequiredMixin, PermissionRequiredMixin
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import BaseCommand, call_command
from django.db import Error, close_old_connections, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.forms import Form
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.test import AsyncClient, AsyncRequestFactory, Client, RequestFactory, TestCase, override_settings
from django.urls import path
from django.utils import translation
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import cache_control, never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from django.views.generic import FormView, RedirectView, TemplateView
from psycopg.types.string import StrDumper
from rest_framework import generics, permissions, serializers, status, viewsets
from rest_framework.authentication import BasicAuthentication, SessionAuthentication
from rest_framework.decorators import action, api_view, permission_classes
from rest_framework.exceptions import APIException
from rest_framework.renderers import BrowsableAPIRenderer, JSONRenderer
from rest_framework.response import Response
from rest_framework.routers import DefaultRouter
from rest_framework.test import APIRequestFactory, force_authenticate
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from django_advisory_lock import (
    AdvisoryLockCommandMixin,
    AdvisoryLockJobMixin,
    AdvisoryLockViewMixin,
    LockDeadlock,
    LockLost,
    LockTimeout,
    PoolerDetected,
    advisory_lock,
    lock_key,
    lock_view,
    try_advisory_lock,
)
from django_advisory_lock.lasting import take_over
from tests.support import (
    LIMIT,
    OtherSession,
    Thread,
    backend_pid,
    in_child,
    statements,
    value,
    wait_until,
)
from tests.test_interrupts import INTERRUPTS, strike_at_every_line
from tests.testapp.models import Account

T = TypeVar("T")
AnyView = Callable[..., Any]

get = RequestFactory().get
post = RequestFactory().post
aget = AsyncRequestFactory().get


def run(main: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function in a loop of its own, within a limit, and close the connections of the shared thread."""

    async def limited() -> T:
        try:
            return await asyncio.wait_for(main(), 3 * LIMIT)
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(limited())


def call(view: AnyView, request: HttpRequest | None = None, *args: Any, **kwargs: Any) -> Any:
    """Call a view of either kind."""
    if iscoroutinefunction(view):
        return run(lambda: view(request or aget("/"), *args, **kwargs))
    return view(request or get("/"), *args, **kwargs)


@contextlib.contextmanager
def site(*views: AnyView, **settings: Any) -> Iterator[None]:
    """Serve views at /0, /1 and so on."""
    patterns = [path(str(number), view) for number, view in enumerate(views)]
    with override_settings(ROOT_URLCONF=type("urls", (), {"urlpatterns": patterns}), **settings):
        yield


@contextlib.contextmanager
def taken(other: OtherSession, *parts: Any) -> Iterator[None]:
    """Let the other session hold a lock."""
    assert other.take(lock_key(*parts))
    try:
        yield
    finally:
        assert other.drop(lock_key(*parts))


class Witness:
    """What views do here: note whether the lock is held."""

    def __init__(self, other: OtherSession, *parts: Any) -> None:
        self.other = other
        self.key = lock_key(*parts)
        self.seen: list[bool] = []

    def look(self, *args: Any, **kwargs: Any) -> HttpResponse:
        self.seen.append(not self.other.is_free(self.key))
        return HttpResponse("done")

    async def alook(self, *args: Any, **kwargs: Any) -> HttpResponse:
        response = self.look()
        await asyncio.sleep(0)
        self.seen.append(not self.other.is_free(self.key))
        return response

    def require_lock(self, view: AnyView, request: HttpRequest | None = None, *args: Any, **kwargs: Any) -> None:
        """A call runs under the lock, and leaves it free; where it is busy the body does not run."""
        assert call(view, request, *args, **kwargs).content == b"done"
        assert self.seen
        assert all(self.seen)
        assert self.other.is_free(self.key)
        self.seen.clear()
        self.other.take(self.key)
        assert call(view, request, *args, **kwargs).status_code == 409
        self.other.drop(self.key)
        assert self.seen == []


@pytest.fixture
def witness(name: str, other: OtherSession) -> Witness:
    return Witness(other, name)


# What can be decorated. Each gets the decorator and a witness, and returns the view.

Decorator = Callable[[Any], Any]


def plain_function(lock: Decorator, witness: Witness) -> AnyView:
    @lock
    def view(request: HttpRequest) -> HttpResponse:
        return witness.look()

    return view  # type: ignore[no-any-return]


def coroutine_function(lock: Decorator, witness: Witness) -> AnyView:
    @lock
    async def view(request: HttpRequest) -> HttpResponse:
        return await witness.alook()

    return view  # type: ignore[no-any-return]


def partial(lock: Decorator, witness: Witness) -> AnyView:
    return lock(functools.partial(lambda number, request: witness.look(), 1))  # type: ignore[no-any-return]


def async_partial(lock: Decorator, witness: Witness) -> AnyView:
    async def view(number: int, request: HttpRequest) -> HttpResponse:
        return await witness.alook()

    return lock(functools.partial(view, 1))  # type: ignore[no-any-return]


class CallableView:
    def __init__(self, witness: Witness) -> None:
        self.witness = witness

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.witness.look()


class AsyncCallableView(CallableView):
    async def __call__(self, request: HttpRequest) -> HttpResponse:  # type: ignore[override]
        return await self.witness.alook()


class MarkedView(CallableView):
    def __init__(self, witness: Witness) -> None:
        super().__init__(witness)
        markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        return self.witness.alook()


def callable_object(lock: Decorator, witness: Witness) -> AnyView:
    return lock(CallableView(witness))  # type: ignore[no-any-return]


def async_callable_object(lock: Decorator, witness: Witness) -> AnyView:
    return lock(AsyncCallableView(witness))  # type: ignore[no-any-return]


def marked_object(lock: Decorator, witness: Witness) -> AnyView:
    return lock(MarkedView(witness))  # type: ignore[no-any-return]


def partial_of_an_async_callable_object(lock: Decorator, witness: Witness) -> AnyView:
    return lock(functools.partial(AsyncCallableView(witness)))  # type: ignore[no-any-return]


def bound_method(lock: Decorator, witness: Witness) -> AnyView:
    return lock(witness.look)  # type: ignore[no-any-return]


def bound_coroutine_method(lock: Decorator, witness: Witness) -> AnyView:
    return lock(witness.alook)  # type: ignore[no-any-return]


def sync_class(witness: Witness) -> type[View]:
    class Sync(View):
        def get(self, request: HttpRequest) -> HttpResponse:
            return witness.look()

    return Sync


def async_class(witness: Witness) -> type[View]:
    class Async(View):
        async def get(self, request: HttpRequest) -> HttpResponse:
            return await witness.alook()

    return Async


def as_view(lock: Decorator, witness: Witness) -> AnyView:
    return lock(sync_class(witness).as_view())  # type: ignore[no-any-return]


def async_as_view(lock: Decorator, witness: Witness) -> AnyView:
    return lock(async_class(witness).as_view())  # type: ignore[no-any-return]


def partial_of_async_as_view(lock: Decorator, witness: Witness) -> AnyView:
    return lock(functools.partial(async_class(witness).as_view()))  # type: ignore[no-any-return]


def handler(lock: Decorator, witness: Witness) -> AnyView:
    class Decorated(View):
        @method_decorator(never_cache)
        @method_decorator(lock)
        @method_decorator(csrf_exempt)
        def get(self, request: HttpRequest) -> HttpResponse:
            return witness.look()

    return Decorated.as_view()


def async_handler(lock: Decorator, witness: Witness) -> AnyView:
    class Decorated(View):
        @method_decorator(lock)
        async def get(self, request: HttpRequest) -> HttpResponse:
            return await witness.alook()

    return Decorated.as_view()


def dispatch_by_name(lock: Decorator, witness: Witness) -> AnyView:
    return method_decorator(lock, name="dispatch")(sync_class(witness)).as_view()


def dispatch_by_name_below_another(lock: Decorator, witness: Witness) -> AnyView:
    return method_decorator(csrf_exempt, name="dispatch")(
        method_decorator(lock, name="dispatch")(sync_class(witness))
    ).as_view()


def dispatch_of_an_async_class(lock: Decorator, witness: Witness) -> AnyView:
    return method_decorator(lock, name="dispatch")(async_class(witness)).as_view()


def dispatch_of_an_async_class_around_another(lock: Decorator, witness: Witness) -> AnyView:
    decorated = method_decorator(csrf_exempt, name="dispatch")(async_class(witness))
    return method_decorator(lock, name="dispatch")(decorated).as_view()


def dispatch_of_an_async_class_in_a_list(lock: Decorator, witness: Witness) -> AnyView:
    return method_decorator([csrf_exempt, lock], name="dispatch")(async_class(witness)).as_view()


def dispatch_of_an_async_class_first_in_a_list(lock: Decorator, witness: Witness) -> AnyView:
    return method_decorator([lock, csrf_exempt], name="dispatch")(async_class(witness)).as_view()


def overridden_dispatch(lock: Decorator, witness: Witness) -> AnyView:
    class Decorated(async_class(witness)):  # type: ignore[misc]
        @method_decorator(lock)
        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(*args, **kwargs)

    return Decorated.as_view()  # type: ignore[no-any-return]


KINDS = {
    function.__name__: function
    for function in (
        plain_function,
        coroutine_function,
        partial,
        async_partial,
        callable_object,
        async_callable_object,
        marked_object,
        partial_of_an_async_callable_object,
        bound_method,
        bound_coroutine_method,
        as_view,
        async_as_view,
        partial_of_async_as_view,
        handler,
        async_handler,
        dispatch_by_name,
        dispatch_by_name_below_another,
        dispatch_of_an_async_class,
        dispatch_of_an_async_class_around_another,
        dispatch_of_an_async_class_in_a_list,
        dispatch_of_an_async_class_first_in_a_list,
        overridden_dispatch,
    )
}

ASYNCHRONOUS = {
    coroutine_function,
    async_partial,
    async_callable_object,
    marked_object,
    partial_of_an_async_callable_object,
    bound_coroutine_method,
    async_as_view,
    partial_of_async_as_view,
    async_handler,
    dispatch_of_an_async_class,
    dispatch_of_an_async_class_around_another,
    dispatch_of_an_async_class_in_a_list,
    dispatch_of_an_async_class_first_in_a_list,
    overridden_dispatch,
}


class TestWhatIsDecorated:
    @pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
    def test_views_of_every_kind(self, kind: Callable[..., AnyView], witness: Witness, name: str) -> None:
        """Case 95: coroutine functions are known as such, and the lock is held while they wait."""
        view = kind(lock_view(name), witness)
        assert iscoroutinefunction(view) is (kind in ASYNCHRONOUS)
        witness.require_lock(view)

    @pytest.mark.parametrize(
        "kind", [plain_function, coroutine_function, async_callable_object, dispatch_of_an_async_class]
    )
    def test_served_by_either_client(self, kind: Callable[..., AnyView], witness: Witness, name: str) -> None:
        view = kind(lock_view(name), witness)
        with site(view):

            async def main() -> None:
                assert (await AsyncClient().get("/0")).content == b"done"

            run(main)
            assert Client().get("/0").content == b"done"
            with taken(witness.other, name):
                assert Client().get("/0").status_code == 409
        assert all(witness.seen)
        close_shared_thread()

    def test_options_of_an_async_class(self, witness: Witness, name: str) -> None:
        """Neither dispatch() nor options() is a coroutine function there."""
        decorated = method_decorator(lock_view(name, methods=["OPTIONS", "GET"]), name="dispatch")(async_class(witness))
        view = decorated.as_view()
        assert call(view, AsyncRequestFactory().options("/")).status_code == 200
        with taken(witness.other, name):
            assert call(view, AsyncRequestFactory().options("/")).status_code == 409
        by_name = method_decorator(lock_view(name, methods=["OPTIONS"]), name="options")(async_class(witness))
        with taken(witness.other, name):
            assert call(by_name.as_view(), AsyncRequestFactory().options("/")).status_code == 409
            assert call(by_name.as_view()).content == b"done"

    def test_what_others_put_on_the_view_survives(self, name: str) -> None:
        """Case 95."""

        @csrf_exempt
        @transaction.non_atomic_requests
        def view(request: HttpRequest, pk: int, *, slug: str = "x") -> HttpResponse:
            """Do it."""
            raise NotImplementedError

        locked: Any = lock_view(name)(view)
        assert locked.csrf_exempt is True
        assert locked._non_atomic_requests == {"default"}
        assert (locked.__name__, locked.__doc__, locked.__module__) == ("view", "Do it.", __name__)
        assert inspect.signature(locked) == inspect.signature(view)
        cls_view: Any = lock_view(name)(RedirectView.as_view(url="/"))
        assert cls_view.view_class is RedirectView
        assert cls_view.view_initkwargs == {"url": "/"}
        outside: Any = transaction.non_atomic_requests(csrf_exempt(lock_view(name)(lambda request: HttpResponse())))
        assert outside.csrf_exempt
        assert outside._non_atomic_requests == {"default"}

    def test_a_view_that_returns_what_still_has_to_run(self, name: str, other: OtherSession) -> None:
        async def later() -> HttpResponse:
            raise NotImplementedError

        view: AnyView = lock_view(name)(lambda request: later())
        with pytest.raises(TypeError, match="returned a coroutine"):
            view(get("/"))
        assert other.is_free(lock_key(name))

    def test_an_instance_of_a_class_is_used_from_many_threads(self, name: str, other: OtherSession) -> None:
        """The decorator holds configuration only."""
        inside: list[int] = []
        most: list[int] = []

        @lock_view(name, timeout=LIMIT)
        def view(request: HttpRequest) -> HttpResponse:
            inside.append(1)
            most.append(len(inside))
            value("SELECT pg_sleep(0.01)")
            inside.pop()
            return HttpResponse()

        def work() -> int:
            return int(view(get("/")).status_code)

        assert [thread.result() for thread in [Thread(work) for _ in range(5)]] == [200] * 5
        assert max(most) == 1

    def test_without_the_lock_they_do_collide(self) -> None:
        barrier = threading.Barrier(2)

        def view(request: HttpRequest) -> HttpResponse:
            barrier.wait(LIMIT)
            return HttpResponse()

        threads = [Thread(lambda: view(get("/"))) for _ in range(2)]
        assert [thread.result().status_code for thread in threads] == [200, 200]


def close_shared_thread() -> None:
    """Close what synchronous code of tasks has opened in the thread that they share."""
    run(sync_to_async(connections.close_all))


class TestWhatIsRefused:
    def test_a_bare_method(self, name: str) -> None:
        with pytest.raises(TypeError, match="method_decorator"):

            class Wrong(View):
                @lock_view(name)
                def get(self, request: HttpRequest) -> HttpResponse:
                    raise NotImplementedError

        with pytest.raises(TypeError, match="method_decorator"):

            class AlsoWrong(View):
                @lock_view(name)
                async def get(self, request: HttpRequest) -> HttpResponse:
                    raise NotImplementedError

    def test_a_bare_method_whose_first_argument_has_another_name(self, name: str, other: OtherSession) -> None:
        class Wrong(View):
            @lock_view(name)
            def get(this, request: HttpRequest) -> HttpResponse:  # noqa: N805
                raise NotImplementedError

        class AlsoWrong(View):
            @lock_view(name)
            async def get(this, request: HttpRequest) -> HttpResponse:  # noqa: N805
                raise NotImplementedError

        for cls in (Wrong, AlsoWrong):
            with pytest.raises(TypeError, match="method_decorator"):
                call(cls.as_view())

    def test_a_call_without_a_request(self, name: str) -> None:
        view: Any = lock_view(name)(lambda: None)
        with pytest.raises(TypeError, match="no request"):
            view()

    def test_without_a_key(self) -> None:
        with pytest.raises((TypeError, ValueError), match="key"):
            lock_view()

    def test_the_bare_decorator(self) -> None:
        bare: Any = lock_view

        @bare
        def view(request: HttpRequest) -> HttpResponse:
            raise NotImplementedError

        with pytest.raises(TypeError, match=r"Write @lock_view\(…\) with a key"):
            view(get("/"))
        with pytest.raises(TypeError, match="coroutine function"):

            @bare
            async def aview(request: HttpRequest) -> HttpResponse:
                raise NotImplementedError

    def test_classes_and_generator_functions(self, name: str) -> None:
        def generator(request: HttpRequest) -> Iterator[bytes]:
            yield b""

        async def agenerator(request: HttpRequest) -> AsyncIterator[bytes]:
            yield b""

        with pytest.raises(TypeError, match=r"not classes: TemplateView\.as_view\(\)"):
            lock_view(name)(TemplateView)
        for function in (generator, agenerator, functools.partial(generator)):
            with pytest.raises(TypeError, match="generator functions"):
                lock_view(name)(function)
        no_views: list[Any] = [None, "view", 5, classmethod(lambda cls: None)]
        for no_view in no_views:
            with pytest.raises(TypeError, match="decorates views, not"):
                lock_view(name)(no_view)

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"methods": ["FETCH"]}, ValueError, "FETCH"),
            ({"methods": ["GET", "post", "x"]}, ValueError, "not X"),
            ({"methods": []}, ValueError, "none at all"),
            ({"methods": [1]}, ValueError, "not 1"),
            ({"methods": "POST"}, TypeError, r"\['POST'\]"),
            ({"methods": 5}, TypeError, "list of names"),
            ({"status": 200}, ValueError, "from 400 to 599"),
            ({"status": 600}, ValueError, "from 400 to 599"),
            ({"status": True}, ValueError, "from 400 to 599"),
            ({"status": "409"}, ValueError, "from 400 to 599"),
            ({"retry_after": -1}, ValueError, "retry_after"),
            ({"retry_after": float("nan")}, ValueError, "retry_after"),
            ({"retry_after": float("inf")}, ValueError, "retry_after"),
            ({"retry_after": "1"}, TypeError, "retry_after"),
            ({"retry_after": True}, TypeError, "retry_after"),
            ({"timeout": -1}, ValueError, "timeout"),
            ({"timeout": "1"}, TypeError, "timeout"),
            ({"scope": "for ever"}, ValueError, "scope"),
            ({"shared": 1}, TypeError, "shared"),
            ({"using": 1}, TypeError, "using"),
        ],
        ids=str,
    )
    def test_wrong_options(self, options: dict[str, Any], error: type[Exception], text: str) -> None:
        """At once, and not when the first request comes, or the first one finds it busy."""
        with pytest.raises(error, match=text):
            lock_view("key", **options)
        if "scope" not in options:
            attributes = {f"lock_{option}": given for option, given in options.items()}
            with pytest.raises(error, match=text):
                type("Wrong", (AdvisoryLockViewMixin, View), {"lock_key": "key", **attributes})

    def test_attributes_that_only_the_instance_knows(self, name: str, other: OtherSession) -> None:
        class Chosen(AdvisoryLockViewMixin, View):
            lock_key = name

            @property
            def lock_methods(self) -> list[str]:  # type: ignore[override]
                return ["POST"]

            @property
            def lock_status(self) -> int:  # type: ignore[override]
                return 423

            def get(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse("read")

            post = get

        with taken(other, name):
            assert call(Chosen.as_view()).content == b"read"
            assert call(Chosen.as_view(), post("/")).status_code == 423
        with pytest.raises(ValueError, match="timeout"):
            call(Chosen.as_view(lock_timeout=-1), post("/"))


class TestKeys:
    def test_a_function_of_the_request_and_the_url(self, name: str, other: OtherSession) -> None:
        view = lock_view(lambda request, pk, slug="a": (name, request.method, pk, slug))(
            lambda *args, **kwargs: HttpResponse()
        )
        with taken(other, name, "POST", 7, "b"):
            assert call(view, post("/"), 7, slug="b").status_code == 409
            for request, pk, slug in ((post("/"), 7, "a"), (post("/"), 8, "b"), (get("/"), 7, "b")):
                assert call(view, request, pk, slug=slug).status_code == 200

    def test_for_a_coroutine_function_where_the_orm_may_be_asked(self, name: str, other: OtherSession) -> None:
        account = Account.objects.create()

        @lock_view(lambda request, pk: (name, Account.objects.get(pk=pk).pk))
        async def view(request: HttpRequest, pk: int) -> HttpResponse:
            return HttpResponse()

        with taken(other, name, account.pk):
            assert call(view, None, account.pk).status_code == 409
        assert call(view, None, account.pk).status_code == 200
        account.delete()

    @pytest.mark.parametrize("kind", [plain_function, coroutine_function])
    def test_none_is_no_key(self, kind: Callable[..., AnyView], witness: Witness) -> None:
        """Case 29."""
        with pytest.raises(TypeError, match="returned None"):
            call(kind(lock_view(lambda request: None), witness))  # type: ignore[arg-type,return-value]
        assert witness.seen == []

    def test_commands_and_jobs_share_a_key_with_views(self, name: str, other: OtherSession) -> None:
        """Case 81."""

        def visit() -> int:
            return int(lock_view(name)(lambda request: HttpResponse())(get("/")).status_code)

        class Work(AdvisoryLockCommandMixin, BaseCommand):
            lock_key = name

            def handle(self, *args: Any, **options: Any) -> str:
                return str(Thread(visit).result())

        class Job(AdvisoryLockJobMixin):
            lock_key = name

            def run(self) -> int:
                return Thread(visit).result()

        out = io.StringIO()
        call_command(Work(), stdout=out)
        assert out.getvalue() == "409\n"
        assert Job().run() == 409
        assert visit() == 200

    def test_another_alias(self, name: str, other: OtherSession) -> None:
        view = lock_view(name, using="other")(lambda request: HttpResponse())
        with taken(other, name):
            assert call(view).status_code == 200
        elsewhere = OtherSession("other")
        with taken(elsewhere, name):
            assert call(view).status_code == 409
        elsewhere.close()

    def test_shared(self, name: str, other: OtherSession) -> None:
        view = lock_view(name, shared=True)(lambda request: HttpResponse())
        other.take(lock_key(name), shared=True)
        assert call(view).status_code == 200
        assert call(lock_view(name)(view)).status_code == 409
        other.drop(lock_key(name), shared=True)


class TestMethods:
    def test_all_but_options(self, name: str, other: OtherSession) -> None:
        view = lock_view(name)(lambda request: HttpResponse())
        with taken(other, name):
            for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"):
                assert call(view, RequestFactory().generic(method, "/")).status_code == 409
            with statements(0):
                assert call(view, RequestFactory().options("/")).status_code == 200

    @pytest.mark.parametrize(
        ("methods", "locked"),
        [
            (["post"], {"POST"}),
            (("GET",), {"GET", "HEAD"}),
            ({"head"}, {"HEAD"}),
            (iter(["put", "Options"]), {"PUT", "OPTIONS"}),
        ],
        ids=["post", "get", "head", "put-options"],
    )
    def test_named(self, methods: Any, locked: set[str], name: str, other: OtherSession) -> None:
        view = lock_view(name, methods=methods)(lambda request: HttpResponse())
        with taken(other, name):
            for _ in range(2):
                refused = {
                    method
                    for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS")
                    if call(view, RequestFactory().generic(method, "/")).status_code == 409
                }
                assert refused == locked

    def test_of_a_coroutine_function(self, name: str, other: OtherSession) -> None:
        @lock_view(name, methods=["POST"])
        async def view(request: HttpRequest) -> HttpResponse:
            return HttpResponse()

        with taken(other, name):
            assert call(view).status_code == 200
            assert call(view, AsyncRequestFactory().post("/")).status_code == 409

    def test_of_a_class(self, name: str, other: OtherSession) -> None:
        class Some(AdvisoryLockViewMixin, View):
            lock_key = name
            lock_methods = ("post", "get")

            def get(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse(str(self.held_lock is not None))

            post = delete = get

        view = Some.as_view()
        with taken(other, name):
            for method in ("GET", "HEAD", "POST"):
                assert call(view, RequestFactory().generic(method, "/")).status_code == 409
            for method in ("DELETE", "OPTIONS"):
                assert call(view, RequestFactory().generic(method, "/")).status_code == 200
        assert call(view, post("/")).content == b"True"
        assert call(view, RequestFactory().delete("/")).content == b"False"

    def test_what_is_not_allowed_needs_no_lock(self, name: str, other: OtherSession) -> None:
        class Get(AdvisoryLockViewMixin, View):
            lock_key = name
            http_method_names = ["get", "put"]  # noqa: RUF012

            def get(self, request: HttpRequest) -> HttpResponse:
                raise NotImplementedError

            post = get

        class AsyncGet(Get):
            async def get(self, request: HttpRequest) -> HttpResponse:  # type: ignore[override]
                raise NotImplementedError

        with taken(other, name), statements(0):
            for method in ("POST", "PUT", "OPTIONS", "DISPATCH", "SETUP", "PROPFIND"):
                assert call(Get.as_view(), RequestFactory().generic(method, "/")).status_code == 405
                assert call(AsyncGet.as_view(), AsyncRequestFactory().generic(method, "/")).status_code == 405
            assert call(require_POST(lock_view(name)(lambda request: HttpResponse()))).status_code == 405

    def test_statements(self, name: str, other: OtherSession) -> None:
        view = lock_view(name)(lambda request: HttpResponse())
        with statements(2):
            call(view)
        with taken(other, name), statements(2):  # the try, and who holds it
            call(view)


class TestBusy:
    def test_answers_what_is_accepted(self, name: str, other: OtherSession) -> None:
        text = "Somebody else is doing this right now. Please try again in a moment."
        page, data = "text/html; charset=utf-8", "application/json"
        browser = "text/html,application/xhtml+xml,*/*;q=0.8"
        accepted = dict.fromkeys(["*/*", "image/png", browser], page)
        accepted |= dict.fromkeys([data, f"text/html;q=0.5, {data}", "application/*"], data)
        view = lock_view(name)(lambda request: HttpResponse())
        with taken(other, name):
            requests = [(get("/", headers={"accept": accept}), expected) for accept, expected in accepted.items()]
            for request, expected in [(get("/"), page), *requests]:
                response = call(view, request)
                assert (response.status_code, response["Content-Type"]) == (409, expected)
                assert (response["Retry-After"], response["Vary"]) == ("1", "Accept")
                if expected == data:
                    assert json.loads(response.content) == {"detail": text}
                else:
                    assert text in response.content.decode()
                    assert '<html lang="en-us">' in response.content.decode()

    @pytest.mark.parametrize(
        ("retry_after", "header"),
        [(0, "0"), (0.2, "1"), (90, "90"), (dt.timedelta(minutes=2, milliseconds=1), "121"), (None, None)],
        ids=str,
    )
    def test_retry_after_and_status(self, retry_after: Any, header: str | None, name: str, other: OtherSession) -> None:
        """Case 84."""

        class Class(AdvisoryLockViewMixin, View):
            lock_key = name
            lock_status = HTTPStatus.SERVICE_UNAVAILABLE
            lock_retry_after = retry_after

            def get(self, request: HttpRequest) -> HttpResponse:
                raise NotImplementedError

        function = lock_view(name, status=503, retry_after=retry_after)(lambda request: HttpResponse())
        with taken(other, name):
            for view in (function, Class.as_view()):
                response = call(view)
                assert response.status_code == 503
                assert response.headers.get("Retry-After") == header

    def test_the_holder_is_for_the_log(self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        """The answer goes to a stranger."""
        caplog.set_level(logging.INFO, "django_advisory_lock")
        with taken(other, name):
            for accept in ("text/html", "application/json"):
                request = get("/a/b?token=secret", headers={"accept": accept})
                content = call(lock_view(name)(lambda request: HttpResponse()), request).content.decode()
                for secret in (str(other.pid), "other-session", name, "pid", "secret"):
                    assert secret not in content
        lines = [record.getMessage() for record in caplog.records if "was not run" in record.getMessage()]
        assert len(lines) == 2
        assert lines[0].startswith("GET /a/b was not run: The lock")
        assert f"pid {other.pid} (other-session)" in lines[0]

    def test_a_path_forges_no_line_of_the_log(
        self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "django_advisory_lock")
        with taken(other, name, "a\nb"):
            call(
                lock_view(lambda request: (name, "a\nb"))(lambda request: HttpResponse()),
                get("/x%0aERROR all is lost%1b[31m"),
            )
        for record in caplog.records:
            assert record.getMessage().isprintable()

    def test_a_template_takes_the_place_of_the_page(self, name: str, other: OtherSession, tmp_path: Path) -> None:
        (tmp_path / "409.html").write_text("<p>{{ message }}|{{ retry_after }}|{{ request.path }}|{{ user }}</p>")
        templates = [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "DIRS": [str(tmp_path)],
                "OPTIONS": {"context_processors": ["django.template.context_processors.request"]},
            }
        ]

        @lock_view(name)
        async def aview(request: HttpRequest) -> HttpResponse:
            raise NotImplementedError

        view = lock_view(name)(lambda request: HttpResponse())
        other_status = lock_view(name, status=423)(lambda request: HttpResponse())
        with site(view, aview, other_status, TEMPLATES=templates), taken(other, name):
            for number in (0, 1):
                response = Client().get(f"/{number}")
                assert response.status_code == 409
                assert "try again in a moment.|1|" in response.content.decode()
                assert f"|/{number}|" in response.content.decode()
                assert response["Retry-After"] == "1"
            assert b"<h1>Busy</h1>" in Client().get("/2").content

            async def main() -> bytes:
                return bytes((await AsyncClient().get("/1")).content)

            assert b"|/1|" in run(main)
        close_shared_thread()

    def test_it_is_translated_and_escaped(
        self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "django_advisory_lock.guards.answers.gettext", lambda text: f"<{translation.get_language()}>"
        )
        with taken(other, name), translation.override("de"):
            page = call(lock_view(name)(lambda request: HttpResponse())).content.decode()
        assert '<html lang="de">' in page
        assert "<h1>&lt;de&gt;</h1><p>&lt;de&gt;</p>" in page
        with taken(other, name), translation.override(None):
            assert '<html lang="en">' in call(lock_view(name)(lambda request: HttpResponse())).content.decode()

    def test_a_hook(self, name: str, other: OtherSession) -> None:
        class Hooked(AdvisoryLockViewMixin, View):
            lock_key = name

            def get(self, request: HttpRequest, pk: int) -> HttpResponse:
                raise NotImplementedError

            def handle_lock_busy(
                self, error: LockTimeout, request: HttpRequest, *args: Any, **kwargs: Any
            ) -> HttpResponse:
                assert error.key == lock_key(name)
                assert (request is self.request, args, kwargs) == (True, (), {"pk": 1})
                response: HttpResponse = super().handle_lock_busy(error, request, *args, **kwargs)
                response["X-Busy"] = str(self.held_lock)
                return response

        class AsyncHooked(AdvisoryLockViewMixin, View):
            lock_key = name

            async def get(self, request: HttpRequest, pk: int) -> HttpResponse:
                raise NotImplementedError

            async def handle_lock_busy(
                self, error: LockTimeout, request: HttpRequest, *args: Any, **kwargs: Any
            ) -> HttpResponse:
                await asyncio.sleep(0)
                return HttpResponse(f"busy {kwargs}", status=202)

        class SyncHookOfAnAsyncClass(AsyncHooked):
            def handle_lock_busy(self, *args: Any, **kwargs: Any) -> HttpResponse:  # type: ignore[override]
                return HttpResponse(status=202)

        with taken(other, name):
            response = call(Hooked.as_view(), None, pk=1)
            assert (response.status_code, response["X-Busy"]) == (409, "None")
            assert call(AsyncHooked.as_view(), None, pk=1).content == b"busy {'pk': 1}"
            assert call(SyncHookOfAnAsyncClass.as_view(), None, pk=1).status_code == 202

    @pytest.mark.parametrize("kind", [plain_function, coroutine_function, dispatch_by_name, async_handler])
    def test_the_same_errors_from_elsewhere_pass_through(
        self, kind: Callable[..., AnyView], witness: Witness, name: str
    ) -> None:
        """From the body, and from the function that makes the key."""
        for error in (LockTimeout, LockDeadlock, PoolerDetected, LockLost):

            def fails(*args: Any, error: type[Exception] = error) -> Any:
                raise error("own")

            witness.look = fails  # type: ignore[method-assign]
            for key in (name, fails):
                with pytest.raises(error, match="own"):
                    call(kind(lock_view(key), witness))
            assert witness.other.is_free(witness.key)

    def test_a_deadlock_is_not_busy(self, name: str, other: OtherSession) -> None:
        """The request waits for what its own thread holds, on another session of the alias."""
        with advisory_lock(name, dedicated=True):
            with pytest.raises(LockDeadlock):
                call(lock_view(name, timeout=LIMIT)(lambda request: HttpResponse()))

    def test_a_pooler_is_not_busy(self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        from django_advisory_lock import sessions

        connection.ensure_connection()
        monkeypatch.setattr(sessions.attach(connection), "guard", 1)
        with pytest.raises(PoolerDetected):
            call(lock_view(name)(lambda request: HttpResponse()))

    @pytest.mark.parametrize("kind", [plain_function, coroutine_function, handler])
    def test_a_loss_is_an_error(self, kind: Callable[..., AnyView], witness: Witness, name: str) -> None:
        witness.look = lambda *args: witness.other.kill(witness.other.holder(witness.key))  # type: ignore[assignment, method-assign]
        witness.alook = lambda *args: asyncio.to_thread(witness.look)  # type: ignore[method-assign]
        with pytest.raises(LockLost):
            call(kind(lock_view(name), witness))
        assert value("SELECT 1") == 1

    def test_waits_and_looks_again(self, name: str, other: OtherSession) -> None:
        """Case 85: the client retried while its first request was at work; what that one did is not done again."""
        account = Account.objects.create()
        begun, go_on = threading.Event(), threading.Event()

        @lock_view(lambda request: (name, account.pk), timeout=LIMIT)
        def pay(request: HttpRequest) -> HttpResponse:
            if Account.objects.get(pk=account.pk).balance:
                return HttpResponse("was paid")
            begun.set()
            assert go_on.wait(LIMIT)
            Account.objects.filter(pk=account.pk).update(balance=1)
            return HttpResponse("paid")

        first = Thread(lambda: pay(post("/")))
        assert begun.wait(LIMIT)
        second = Thread(lambda: pay(post("/")))
        other.wait_for_waiters(lock_key(name, account.pk))
        go_on.set()
        assert (first.result().content, second.result().content) == (b"paid", b"was paid")
        account.delete()

    def test_time_is_up(self, name: str, other: OtherSession) -> None:
        for timeout in (0.02, dt.timedelta(milliseconds=20)):
            with taken(other, name):
                assert call(lock_view(name, timeout=timeout)(lambda request: HttpResponse())).status_code == 409

    def test_a_task_waits(self, name: str, other: OtherSession) -> None:
        tried = threading.Event()

        def key(request: HttpRequest) -> str:
            tried.set()
            return name

        @lock_view(key, timeout=LIMIT)
        async def view(request: HttpRequest) -> HttpResponse:
            return HttpResponse()

        async def main() -> int:
            task = asyncio.create_task(view(aget("/")))
            assert await asyncio.to_thread(tried.wait, LIMIT)
            other.drop(lock_key(name))
            return (await task).status_code

        other.take(lock_key(name))
        assert run(main) == 200

    def test_a_refused_request_is_not_kept(self, name: str, other: OtherSession) -> None:
        """With what was uploaded in it."""
        view = lock_view(name)(lambda request: HttpResponse())
        gc.collect()
        gc.disable()
        try:
            with taken(other, name):
                request = post("/")
                gone = weakref.ref(request)
                assert view(request).status_code == 409
                del request
                assert gone() is None
        finally:
            gc.enable()


class TestAccess:
    @pytest.fixture(autouse=True)
    def login_page(self) -> Iterator[None]:
        with site(LOGIN_URL="/login/"):
            yield

    @pytest.mark.parametrize("user", [AnonymousUser(), User(pk=1)], ids=["nobody", "somebody"])
    def test_decorators_of_functions(self, user: Any, witness: Witness, name: str) -> None:
        """Above lock_view() they check first; below it, under the lock."""
        request = get("/")
        request.user = user
        allowed = user.is_authenticated
        first = login_required(lock_view(name)(witness.look))
        later = lock_view(name)(login_required(witness.look))
        for view in (first, later):
            assert call(view, request).status_code == (200 if allowed else 302)
        with taken(witness.other, name):
            assert call(later, request).status_code == 409
            with statements(2 if allowed else 0):
                assert call(first, request).status_code == (409 if allowed else 302)
        assert all(witness.seen)
        if not allowed:
            with statements(0), pytest.raises(PermissionDenied):
                call(permission_required("app.do", raise_exception=True)(lock_view(name)(witness.look)), request)

    def test_decorators_of_coroutine_functions(self, witness: Witness, name: str) -> None:
        async def nobody() -> AnonymousUser:
            return AnonymousUser()

        request: Any = aget("/")
        request.auser = nobody
        with taken(witness.other, name):
            assert call(login_required(lock_view(name)(witness.alook)), request).status_code == 302
            assert call(lock_view(name)(login_required(witness.alook)), request).status_code == 409
        assert call(lock_view(name)(login_required(witness.alook)), request).status_code == 302
        assert witness.seen == []

    def test_mixins_before_and_after(self, witness: Witness, name: str) -> None:
        """In either order the check comes first, and nobody without access touches the lock."""

        class Base(View):
            def get(self, request: HttpRequest) -> HttpResponse:
                return witness.look()

        class Before(LoginRequiredMixin, AdvisoryLockViewMixin, Base):
            lock_key = name

        class After(AdvisoryLockViewMixin, LoginRequiredMixin, Base):
            lock_key = name

        class Permission(PermissionRequiredMixin, AdvisoryLockViewMixin, Base):
            lock_key = name
            permission_required = "app.do"

        request = get("/")
        for user, expected in ((AnonymousUser(), 302), (User(pk=1, is_superuser=True, is_active=True), 200)):
            request.user = user
            for cls in (Before, After, Permission):
                assert call(cls.as_view(), request).status_code == expected
                with taken(witness.other, name), statements(0 if expected == 302 else 2):
                    assert call(cls.as_view(), request).status_code == (302 if expected == 302 else 409)
        assert witness.seen == [True] * 3

    def test_decorators_that_change_the_response(self, witness: Witness, name: str) -> None:
        for view in (
            cache_control(private=True)(lock_view(name)(witness.look)),
            lock_view(name)(cache_control(private=True)(witness.look)),
            cache_control(private=True)(lock_view(name)(witness.alook)),
        ):
            assert call(view)["Cache-Control"] == "private"
        with taken(witness.other, name):
            response = call(never_cache(lock_view(name)(witness.look)))
            assert "no-store" in response["Cache-Control"]
        assert all(witness.seen)

    def test_a_decorator_of_dispatch_beside_the_mixin(self, witness: Witness, name: str) -> None:
        @method_decorator([never_cache, csrf_exempt], name="dispatch")
        class Decorated(AdvisoryLockViewMixin, View):
            lock_key = name

            def get(self, request: HttpRequest) -> HttpResponse:
                return witness.look()

        view: Any = Decorated.as_view()
        assert view.csrf_exempt
        witness.require_lock(view)


class TestClasses:
    def test_wrong_orders_of_bases(self, name: str) -> None:
        class OwnDispatch(View):
            def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                return View.dispatch(self, request, *args, **kwargs)

        with pytest.raises(TypeError, match=r"MRO|resolution order"):
            type("Wrong", (View, AdvisoryLockViewMixin), {})
        for base in (OwnDispatch, APIView, method_decorator(never_cache, name="dispatch")(OwnDispatch)):
            with pytest.raises(TypeError, match=rf"{base.__name__} defines dispatch\(\) before AdvisoryLockViewMixin"):
                type("Wrong", (base, AdvisoryLockViewMixin), {})
        with pytest.raises(TypeError, match="OwnDispatch defines dispatch"):
            type("Wrong", (OwnDispatch, type("Locked", (AdvisoryLockViewMixin,), {})), {})

    def test_cooperative_bases(self, witness: Witness, name: str) -> None:
        class Timed(View):
            def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                response = super().dispatch(request, *args, **kwargs)
                response["X-Timed"] = "yes"
                return response

        class Cooperative(method_decorator(never_cache, name="dispatch")(Timed), AdvisoryLockViewMixin):  # type: ignore[misc]
            lock_key = name

            def get(self, request: HttpRequest) -> HttpResponse:
                return witness.look()

        witness.require_lock(Cooperative.as_view())
        assert call(Cooperative.as_view())["X-Timed"] == "yes"

    def test_no_key(self, other: OtherSession) -> None:
        class Keyless(AdvisoryLockViewMixin, View):
            def get(self, request: HttpRequest) -> HttpResponse:
                raise NotImplementedError

        class AsyncKeyless(AdvisoryLockViewMixin, View):
            async def get(self, request: HttpRequest) -> HttpResponse:
                raise NotImplementedError

        for cls in (Keyless, AsyncKeyless):
            with pytest.raises(ImproperlyConfigured, match=f"{cls.__name__} has no key.*get_lock_key"):
                call(cls.as_view())
            assert call(cls.as_view(), AsyncRequestFactory().options("/")).status_code == 200

    def test_a_key_of_the_request(self, name: str, other: OtherSession) -> None:
        class Keyed(AdvisoryLockViewMixin, View):
            def get_lock_key(self) -> tuple[Any, ...]:
                return name, self.request.headers["x-tenant"], self.kwargs["pk"], *self.args

            def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
                return HttpResponse("done")

        class AsyncKeyed(AdvisoryLockViewMixin, View):
            get_lock_key = Keyed.get_lock_key

            async def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
                return HttpResponse("done")

        with taken(other, name, "a", 1, "x"):
            for cls in (Keyed, AsyncKeyed):
                for tenant, pk, expected in (("a", 1, 409), ("b", 1, 200), ("a", 2, 200)):
                    request = get("/", headers={"x-tenant": tenant})
                    assert call(cls.as_view(), request, "x", pk=pk).status_code == expected

    def test_a_key_that_raises_busy_by_itself(self, name: str, other: OtherSession) -> None:
        class Keyed(AdvisoryLockViewMixin, View):
            def get_lock_key(self) -> str:
                raise LockTimeout("own")

            def get(self, request: HttpRequest) -> HttpResponse:
                raise NotImplementedError

        with pytest.raises(LockTimeout, match="own"):
            call(Keyed.as_view())

    def test_the_handle_is_at_hand(self, name: str, other: OtherSession) -> None:
        class Checked(AdvisoryLockViewMixin, View):
            lock_key = name

            def get(self, request: HttpRequest) -> HttpResponse:
                assert self.held_lock is not None
                self.held_lock.check()
                other.kill(other.holder(lock_key(name)))
                with pytest.raises(LockLost):
                    self.held_lock.check()
                return HttpResponse()

        class AsyncChecked(AdvisoryLockViewMixin, View):
            lock_key = name

            async def get(self, request: HttpRequest) -> HttpResponse:
                assert self.held_lock is not None
                await self.held_lock.acheck()
                return HttpResponse(self.held_lock.key.name)

        assert Checked.held_lock is None
        with pytest.raises(LockLost):
            call(Checked.as_view())
        assert call(AsyncChecked.as_view()).content.decode() == name
        assert AsyncChecked.held_lock is None

    def test_subclasses_take_it_once(self, name: str, other: OtherSession) -> None:
        class Base(AdvisoryLockViewMixin, View):
            lock_key = name

            def post(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse("base")

        class Child(Base):
            def post(self, request: HttpRequest) -> HttpResponse:
                response = super().post(request)
                response.write(", child")
                return response

            def put(self, request: HttpRequest) -> HttpResponse:
                return self.post(request)

        class OwnDispatch(LoginRequiredMixin, Child):
            def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                return super().dispatch(request, *args, **kwargs)

        request = post("/")
        request.user = User(pk=1)
        for cls in (Child, OwnDispatch):
            for method in ("post", "put"):
                request.method = method.upper()
                with statements(2):
                    assert call(cls.as_view(), request).content == b"base, child"
        with taken(other, name):
            assert call(OwnDispatch.as_view(), request).status_code == 409

    def test_a_form_view(self, witness: Witness, name: str) -> None:
        """Its put() calls its post(); neither runs twice under the lock."""

        class Sent(AdvisoryLockViewMixin, FormView):  # type: ignore[type-arg]
            lock_key = name
            lock_methods = ("POST", "PUT")
            form_class = Form
            success_url = "/done"
            template_name = "none.html"

            def form_valid(self, form: Form) -> HttpResponse:
                witness.look()
                return super().form_valid(form)

        for method in ("POST", "PUT"):
            with statements(2):
                assert call(Sent.as_view(), RequestFactory().generic(method, "/")).status_code == 302
            with taken(witness.other, name):
                assert call(Sent.as_view(), RequestFactory().generic(method, "/")).status_code == 409
        assert witness.seen == [True, True]

    def test_asynchronous_classes_stay_so(self, name: str, other: OtherSession) -> None:
        class Async(AdvisoryLockViewMixin, View):
            lock_key = name
            lock_methods = ("GET", "OPTIONS")

            async def get(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse(str(not other.is_free(lock_key(name))))

        class Sync(AdvisoryLockViewMixin, View):
            def get(self, request: HttpRequest) -> HttpResponse:
                raise NotImplementedError

        class Mixed(Async):
            def post(self, request: HttpRequest) -> HttpResponse:
                raise NotImplementedError

        assert Async.view_is_async
        assert not Sync.view_is_async
        assert iscoroutinefunction(Async.as_view())
        assert call(Async.as_view()).content == b"True"
        assert call(Async.as_view(), AsyncRequestFactory().options("/")).status_code == 200
        with taken(other, name):
            assert call(Async.as_view(), AsyncRequestFactory().options("/")).status_code == 409
            assert call(Async.as_view(), AsyncRequestFactory().head("/")).status_code == 409
        with pytest.raises(ImproperlyConfigured, match="either be all sync or all async"):
            Mixed.as_view()

    def test_options_by_initkwargs(self, name: str, other: OtherSession) -> None:
        class Plain(AdvisoryLockViewMixin, View):
            def get(self, request: HttpRequest) -> HttpResponse:
                raise NotImplementedError

        with taken(other, name):
            response = call(Plain.as_view(lock_key=name, lock_status=429, lock_retry_after=5))
        assert (response.status_code, response["Retry-After"]) == (429, "5")

    def test_shared_and_waiting(self, name: str, other: OtherSession) -> None:
        class Read(AdvisoryLockViewMixin, View):
            lock_key = name
            lock_shared = True
            lock_timeout = dt.timedelta(milliseconds=20)
            lock_using = "same"

            def get(self, request: HttpRequest) -> HttpResponse:
                assert self.held_lock is not None
                return HttpResponse(self.held_lock.using)

        other.take(lock_key(name), shared=True)
        assert call(Read.as_view()).content == b"same"
        other.drop(lock_key(name), shared=True)
        with taken(other, name):
            assert call(Read.as_view()).status_code == 409


# Django REST framework


class Busy(APIException):
    status_code = status.HTTP_429_TOO_MANY_REQUESTS
    default_detail = "Later, please."


class Never(BaseThrottle):
    def allow_request(self, request: Any, view: Any) -> bool:
        return False

    def wait(self) -> float:
        return 3


class AccountSerializer(serializers.ModelSerializer):
    class Meta:
        model = Account
        fields = ["id", "name", "balance"]  # noqa: RUF012


api = APIRequestFactory()
anonymous_and_known = pytest.mark.parametrize("user", [None, User(pk=7, username="x")], ids=["nobody", "somebody"])


def authenticated(request: Any, user: Any) -> Any:
    if user is not None:
        force_authenticate(request, user)
    return request


class TestHandlersThatCallEachOther:
    @pytest.mark.parametrize("in_transactions", [False, True])
    def test_each_call_is_locked(self, in_transactions: bool, name: str, other: OtherSession) -> None:
        """Where put() needs no lock, and calls post() twice."""
        held: list[bool] = []

        class Page(AdvisoryLockViewMixin, View):
            lock_key = name
            lock_methods = ("POST",)

            def post(self, request: HttpRequest) -> HttpResponse:
                held.append(not other.is_free(lock_key(name)))
                return HttpResponse()

            def put(self, request: HttpRequest) -> HttpResponse:
                for _ in range(2):
                    with transaction.atomic() if in_transactions else contextlib.nullcontext():
                        self.post(request)
                return HttpResponse(str(other.is_free(lock_key(name))))

        response: Any = Page.as_view()(RequestFactory().put("/"))
        assert response.content == b"True"
        assert held == [True, True]

    def test_a_method_that_a_view_adds_is_locked(self, name: str, other: OtherSession) -> None:
        """All but OPTIONS are, unless some are named."""

        class Page(AdvisoryLockViewMixin, View):
            http_method_names = (*View.http_method_names, "propfind")
            lock_key = name

            def propfind(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse(str(not other.is_free(lock_key(name))))

        response: Any = Page.as_view()(RequestFactory().generic("PROPFIND", "/"))
        assert response.content == b"True"
        with taken(other, name):
            assert Page.as_view()(RequestFactory().generic("PROPFIND", "/")).status_code == 409
            assert Page.as_view()(RequestFactory().generic("GET_LOCK_KEY", "/")).status_code == 405

    def test_inside_a_locked_one_nothing_more_is_taken(self, name: str, other: OtherSession) -> None:
        class Page(AdvisoryLockViewMixin, View):
            lock_key = name
            lock_methods = ("POST", "PUT")

            def post(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse(str(not other.is_free(lock_key(name))))

            def put(self, request: HttpRequest) -> HttpResponse:
                return self.post(request)

        with statements(2):
            response: Any = Page.as_view()(RequestFactory().put("/"))
        assert response.content == b"True"


class TestRestFramework:
    @anonymous_and_known
    @pytest.mark.parametrize(("authentication", "refusal"), [(BasicAuthentication, 401), (SessionAuthentication, 403)])
    def test_access_comes_first(
        self, authentication: Any, refusal: int, user: Any, name: str, other: OtherSession
    ) -> None:
        """Who is refused never touches the lock, and the key knows who is not."""

        class Locked(AdvisoryLockViewMixin, APIView):
            authentication_classes = [authentication]  # noqa: RUF012
            permission_classes = [permissions.IsAuthenticated]  # noqa: RUF012

            def get_lock_key(self) -> tuple[str, int]:
                return name, self.request.user.pk  # type: ignore[return-value]

            def post(self, request: Any) -> Any:
                return Response({"held": not other.is_free(lock_key(name, 7))})

        @api_view(["POST"])
        @permission_classes([permissions.IsAuthenticated])
        @lock_view(lambda request: (name, request.user.pk))
        def locked(request: Any) -> Any:
            return Response({"held": not other.is_free(lock_key(name, 7))})

        locked.cls.authentication_classes = [authentication]
        views: list[Any] = [Locked.as_view(), locked]
        for view in views:
            if user is None:
                with statements(0), taken(other, name, 7):
                    assert view(api.post("/")).status_code == refusal
                continue
            response = view(authenticated(api.post("/"), user))
            assert (response.status_code, response.data) == (200, {"held": True})
            with taken(other, name, 7):
                response = view(authenticated(api.post("/"), user))
            assert (response.status_code, response["Retry-After"]) == (409, "1")
            assert "application/json" in response["Content-Type"]
            assert "detail" in json.loads(response.content)
            assert "Accept" in response["Vary"]

    def test_lock_view_around_a_view_of_the_framework(self, witness: Witness, name: str) -> None:
        class Plain(APIView):
            def get(self, request: Any) -> Any:
                return Response({"held": witness.look().status_code})

        view: Any = lock_view(name)(Plain.as_view())
        assert view.csrf_exempt
        assert view.cls is Plain
        assert call(view).status_code == 200
        by_dispatch = method_decorator(lock_view(name), name="dispatch")(Plain).as_view()
        assert call(by_dispatch).status_code == 200
        with taken(witness.other, name):
            assert call(view).status_code == call(by_dispatch).status_code == 409
        assert witness.seen == [True, True]

    def test_lock_view_on_an_action(self, name: str, other: OtherSession) -> None:
        class Accounts(viewsets.ViewSet):
            @method_decorator(lock_view(lambda request, pk: (name, request.user.pk, pk)))
            @action(detail=True, methods=["post"])
            def close(self, request: Any, pk: Any) -> Any:
                return Response({"held": not other.is_free(lock_key(name, 7, pk))})

        view = Accounts.as_view({"post": "close"})
        assert view(authenticated(api.post("/"), User(pk=7)), pk=1).data == {"held": True}
        with taken(other, name, 7, 1):
            assert view(authenticated(api.post("/"), User(pk=7)), pk=1).status_code == 409
        assert Accounts.close.mapping == {"post": "close"}

    def test_throttles_come_first(self, name: str, other: OtherSession) -> None:
        class Throttled(AdvisoryLockViewMixin, APIView):
            lock_key = name
            throttle_classes = [Never]  # noqa: RUF012

            def get(self, request: Any) -> Any:
                raise NotImplementedError

        with statements(0):
            response = Throttled.as_view()(api.get("/"))
        assert (response.status_code, response["Retry-After"]) == (429, "3")

    def test_its_exceptions(self, name: str, other: OtherSession) -> None:
        class Failing(AdvisoryLockViewMixin, APIView):
            lock_key = name

            def get(self, request: Any) -> Any:
                raise Busy

            def post(self, request: Any) -> Any:
                raise LockTimeout("of the body")

            def handle_lock_busy(self, error: LockTimeout, request: Any, *args: Any, **kwargs: Any) -> Any:
                raise Busy(f"{self.held_lock}") from error

        view: Any = Failing.as_view()
        response = view(api.get("/"))
        assert (response.status_code, response.data) == (429, {"detail": "Later, please."})
        with taken(other, name):
            response = view(api.get("/"))
        assert (response.status_code, response.data) == (429, {"detail": "None"})
        with pytest.raises(LockTimeout, match="of the body"):
            view(api.post("/"))
        assert other.is_free(lock_key(name))
        assert view(api.put("/")).status_code == 405
        with statements(0):
            assert view(api.options("/")).status_code == 200

    def test_generic_views(self, name: str, other: OtherSession) -> None:
        class Detail(AdvisoryLockViewMixin, generics.RetrieveUpdateAPIView):
            queryset = Account.objects.all()
            serializer_class = AccountSerializer
            lock_methods = ("PUT", "PATCH")

            def get_lock_key(self) -> tuple[Any, ...]:
                return name, self.kwargs["pk"]

        account = Account.objects.create(name="a")
        view: Any = Detail.as_view()
        assert view(api.patch("/", {"balance": 5}, format="json"), pk=account.pk).data["balance"] == 5
        with taken(other, name, account.pk):
            assert view(api.patch("/", {"balance": 6}, format="json"), pk=account.pk).status_code == 409
            assert view(api.put("/", {"balance": 6}, format="json"), pk=account.pk).status_code == 409
            assert view(api.get("/"), pk=account.pk).data["balance"] == 5
        account.delete()

    def test_viewsets_and_routers(self, name: str, other: OtherSession) -> None:
        account = Account.objects.create(name="a")

        class Accounts(AdvisoryLockViewMixin, viewsets.ModelViewSet):
            queryset = Account.objects.filter(pk=account.pk)
            serializer_class = AccountSerializer

            def get_lock_key(self) -> tuple[Any, ...]:
                return name, self.action, self.kwargs.get("pk", "all")

            @action(detail=True, methods=["post", "delete"])
            def close(self, request: Any, pk: Any) -> Any:
                return Response({"held": not other.is_free(lock_key(name, "close", pk))})

            @close.mapping.put
            def reopen(self, request: Any, pk: Any) -> Any:
                return Response({"held": not other.is_free(lock_key(name, "reopen", pk))})

        class Plain(AdvisoryLockViewMixin, viewsets.ViewSet):
            lock_key = name

            def list(self, request: Any) -> Any:
                return Response({"held": not other.is_free(lock_key(name))})

        router = DefaultRouter()
        router.register("accounts", Accounts)
        router.register("plain", Plain, basename="plain")
        client = Client()
        with override_settings(ROOT_URLCONF=type("urls", (), {"urlpatterns": router.urls})):
            assert [row["name"] for row in client.get("/accounts/").json()] == ["a"]
            for method in (client.post, client.delete):
                assert method(f"/accounts/{account.pk}/close/").json() == {"held": True}
            assert client.put(f"/accounts/{account.pk}/close/").json() == {"held": True}
            with taken(other, name, "close", account.pk):
                assert client.post(f"/accounts/{account.pk}/close/").status_code == 409
                assert client.post(f"/accounts/{account.pk + 1}/close/").status_code == 200
                assert client.put(f"/accounts/{account.pk}/close/").status_code == 200
                assert client.get(f"/accounts/{account.pk}/close/").status_code == 405
            with taken(other, name, "list", "all"):
                assert client.get("/accounts/").status_code == client.head("/accounts/").status_code == 409
                assert client.options("/accounts/").status_code == 200
            assert client.get("/plain/").json() == {"held": True}
            with taken(other, name):
                assert client.get("/plain/").status_code == 409
        account.delete()

    def test_the_browsable_api(self, name: str, other: OtherSession) -> None:
        """Its pages show forms for methods that need the lock; only the handler takes it."""

        class Browsed(AdvisoryLockViewMixin, generics.ListCreateAPIView):
            lock_key = name
            queryset = Account.objects.order_by("pk")
            serializer_class = AccountSerializer
            renderer_classes = [JSONRenderer, BrowsableAPIRenderer]  # noqa: RUF012

        from django.conf import settings

        templates = [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": ["django.template.context_processors.request"]},
            }
        ]
        apps = [*settings.INSTALLED_APPS, "django.contrib.staticfiles", "rest_framework"]
        with site(Browsed.as_view(), INSTALLED_APPS=apps, TEMPLATES=templates, STATIC_URL="/static/"):
            page = Client().get("/0", headers={"accept": "text/html"})
            assert (page.status_code, b"<form" in page.content) == (200, True)
            with taken(other, name):
                types = {"text/html": "text/html", "*/*": "application/json", "text/html,*/*": "text/html"}
                for accept, content_type in types.items():
                    busy = Client().get("/0", headers={"accept": accept})
                    assert busy.status_code == 409
                    assert busy["Content-Type"].startswith(content_type)

    def test_atomic_requests(self, name: str, other: OtherSession, atomic_requests: None) -> None:
        """The framework marks the transaction for rollback where a handler raises, and answers all the same."""

        class Writing(AdvisoryLockViewMixin, APIView):
            lock_key = name

            def post(self, request: Any) -> Any:
                Account.objects.create(name=name)
                raise Busy

        with site(Writing.as_view()):
            assert Client().post("/0").status_code == 429
            assert other.is_free(lock_key(name))
            assert not Account.objects.filter(name=name).exists()
            with taken(other, name):
                assert Client().post("/0").status_code == 409


@pytest.fixture
def atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)


class TestAtomicRequests:
    """Case 13, 83: what a view wrote is committed before the next one may read it."""

    @pytest.fixture(autouse=True)
    def setting(self, atomic_requests: None) -> None:
        pass

    def test_held_to_the_commit(self, name: str, other: OtherSession) -> None:
        seen: list[Any] = []

        class Marked(AdvisoryLockViewMixin, View):
            lock_key = name

            def post(self, request: HttpRequest) -> HttpResponse:
                assert self.held_lock is not None
                seen.append(self.held_lock.scope)
                transaction.on_commit(lambda: seen.append("committed"))
                return HttpResponse()

        def middleware(get_response: Any) -> Any:
            def inner(request: HttpRequest) -> Any:
                response = get_response(request)
                seen.append(other.is_free(lock_key(name)))
                return response

            return inner

        middlewares.append(middleware)
        try:
            function = lock_view(name)(lambda request: Marked().post(request) if False else HttpResponse())
            with site(Marked.as_view(), function, MIDDLEWARE=[f"{__name__}.outermost"]):
                assert Client().post("/0").status_code == 200
                assert seen == ["transaction", "committed", True]
                assert Client().post("/1").status_code == 200
                assert seen.pop()
        finally:
            middlewares.clear()

    def test_still_held_after_the_view(self, name: str, other: OtherSession) -> None:
        """Inside the transaction, outside the view."""
        seen = []

        def view(request: HttpRequest) -> HttpResponse:
            response: HttpResponse = lock_view(name)(lambda request: HttpResponse())(request)
            seen.append(other.is_free(lock_key(name)))
            return response

        with site(view):
            Client().get("/0")
        assert seen == [False]
        assert other.is_free(lock_key(name))

    def test_free_after_a_rollback(self, name: str, other: OtherSession) -> None:
        @lock_view(name)
        def view(request: HttpRequest) -> HttpResponse:
            Account.objects.create(name=name)
            raise ZeroDivisionError

        with site(view):
            assert Client(raise_request_exception=False).get("/0").status_code == 500
        assert other.is_free(lock_key(name))
        assert not Account.objects.filter(name=name).exists()

    @pytest.mark.parametrize("timeout", [0, 0.02])
    def test_busy_leaves_the_transaction_alone(self, timeout: float, name: str, other: OtherSession) -> None:
        """Case 9: what was written around the view is committed."""

        def view(request: HttpRequest) -> HttpResponse:
            Account.objects.create(name=name)
            response: HttpResponse = lock_view(name, timeout=timeout)(lambda request: HttpResponse())(request)
            Account.objects.filter(name=name).update(balance=1)
            return response

        with site(view), taken(other, name):
            assert Client().get("/0").status_code == 409
        assert Account.objects.filter(name=name, balance=1).delete()[0] == 1

    def test_a_lock_elsewhere_would_end_too_early(self, name: str, other: OtherSession) -> None:
        view, outside = (lock_view(name, using="same")(lambda request: HttpResponse()) for _ in range(2))
        session = lock_view(name, using="same", scope="session")(lambda request: HttpResponse())
        with site(view, session, transaction.non_atomic_requests(outside)):
            with pytest.raises(TransactionManagementError, match="'default'"):
                Client().get("/0")
            assert Client().get("/1").status_code == 200
            assert Client().get("/2").status_code == 200

    def test_non_atomic_requests(self, name: str, other: OtherSession) -> None:
        """On either side of the lock."""
        seen: list[str] = []

        class Scope(AdvisoryLockViewMixin, View):
            lock_key = name

            def get(self, request: HttpRequest) -> HttpResponse:
                assert self.held_lock is not None
                seen.append(f"{self.held_lock.scope} {connection.in_atomic_block}")
                return HttpResponse()

        inside = lock_view(name)(transaction.non_atomic_requests(Scope.as_view()))
        outside = transaction.non_atomic_requests(lock_view(name)(Scope.as_view()))
        with site(inside, outside, method_decorator(transaction.non_atomic_requests, name="dispatch")(Scope).as_view()):
            for number in range(3):
                Client().get(f"/{number}")
        assert seen == ["session False"] * 3

    def test_asynchronous_views_are_refused_by_django(self, name: str, other: OtherSession) -> None:
        """Case 95."""

        async def view(request: HttpRequest) -> HttpResponse:
            return HttpResponse("done")

        with site(lock_view(name)(view), transaction.non_atomic_requests(lock_view(name)(view))):
            with pytest.raises(RuntimeError, match="ATOMIC_REQUESTS with async views"):
                Client().get("/0")
            assert Client().get("/1").content == b"done"
        close_shared_thread()

    def test_an_asynchronous_view_inside_a_transaction(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            def begin() -> None:
                transaction.set_autocommit(False)

            await sync_to_async(begin)()
            with pytest.raises(TransactionManagementError, match="asynchronous code"):
                await lock_view(name)(Witness(other, name).alook)(aget("/"))
            await sync_to_async(transaction.rollback)()
            await sync_to_async(transaction.set_autocommit)(True)

        run(main)

    @pytest.mark.parametrize("atomic", [True, False])
    def test_the_next_number(self, atomic: bool, name: str, other: OtherSession) -> None:
        """Case 83: eight requests that read and write get eight numbers."""
        account = Account.objects.create()

        @lock_view(name, timeout=LIMIT)
        def view(request: HttpRequest) -> HttpResponse:
            number = Account.objects.get(pk=account.pk).balance + 1
            Account.objects.filter(pk=account.pk).update(balance=number)
            return HttpResponse(str(number))

        with site(view if atomic else transaction.non_atomic_requests(view)):
            answers = [thread.result().content for thread in [Thread(lambda: Client().post("/0")) for _ in range(8)]]
        assert sorted(answers) == sorted(str(number).encode() for number in range(1, 9))
        account.delete()

    def test_a_stream_outlasts_the_transaction(self, name: str, other: OtherSession) -> None:
        """Case 88: a transaction lock cannot go on, and that is said."""
        view = lock_view(name)(lambda request: StreamingHttpResponse([b"x"]))
        with site(view, lock_view(name, scope="session")(lambda request: StreamingHttpResponse([b"x"]))):
            with pytest.warns(RuntimeWarning, match="before the response is streamed.*non_atomic_requests"):
                response = Client().get("/0")
            assert other.is_free(lock_key(name))
            assert b"".join(response) == b"x"
            response = Client().get("/1")
            assert not other.is_free(lock_key(name))
            assert b"".join(response) == b"x"
            assert other.is_free(lock_key(name))


middlewares: list[Any] = []


def outermost(get_response: Any) -> Any:
    return middlewares[0](get_response)


class Stream:
    """A view whose response goes on under the lock."""

    def __init__(self, other: OtherSession, name: str, steps: int = 3) -> None:
        self.other = other
        self.key = lock_key(name)
        self.steps = steps
        self.held: list[bool] = []
        self.ended: list[bool] = []
        self.fails = False

    def note(self) -> bytes:
        self.held.append(not self.other.is_free(self.key))
        return b"x"

    def parts(self) -> Iterator[bytes]:
        try:
            for _ in range(self.steps):
                yield self.note()
            if self.fails:
                raise ZeroDivisionError
        finally:
            self.ended.append(not self.other.is_free(self.key))

    async def aparts(self) -> AsyncIterator[bytes]:
        try:
            for _ in range(self.steps):
                await asyncio.sleep(0)
                yield self.note()
            if self.fails:
                raise ZeroDivisionError
        finally:
            self.ended.append(not self.other.is_free(self.key))

    def __call__(self, request: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse(self.parts())

    async def acall(self, request: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse(self.aparts())

    @property
    def is_free(self) -> bool:
        return self.other.is_free(self.key)


@pytest.fixture
def stream(name: str, other: OtherSession) -> Stream:
    return Stream(other, name)


def closers(response: Any) -> list[Callable[[], object]]:
    return response._resource_closers  # type: ignore[no-any-return]


def served(url: str) -> Any:
    return Client().get(url)


def wsgi(url: str, **extra: Any) -> Any:
    """Serve a request as a server does, with all signals."""
    return WSGIHandler()(RequestFactory().get(url, **extra).environ, lambda *args: None)


def in_test_case(function: Callable[[], Any]) -> None:
    """Run a function as the one test of a TestCase, inside its transaction."""

    class Case(TestCase):
        def test(self) -> None:
            function()

        async def atest(self) -> None:
            await function()

    result = unittest.TestResult()
    unittest.TestSuite([Case("atest" if iscoroutinefunction(function) else "test")]).run(result)
    assert [text for _, text in (*result.errors, *result.failures)] == []
    assert result.testsRun == 1


class TestStreaming:
    """Case 88: the lock lasts until the response is closed."""

    def test_held_until_it_is_closed(self, stream: Stream, name: str) -> None:
        response = lock_view(name)(stream)(get("/"))
        assert not stream.is_free
        assert b"".join(response) == b"xxx"
        assert not stream.is_free
        with statements(1):
            response.close()
        assert stream.is_free
        with statements(0):
            response.close()
        assert (stream.held, stream.ended) == ([True] * 3, [True])

    def test_without_the_guard_it_escapes(self, stream: Stream, name: str) -> None:
        with advisory_lock(name):
            response = stream(get("/"))
        b"".join(response)
        assert not any(stream.held)

    def test_abandoned_half_way(self, stream: Stream, name: str) -> None:
        """What the generator does at its end is still under the lock."""
        response = lock_view(name)(stream)(get("/"))
        next(iter(response))
        response.close()
        assert stream.is_free
        assert stream.ended == [True]

    def test_never_begun(self, stream: Stream, name: str) -> None:
        lock_view(name)(stream)(get("/")).close()
        assert stream.is_free

    def test_closed_before_it_is_returned(self, stream: Stream, name: str) -> None:
        def view(request: HttpRequest) -> StreamingHttpResponse:
            response = stream(request)
            response.close()
            return response

        lock_view(name)(view)(get("/"))
        assert stream.is_free

    def test_an_error_inside(self, stream: Stream, name: str) -> None:
        stream.fails = True
        response = lock_view(name)(stream)(get("/"))
        with pytest.raises(ZeroDivisionError):
            b"".join(response)
        assert stream.is_free
        response.close()

    @pytest.mark.parametrize("by_class", [False, True])
    def test_dropped_without_close(self, by_class: bool, stream: Stream, name: str) -> None:
        """As by a middleware that makes a response of its own; the next lock operation of the session frees it."""

        class Streamed(AdvisoryLockViewMixin, View):
            lock_key = name

            def get(self, request: HttpRequest) -> StreamingHttpResponse:
                return stream(request)

        view = Streamed.as_view() if by_class else lock_view(name)(stream)
        response = view(get("/"))
        with pytest.warns(ResourceWarning, match="dropped without release"):
            del response
            gc.collect()
        with advisory_lock("next"):
            assert stream.is_free

    def test_closed_in_another_thread(self, stream: Stream, name: str) -> None:
        response = lock_view(name)(stream)(get("/"))
        Thread(response.close).result()
        assert stream.is_free
        assert value("SELECT 1") == 1

    def test_closed_by_two_threads_at_once(self, stream: Stream, name: str, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(10):
            with advisory_lock(name):  # a second unlock would free this one
                response = lock_view(name)(stream)(get("/"))
                end = closers(response)[-1]
                barrier = threading.Barrier(2)

                def close(end: Any = end, barrier: threading.Barrier = barrier) -> None:
                    barrier.wait(LIMIT)
                    end()

                for thread in [Thread(close) for _ in range(2)]:
                    thread.result()
                assert not stream.is_free
            assert stream.is_free
        assert caplog.records == []

    def test_closed_while_its_thread_is_in_a_transaction(self, stream: Stream, name: str) -> None:
        account = Account.objects.create()
        response = lock_view(name)(stream)(get("/"))
        with transaction.atomic():
            Account.objects.filter(pk=account.pk).update(balance=1)
            Thread(response.close).result()
            assert stream.is_free
            Account.objects.filter(pk=account.pk).update(name="a")
        account.refresh_from_db()
        assert (account.balance, account.name) == (1, "a")
        account.delete()

    def test_closed_while_its_thread_is_in_a_failed_transaction(
        self, stream: Stream, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        response = lock_view(name)(stream)(get("/"))
        with pytest.raises(Error):
            with transaction.atomic():
                with contextlib.suppress(Error):
                    value("SELECT 1/0")
                response.close()
                value("SELECT 1")
        assert "could not be released in a failed transaction" in caplog.text
        with advisory_lock("next"):
            assert stream.is_free

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_a_session_that_was_killed(
        self, elsewhere: bool, stream: Stream, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The loss is logged, and the alias works again with the next request."""
        with site(lock_view(name)(stream)), extra_alias_settings("default", CONN_MAX_AGE=None):
            response = wsgi("/0")
            stream.other.kill(stream.other.holder(stream.key))
            assert b"".join(response) == b"xxx"
            Thread(response.close).result() if elsewhere else response.close()
            assert "was lost: its session has ended" in caplog.text
            assert len([record for record in caplog.records if record.name == "django_advisory_lock"]) == 1
            stream.held.clear()
            again = wsgi("/0")
            assert b"".join(again) == b"xxx"
            again.close()
            assert stream.held == [True] * 3
        assert stream.is_free

    def test_the_handle_knows_of_the_loss(self, stream: Stream, name: str) -> None:
        handles = []

        class Streamed(AdvisoryLockViewMixin, View):
            lock_key = name

            def get(self, request: HttpRequest) -> StreamingHttpResponse:
                handles.append(self.held_lock)
                return stream(request)

        response = Streamed.as_view()(get("/"))
        (handle,) = handles
        assert handle is not None
        handle.check()
        assert not handle.lost.is_set()
        stream.other.kill(stream.other.holder(stream.key))
        response.close()
        assert handle.lost.is_set()
        assert not handle.is_held()

    def test_lost_before_it_begins(self, stream: Stream, name: str) -> None:
        """Then there is nothing to hand over, and the request fails."""

        def view(request: HttpRequest) -> StreamingHttpResponse:
            connection.close()
            return stream(request)

        with pytest.raises(LockLost):
            lock_view(name)(view)(get("/"))
        stream.other.wait_until_free(stream.key)

    def test_what_cannot_be_released_is_logged(
        self, stream: Stream, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(*args: Any) -> Any:
            raise ZeroDivisionError

        response = lock_view(name)(stream)(get("/"))
        with connection.execute_wrapper(fails):
            response.close()
        assert "could not be released" in caplog.text
        assert stream.is_free

    def test_an_interrupt_of_the_release_passes_through(self, stream: Stream, name: str) -> None:
        def strikes(*args: Any) -> Any:
            raise KeyboardInterrupt

        response = lock_view(name)(stream)(get("/"))
        with connection.execute_wrapper(strikes), pytest.raises(KeyboardInterrupt):
            response.close()
        assert stream.is_free

    @pytest.mark.parametrize("is_collected", [False, True])
    def test_dropped_by_middleware(self, is_collected: bool, stream: Stream, name: str) -> None:
        """It reaches nobody, and nobody closes it: the end of the request does."""
        kept: list[Any] = []

        def drops(get_response: Any) -> Any:
            def middleware(request: HttpRequest) -> HttpResponse:
                response = get_response(request)
                if not is_collected:
                    kept.append(response)
                return HttpResponse("something else")

            return middleware

        globals()["drops"] = drops
        warned = pytest.warns(ResourceWarning, match="dropped without release")
        with site(lock_view(name)(stream), MIDDLEWARE=[f"{__name__}.drops"]):
            with warned if is_collected else contextlib.nullcontext():
                response = wsgi("/0")
                gc.collect()
            assert not stream.is_free
            response.close()
            assert stream.is_free
        assert connection.connection is None
        for each in kept:
            each.close()

    def test_an_owner_that_is_gone_already(self, stream: Stream, name: str) -> None:
        """As that of a thread that has ended."""
        handle = advisory_lock(name).acquire()
        hold: Any = handle._hold
        hold.owner = lambda: None
        end = take_over(handle)
        assert end is not None
        assert not stream.is_free
        end()
        assert stream.is_free
        assert not handle.is_held()

    def test_another_request_ends_while_it_is_read(self, stream: Stream, name: str) -> None:
        with site(lock_view(name)(stream), lambda request: HttpResponse("short")):
            response = wsgi("/0")
            assert next(iter(response))
            wsgi("/1").close()
            assert not stream.is_free
            response.close()
        assert stream.is_free

    def test_files(self, stream: Stream, name: str) -> None:
        file = io.BytesIO(b"content")
        response = lock_view(name)(lambda request: FileResponse(file))(get("/"))
        assert not stream.is_free
        assert b"".join(response) == b"content"
        response.close()
        assert file.closed
        assert stream.is_free

    def test_files_that_the_server_sends_itself(self, stream: Stream, name: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"content")
        with site(lock_view(name)(lambda request: FileResponse((tmp_path / "file").open("rb")))):
            response = wsgi("/0", **{"wsgi.file_wrapper": FileWrapper})
            assert isinstance(response, FileWrapper)
            gc.collect()
            assert not stream.is_free
            assert b"".join(response) == b"content"
            response.close()
        assert stream.is_free

    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    @pytest.mark.parametrize("kept", [False, True])
    def test_collected_as_garbage_in_the_middle_of_a_query(
        self, kept: bool, stream: Stream, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The test client closes a response in a generator, which may end anywhere: also where psycopg has its lock."""

        class Collects(StrDumper):
            def dump(self, obj: Any) -> Any:
                gc.collect()
                return super().dump(str(obj))

        class Text(str):
            __slots__ = ()

        handles = []

        class Streamed(AdvisoryLockViewMixin, View):
            lock_key = name

            def get(self, request: HttpRequest) -> StreamingHttpResponse:
                handles.append(self.held_lock if kept else None)
                return stream(request)

        def work() -> None:
            connection.ensure_connection()
            connection.connection.adapters.register_dumper(Text, Collects)
            next(iter(served("/0").streaming_content))
            assert value("SELECT %s::text", [Text("a")]) == "a"
            with advisory_lock("next"):
                assert stream.is_free

        with site(Streamed.as_view()):
            Thread(work).result()
        assert stream.ended == [True]
        assert ("in the middle of a query" in caplog.text) is kept

    @pytest.mark.parametrize("middleware", ["django.middleware.gzip.GZipMiddleware", f"{__name__}.outermost"])
    def test_below_middleware(self, middleware: str, stream: Stream, name: str) -> None:
        def wraps(get_response: Any) -> Any:
            def inner(request: HttpRequest) -> Any:
                response = get_response(request)
                response.streaming_content = (part.upper() for part in response.streaming_content)
                return response

            return inner

        middlewares.append(wraps)
        try:
            with site(lock_view(name)(stream), MIDDLEWARE=[middleware]):
                for steps in (3, 1):
                    response = wsgi("/0", headers={"accept-encoding": "gzip"})
                    for _ in zip(range(steps), response):  # noqa: B905
                        assert not stream.is_free
                    response.close()
                    assert stream.is_free
                assert all(stream.ended)
        finally:
            middlewares.clear()

    def test_the_test_client(self, stream: Stream, name: str) -> None:
        with site(lock_view(name)(stream), lock_view(name)(stream.acall)):
            response = Client().get("/0")
            assert not stream.is_free
            assert Client().get("/0").status_code == 409
            assert b"".join(response) == b"xxx"
            assert stream.is_free
            Client().head("/0").close()
            assert stream.is_free

            async def main() -> None:
                for url in ("/0", "/1"):
                    response: Any = await AsyncClient().get(url)
                    assert not stream.is_free
                    assert (await AsyncClient().get(url)).status_code == 409
                    content = response.streaming_content
                    if url == "/1":
                        assert b"".join([part async for part in content]) == b"xxx"
                    else:
                        assert b"".join(content) == b"xxx"
                    assert stream.is_free

            run(main)

    @pytest.mark.parametrize("shared_between_threads", [False, True])
    def test_in_a_test_case(self, shared_between_threads: bool, stream: Stream, name: str) -> None:
        """Case 96, 97: its transaction does not count."""

        def test() -> None:
            if shared_between_threads:
                connection.inc_thread_sharing()
            with site(lock_view(name)(stream)):
                response = Client().get("/0")
                assert Client().get("/0").status_code == 409
                assert b"".join(response) == b"xxx"
            assert stream.is_free
            if shared_between_threads:
                connection.dec_thread_sharing()

        in_test_case(test)
        assert all(stream.held)

    @pytest.mark.parametrize("shared_between_threads", [False, True])
    def test_in_an_asynchronous_test_case(
        self, shared_between_threads: bool, stream: Stream, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The client closes it in the thread of the loop, where Django's cursor must not be used."""

        async def test() -> None:
            if shared_between_threads:
                await sync_to_async(connection_of_thread)("inc_thread_sharing")
            with site(lock_view(name)(stream.acall)):
                response: Any = await AsyncClient().get("/0")
                assert not stream.is_free
                assert b"".join([part async for part in response.streaming_content]) == b"xxx"
            assert stream.is_free
            if shared_between_threads:
                await sync_to_async(connection_of_thread)("dec_thread_sharing")

        def connection_of_thread(method: str) -> None:
            getattr(connections["default"], method)()

        in_test_case(test)
        assert all(stream.held)
        assert caplog.records == []

    @pytest.mark.parametrize("alias", ["default", "pooled", "persistent", "healthy"])
    def test_with_the_signals_of_a_server(self, alias: str, stream: Stream, name: str) -> None:
        """Case 2, 3: the connection stays while the response is read, and goes the usual way afterwards."""
        connections[alias].close()
        pid = 0
        with site(lock_view(name, using=alias)(stream)):
            for _ in range(3):
                response = wsgi("/0")
                pid = stream.other.holder(stream.key)
                close_old_connections()
                assert stream.other.holder(stream.key) == pid
                assert b"".join(response) == b"xxx"
                assert backend_pid(alias) == pid
                response.close()
                assert stream.is_free
                assert (connections[alias].connection is not None) is (alias == "persistent")
        assert all(stream.held)
        if alias == "pooled":
            assert Thread(lambda: backend_pid(alias)).result() == pid  # the pool of one has its session back
            connections[alias].close()

    def test_a_pooled_connection_that_is_closed_meanwhile(
        self, stream: Stream, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Case 2: it is discarded, never lent with a lock on it."""
        response = lock_view(name, using="pooled")(stream)(get("/"))
        connections["pooled"].close()
        wait_until(lambda: stream.is_free, "the session has ended")
        assert value("SELECT 1", alias="pooled") == 1
        response.close()
        assert "was lost" in caplog.text
        connections["pooled"].close()

    def test_two_streams_of_different_keys(self, stream: Stream, name: str) -> None:
        """Closed in the order that they were opened in."""
        first = lock_view(name)(stream)(get("/"))
        second = lock_view(name, "second")(stream)(get("/"))
        first.close()
        assert stream.is_free
        assert not stream.other.is_free(lock_key(name, "second"))
        second.close()
        assert stream.other.is_free(lock_key(name, "second"))

    def test_an_outer_block_that_ends_first(self, stream: Stream, name: str) -> None:
        with advisory_lock(name):
            response = lock_view(name)(stream)(get("/"))
        assert not stream.is_free
        response.close()
        assert stream.is_free

    def test_an_outer_block_that_ends_last(self, stream: Stream, name: str) -> None:
        with advisory_lock(name) as lock:
            lock_view(name)(stream)(get("/")).close()
            assert lock.is_held()
            assert not stream.is_free
        assert stream.is_free

    def test_two_locks_of_one_response(self, stream: Stream, name: str) -> None:
        """Both are handed over, also where both have one key."""
        for inner in ((name,), (name, "inner")):
            response = lock_view(name)(lock_view(*inner)(stream))(get("/"))
            assert not stream.is_free
            assert not stream.other.is_free(lock_key(*inner))
            assert len(closers(response)) == 3
            response.close()
            assert stream.is_free
            assert stream.other.is_free(lock_key(*inner))

    def test_the_thread_goes_on_and_never_nests_in_it(self, stream: Stream, name: str) -> None:
        """A later request of the same thread is another one's, whatever it takes the lock with."""

        class Work(AdvisoryLockCommandMixin, BaseCommand):
            lock_key = name

            def handle(self, *args: Any, **options: Any) -> str:
                raise NotImplementedError

        response = lock_view(name)(stream)(get("/"))
        assert lock_view(name)(stream)(get("/")).status_code == 409
        with pytest.raises(LockDeadlock):  # only the waiting thread itself could close it
            lock_view(name, timeout=LIMIT)(stream)(get("/"))
        assert call(lock_view(name)(stream.acall)).status_code == 409
        out = io.StringIO()
        call_command(Work(), stdout=out)
        assert out.getvalue().startswith("Skipped")
        with try_advisory_lock(name) as lock:
            assert not lock
        with try_advisory_lock(name, dedicated=True) as lock:
            assert not lock
        with pytest.raises(LockTimeout):
            advisory_lock(name, timeout=0).acquire()
        with pytest.raises(LockDeadlock), advisory_lock(name, timeout=LIMIT):
            pytest.fail("nested in the lock of a stream")
        with transaction.atomic(), pytest.raises(LockTimeout):
            advisory_lock(name, timeout=0).acquire()
        response.close()
        assert stream.is_free
        with advisory_lock(name):
            pass

    def test_shared_streams_go_on_together(self, stream: Stream, name: str) -> None:
        view = lock_view(name, shared=True)(stream)
        first, second = view(get("/")), view(get("/"))
        assert lock_view(name)(stream)(get("/")).status_code == 409
        first.close()
        assert not stream.is_free
        second.close()
        assert stream.is_free

    def test_a_fork_with_an_open_stream(self, stream: Stream, name: str) -> None:
        """Case 20 of the facts: the child closes what it inherited, and the parent keeps its lock."""
        response = lock_view(name)(stream)(get("/"))

        def child() -> str:
            response.close()
            busy = lock_view(name)(stream)(get("/")).status_code
            connections.close_all()
            return str(busy)

        assert in_child(child) == "'409'"
        assert not stream.is_free
        response.close()
        assert stream.is_free

    def test_session_scope_inside_a_transaction(self, stream: Stream, name: str) -> None:
        view = lock_view(name, scope="session")(stream)
        with transaction.atomic():
            account = Account.objects.create(name=name)
            response = view(get("/"))
        assert Account.objects.filter(pk=account.pk).delete()[0] == 1
        assert not stream.is_free
        response.close()
        assert stream.is_free
        with transaction.atomic():
            view(get("/")).close()
            assert stream.is_free
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            response = view(get("/"))
            raise ZeroDivisionError
        assert not stream.is_free
        response.close()
        assert stream.is_free

    def test_session_scope_and_a_failed_transaction(self, stream: Stream, name: str) -> None:
        """Case 8: a database error that the view caught."""

        def view(request: HttpRequest) -> StreamingHttpResponse:
            with contextlib.suppress(Error):
                value("SELECT 1/0")
            return stream(request)

        with transaction.atomic():
            response = lock_view(name, scope="session")(view)(get("/"))
            assert connection.needs_rollback
        assert not stream.is_free
        response.close()
        assert stream.is_free

    def test_session_scope_without_autocommit(self, stream: Stream, name: str) -> None:
        """A failed transaction that nobody marks: the error comes out of the view, and the lock is freed."""

        def view(request: HttpRequest) -> StreamingHttpResponse:
            with contextlib.suppress(Error):
                value("SELECT 1/0")
            return stream(request)

        transaction.set_autocommit(False)
        try:
            with pytest.raises(TransactionManagementError, match="database error was caught"):
                lock_view(name, scope="session")(view)(get("/"))
            assert stream.is_free
        finally:
            transaction.rollback()
            transaction.set_autocommit(True)

    def test_a_transaction_lock_warns(self, stream: Stream, name: str) -> None:
        with transaction.atomic():
            with pytest.warns(
                RuntimeWarning, match=f"The lock '{name}' on 'default' ends with the transaction"
            ) as caught:
                response = lock_view(name)(stream)(get("/"))
            assert caught[0].filename == __file__
            assert not stream.is_free
        assert stream.is_free
        response.close()


class TestAsynchronousStreaming:
    def test_held_until_it_is_closed(self, stream: Stream, name: str) -> None:
        async def main() -> None:
            response = await lock_view(name)(stream.acall)(aget("/"))
            assert b"".join([part async for part in response]) == b"xxx"
            assert not stream.is_free
            await sync_to_async(response.close)()
            assert stream.is_free

        run(main)
        assert (stream.held, stream.ended) == ([True] * 3, [True])

    def test_closed_in_the_loop(self, stream: Stream, name: str) -> None:
        async def main() -> None:
            response = await lock_view(name)(stream.acall)(aget("/"))
            response.close()
            assert stream.is_free
            response.close()

        run(main)

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_a_client_that_goes_away_half_way(self, kind: str, stream: Stream, name: str) -> None:
        """With Django's own handler."""
        stream.steps = 1_000_000
        begun = asyncio.Event()

        async def aparts() -> AsyncIterator[bytes]:
            async for part in stream.aparts():
                yield part
                begun.set()
                await asyncio.sleep(0.001)

        async def aview(request: HttpRequest) -> StreamingHttpResponse:
            return StreamingHttpResponse(aparts())

        def view(request: HttpRequest) -> StreamingHttpResponse:
            return StreamingHttpResponse(aparts())

        async def main() -> None:
            server = ApplicationCommunicator(ASGIHandler(), aget("/0").scope)
            await server.send_input({"type": "http.request"})
            assert (await server.receive_output(LIMIT))["status"] == 200
            await asyncio.wait_for(begun.wait(), LIMIT)
            assert not stream.is_free
            await server.send_input({"type": "http.disconnect"})
            await server.wait(LIMIT)
            assert stream.is_free

        with site(lock_view(name)(view if kind == "sync" else aview)):
            run(main)
        assert all(stream.held)

    def test_an_error_inside(self, stream: Stream, name: str) -> None:
        stream.fails = True

        async def main() -> None:
            response = await lock_view(name)(stream.acall)(aget("/"))
            with pytest.raises(ZeroDivisionError):
                [part async for part in response]
            assert stream.is_free
            response.close()

        run(main)

    def test_dropped_without_close(self, stream: Stream, name: str) -> None:
        async def main() -> None:
            response = await lock_view(name)(stream.acall)(aget("/"))
            await sync_to_async(gc.collect)()  # the thread has let go of what it did before
            with pytest.warns(ResourceWarning, match="dropped without release"):
                del response
                gc.collect()
            async with advisory_lock("next"):
                assert stream.is_free

        run(main)

    def test_cancelled_while_it_is_handed_over(self, stream: Stream, name: str) -> None:
        """Nobody gets the response, so the lock ends with the task."""

        async def main() -> None:
            for moment in range(12):
                task = asyncio.create_task(lock_view(name)(stream.acall)(aget("/")))
                for _ in range(moment):
                    await asyncio.sleep(0.0005)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    (await task).close()
                assert stream.is_free

        run(main)

    def test_cancelled_just_when_it_is_handed_over(
        self, stream: Stream, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import django_advisory_lock.guards.streams

        module: Any = django_advisory_lock.guards.streams
        taking, go_on = threading.Event(), threading.Event()
        take_over = module.take_over

        def slow(handle: Any) -> Any:
            end = take_over(handle)
            taking.set()
            assert go_on.wait(LIMIT)
            return end

        monkeypatch.setattr(module, "take_over", slow)

        async def main() -> None:
            task = asyncio.create_task(lock_view(name)(stream.acall)(aget("/")))
            await asyncio.to_thread(taking.wait, LIMIT)
            task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert stream.is_free

        run(main)

    def test_the_task_goes_on_and_never_nests_in_it(self, stream: Stream, name: str) -> None:
        async def main() -> None:
            response = await lock_view(name)(stream.acall)(aget("/"))
            assert (await lock_view(name)(stream.acall)(aget("/"))).status_code == 409
            async with try_advisory_lock(name) as lock:
                assert not lock

            def synchronous() -> int:
                return int(lock_view(name)(stream)(get("/")).status_code)

            assert await sync_to_async(synchronous)() == 409
            await sync_to_async(response.close)()
            assert stream.is_free

        run(main)

    def test_a_session_that_was_killed(self, stream: Stream, name: str, caplog: pytest.LogCaptureFixture) -> None:
        async def main() -> None:
            response = await lock_view(name)(stream.acall)(aget("/"))
            stream.other.kill(stream.other.holder(stream.key))
            await sync_to_async(response.close)()
            assert await sync_to_async(value)("SELECT 1") == 1

        run(main)
        assert "was lost: its session has ended" in caplog.text

    def test_a_synchronous_iterator(self, stream: Stream, name: str) -> None:
        """Of a view that a task calls."""

        async def main() -> None:
            response = await sync_to_async(lock_view(name)(stream))(aget("/"))
            assert not stream.is_free
            await sync_to_async(response.close)()
            assert stream.is_free

        run(main)


@contextlib.contextmanager
def extra_alias_settings(alias: str, **changes: Any) -> Iterator[None]:
    """Change the settings of an alias for the length of a block; its connection is made anew before and after."""
    settings = connections[alias].settings_dict
    before = {name: settings[name] for name in changes}
    connections[alias].close()
    settings.update(changes)
    try:
        yield
    finally:
        connections[alias].close()
        settings.update(before)


class TestInterrupts:
    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    @pytest.mark.parametrize(
        ("kind", "interrupt"),
        [
            ("class", "sigint"),
            ("stream", "time_limit"),
            pytest.param("function", "time_limit", marks=pytest.mark.slow),
            pytest.param("stream of a class", "sigint", marks=pytest.mark.slow),
        ],
    )
    def test_at_every_line(self, kind: str, interrupt: str, stream: Stream, name: str) -> None:
        """Case 67: nothing stays locked but what the next lock operation frees."""

        class Locked(AdvisoryLockViewMixin, View):
            lock_key = name

            def get(self, request: HttpRequest) -> HttpResponseBase:
                return stream(request) if "stream" in kind else HttpResponse()

        view: AnyView = Locked.as_view()
        if "class" not in kind:
            view = lock_view(name)(stream if kind == "stream" else lambda request: HttpResponse())

        def serve() -> None:
            response = view(get("/"))
            response.close()

        serve()
        strike_at_every_line(INTERRUPTS[interrupt], serve, [lock_key(name)], stream.other)
