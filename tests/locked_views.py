"""Locked views for the web servers of the tests: each on every alias, in a transaction and in none, with every lock.

Tests lead them by files: a view tells that it has come to a point, and goes on once the test has opened it.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.models import Max
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action
from rest_framework.permissions import IsAuthenticated
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from django_advisory_lock.guards.view import AdvisoryLockViewMixin, lock_view
from tests.testapp.models import Account

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from django.urls import URLPattern

    View = Callable[..., Any]

WAITS = 20.0  # seconds
BIG = 64 * 1024, 128  # bytes, times: far beyond what the sockets keep

DIRECTORY = Path(os.environ.get("WEB_DIRECTORY", "."))


def _arrive(name: str, point: str) -> None:
    arrival = DIRECTORY / f"{name}.{point}.{uuid.uuid4().hex}"
    new = DIRECTORY / f"new.{arrival.name}"
    new.write_text(str(os.getpid()))
    new.rename(arrival)


def _steps(name: str, point: str) -> Iterator[None]:
    """Tell that a point is reached, and yield until it is open."""
    _arrive(name, point)
    end = time.monotonic() + WAITS
    while not (DIRECTORY / f"{name}.{point}").exists():
        if time.monotonic() > end:
            raise TimeoutError(point)
        yield


def wait_at(name: str, point: str) -> None:
    for _ in _steps(name, point):
        time.sleep(0.005)


async def await_at(name: str, point: str) -> None:
    for _ in _steps(name, point):
        await asyncio.sleep(0.005)


# Synchronous


def number(request: HttpRequest, name: str, using: str) -> HttpResponse:
    """Take the next free number."""
    accounts = Account.objects.using(using).filter(name=name)
    last = accounts.aggregate(last=Max("balance"))["last"] or 0
    wait_at(name, "read")
    accounts.create(name=name, balance=last + 1)
    return HttpResponse(str(last + 1))


def once(request: HttpRequest, name: str, using: str) -> HttpResponse:
    """Check, then create."""
    accounts = Account.objects.using(using).filter(name=name)
    account = accounts.first()
    wait_at(name, "read")
    if account is not None:
        return HttpResponse(str(account.pk))
    return HttpResponse(str(accounts.create(name=name).pk), status=201)


def held(request: HttpRequest, name: str, using: str) -> HttpResponse:
    wait_at(name, "inside")
    return HttpResponse("held")


def failing(request: HttpRequest, name: str, using: str) -> HttpResponse:
    Account.objects.using(using).create(name=name)
    raise ZeroDivisionError("in the view")


def streamed(request: HttpRequest, name: str, using: str) -> StreamingHttpResponse:
    """Touch the resource while the response is read."""

    def lines() -> Iterator[str]:
        count = Account.objects.using(using).filter(name=name).count()
        yield f"begin {count}\n"
        wait_at(name, "half")
        Account.objects.using(using).create(name=name)
        yield "end\n"

    return StreamingHttpResponse(lines())


def late(request: HttpRequest, name: str, using: str) -> StreamingHttpResponse:
    """Return a stream that nobody may want any more."""
    wait_at(name, "inside")
    return StreamingHttpResponse(iter(["begin\n", "end\n"]))


def big(request: HttpRequest, name: str, using: str) -> StreamingHttpResponse:
    size, times = BIG
    return StreamingHttpResponse(b"x" * size for _ in range(times))


def endless(request: HttpRequest, name: str, using: str) -> StreamingHttpResponse:
    def lines() -> Iterator[bytes]:
        for _ in range(20_000):
            yield b"line\n" * 100
            time.sleep(0.001)

    return StreamingHttpResponse(lines())


def broken(request: HttpRequest, name: str, using: str) -> StreamingHttpResponse:
    def lines() -> Iterator[bytes]:
        yield b"begin\n"
        wait_at(name, "half")
        raise ZeroDivisionError("in the stream")

    return StreamingHttpResponse(lines())


def file(request: HttpRequest, name: str, using: str) -> FileResponse:
    return FileResponse(Path(__file__).open("rb"))


def here(request: HttpRequest, name: str, using: str) -> HttpResponse:
    """Do what other views do."""
    return HttpResponse(str(Account.objects.using(using).filter(name=name).count()))


# Asynchronous


async def acount(request: HttpRequest, name: str, using: str) -> HttpResponse:
    """Read, let others run, write."""
    account = await Account.objects.using(using).aget(name=name)
    await await_at(name, "read")
    account.balance += 1
    await account.asave(using=using)
    return HttpResponse(str(account.balance))


async def aheld(request: HttpRequest, name: str, using: str) -> HttpResponse:
    await await_at(name, "inside")
    return HttpResponse("held")


async def astreamed(request: HttpRequest, name: str, using: str) -> StreamingHttpResponse:
    async def lines() -> AsyncIterator[str]:
        count = await Account.objects.using(using).filter(name=name).acount()
        yield f"begin {count}\n"
        await await_at(name, "half")
        await Account.objects.using(using).acreate(name=name)
        yield "end\n"

    return StreamingHttpResponse(lines())


async def asynchronous_late(request: HttpRequest, name: str, using: str) -> StreamingHttpResponse:
    await await_at(name, "inside")
    return StreamingHttpResponse(iter(["begin\n", "end\n"]))


async def abig(request: HttpRequest, name: str, using: str) -> StreamingHttpResponse:
    async def chunks() -> AsyncIterator[bytes]:
        size, times = BIG
        for _ in range(times):
            yield b"x" * size
            await asyncio.sleep(0)  # so that its end may be noticed

    return StreamingHttpResponse(chunks())


async def aendless(request: HttpRequest, name: str, using: str) -> StreamingHttpResponse:
    async def lines() -> AsyncIterator[bytes]:
        for _ in range(20_000):
            yield b"line\n" * 100
            await asyncio.sleep(0.001)

    return StreamingHttpResponse(lines())


async def abroken(request: HttpRequest, name: str, using: str) -> StreamingHttpResponse:
    async def lines() -> AsyncIterator[bytes]:
        yield b"begin\n"
        await await_at(name, "half")
        raise ZeroDivisionError("in the stream")

    return StreamingHttpResponse(lines())


# Django REST framework


class HeaderAuthentication(BaseAuthentication):  # type: ignore[misc]
    """Whoever has a name has a user."""

    def authenticate(self, request: Any) -> tuple[Any, None] | None:
        user = request.headers.get("X-User")
        return None if user is None else (type("User", (), {"is_authenticated": True, "username": user})(), None)

    def authenticate_header(self, request: Any) -> str:
        return "X-User"


class Orders(AdvisoryLockViewMixin, ViewSet):  # type: ignore[misc]
    authentication_classes = (HeaderAuthentication,)
    permission_classes = (IsAuthenticated,)
    renderer_classes = (JSONRenderer,)
    lock_methods = ("POST",)

    def get_lock_key(self) -> Any:
        return ("order", self.kwargs["name"])

    @action(detail=True, methods=["post"])  # type: ignore[untyped-decorator]
    def pay(self, request: Any, name: str) -> Response:
        assert self.held_lock is not None
        paid = Account.objects.filter(name=name)
        is_new = not paid.exists()
        wait_at(name, "read")
        if is_new:
            paid.create(name=name)
        return Response({"paid": is_new, "scope": self.held_lock.scope}, status=201 if is_new else 200)

    def retrieve(self, request: Any, name: str) -> Response:
        return Response({"paid": Account.objects.filter(name=name).exists()})


class PatientOrders(Orders):
    lock_timeout = WAITS


# Their addresses

LOCKS: dict[str, Callable[[str], Callable[[View], View]]] = {
    "unlocked": lambda using: lambda view: view,
    "refusing": lambda using: lock_view(_key, using=using),
    "waiting": lambda using: lock_view(_key, using=using, timeout=WAITS),
}
SYNCHRONOUS = [number, once, held, failing, streamed, late, big, endless, broken, file, here]
ASYNCHRONOUS = [acount, aheld, astreamed, asynchronous_late, abig, aendless, abroken]


def _key(request: HttpRequest, name: str, using: str) -> str:
    return name


def _addresses(views: list[Any], *, atomic: bool) -> Iterator[URLPattern]:
    for using in connections.settings:
        for kind, lock in LOCKS.items():
            for view in views:
                # A function of its own for each: what is not atomic is noted on the function.
                locked = transaction.non_atomic_requests(using="nothing")(lock(using)(_copy(view)))
                for alias in connections.settings:
                    if not atomic or alias != using:
                        transaction.non_atomic_requests(using=alias)(locked)
                where = f"{using}/{'atomic' if atomic else 'plain'}/{kind}/{view.__name__}/<str:name>"
                yield path(where, locked, {"using": using})


def _copy(view: Any) -> Any:
    return type(view)(view.__code__, view.__globals__, view.__name__, view.__defaults__, view.__closure__)


def _handlers(viewset: Any, **actions: str) -> Any:
    view = viewset.as_view(actions)
    for alias in set(connections.settings) - {"default"}:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view


urlpatterns = [
    *_addresses(SYNCHRONOUS, atomic=True),
    *_addresses(SYNCHRONOUS, atomic=False),
    *_addresses(ASYNCHRONOUS, atomic=False),
    path("orders/<str:name>", _handlers(Orders, get="retrieve")),
    path("orders/<str:name>/pay", _handlers(Orders, post="pay")),
    path("patient/<str:name>/pay", _handlers(PatientOrders, post="pay")),
]
