"""An ASGI application with locked views, for the test client and for a real server process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path

from django_advisory_lock import LockTimeout, advisory_lock, try_advisory_lock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from django.core.handlers.asgi import ASGIHandler

WAITS = 15.0  # seconds


async def _increment(pk: int) -> int:
    """Read, let others run, write: what needs a lock."""
    from tests.testapp.models import Account

    account = await Account.objects.aget(pk=pk)
    await asyncio.sleep(0.01)
    account.balance += 1
    await account.asave()
    return int(account.balance)


async def unlocked(request: HttpRequest, name: str, pk: int) -> HttpResponse:
    return HttpResponse(str(await _increment(pk)))


@advisory_lock(lambda request, name, pk: (name, pk), timeout=WAITS, poll_interval=0.01)
async def locked(request: HttpRequest, name: str, pk: int) -> HttpResponse:
    return HttpResponse(str(await _increment(pk)))


@try_advisory_lock(lambda request, name: name, default=HttpResponse("busy", status=409))
async def tried(request: HttpRequest, name: str) -> HttpResponse:
    return HttpResponse("done")


async def block(request: HttpRequest, name: str) -> HttpResponse:
    try:
        async with advisory_lock(name, timeout=0) as lock:
            return HttpResponse(str(await lock.ais_held()))
    except LockTimeout as error:
        return HttpResponse(str(error), status=409)


async def held(request: HttpRequest, name: str) -> HttpResponse:
    """Hold the lock until the client goes away."""
    async with advisory_lock(name):
        await asyncio.sleep(600)
    return HttpResponse("never")


async def streamed(request: HttpRequest, name: str) -> StreamingHttpResponse:
    """Hold the lock while the response is read: taken in the generator, which runs after the view."""

    async def lines() -> AsyncIterator[bytes]:
        async with advisory_lock(name, timeout=WAITS):
            for _ in range(60_000):
                yield b"line\n"
                await asyncio.sleep(0.01)

    return StreamingHttpResponse(lines())


def synchronous(request: HttpRequest, name: str) -> HttpResponse:
    with advisory_lock(name, timeout=WAITS) as lock:
        return HttpResponse(str(lock.is_held()))


urlpatterns = [
    path("unlocked/<str:name>/<int:pk>", unlocked),
    path("locked/<str:name>/<int:pk>", locked),
    path("tried/<str:name>", tried),
    path("block/<str:name>", block),
    path("held/<str:name>", held),
    path("streamed/<str:name>", streamed),
    path("sync/<str:name>", synchronous),
]


def make_application() -> ASGIHandler:
    """Return the application, for a process whose Django is set up but has no URLs of its own."""
    from django.core.asgi import get_asgi_application

    changed: Any = settings
    changed.ROOT_URLCONF, changed.ALLOWED_HOSTS = __name__, ["*"]
    return get_asgi_application()


def serve(descriptor: int, application: str) -> None:
    """Serve one of the applications of the tests on a socket that listens already, until a signal comes."""
    import socket

    import uvicorn
    from django.core.asgi import get_asgi_application

    app = make_application() if application == "own" else get_asgi_application()
    config = uvicorn.Config(app, log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])
