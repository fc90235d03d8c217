"""A streaming response that has a lock: it keeps it until it is closed, breaks, or turns out to reach nobody."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from django.core.signals import request_finished
from django.db import connections

from .. import hops, sessions
from ..lasting import take_over

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from django.http import StreamingHttpResponse

    from ..handles import LockHandle


class _Made(threading.local):
    """The streams that were made in this thread."""

    def __init__(self) -> None:
        self.streams: WeakSet[_Stream] = WeakSet()


_made = _Made()


class _Stream:
    """The content of a response, and the end of the lock that it has."""

    is_read = False

    def __init__(self, content: Any, end: Callable[[], None]) -> None:
        self.content = content
        # Django's responses close what has a close(), before they send request_finished: at that signal the connection
        # may be closed, or go back to a pool.
        self.close = end
        _made.streams.add(self)


class _SyncStream(_Stream):
    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self.is_read = True
        try:
            chunk: bytes = next(self.content)
        except StopIteration:
            raise
        except BaseException:
            self.close()  # under ASGI nobody closes a response that raises
            raise
        return chunk


class _AsyncStream(_Stream):
    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self.is_read = True
        try:
            chunk: bytes = await anext(self.content)
        except StopAsyncIteration:
            raise
        except BaseException:
            await hops.finish(self.close)
            raise
        return chunk


def hand_over(handle: LockHandle, response: StreamingHttpResponse) -> None:
    """Let a response have the lock of the view that made it."""
    end = take_over(handle)
    if end is not None:
        file = getattr(response, "file_to_stream", None)
        stream = _AsyncStream if response.is_async else _SyncStream
        response.streaming_content = stream(response.streaming_content, end)
        if file is not None:
            response.file_to_stream = file  # type: ignore[attr-defined] # the server may send it by itself


def _end_unread(sender: Any = None, **kwargs: Any) -> None:
    """Free the locks of responses that a request of this thread made, and that reach nobody.

    Middleware may drop a response, and the client of an asynchronous server may have gone before the thread was done.
    A server reads at once what it is going to send. The client of Django's tests, which reads when a test likes, names
    no sender.
    """
    if sender is None:
        return
    unread = [stream for stream in list(_made.streams) if not stream.is_read]
    for stream in unread:
        stream.is_read = True
        stream.close()
    for connection in connections.all(initialized_only=True):
        if sessions.settle_abandoned(connection) or unread:
            connection.close_if_unusable_or_obsolete()  # as Django did at this signal, when the lock kept it open


request_finished.connect(_end_unread, dispatch_uid="django_advisory_lock")
