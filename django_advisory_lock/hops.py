"""The way from a task into the thread that its synchronous code uses, and back, whatever is cancelled meanwhile.

`sync_to_async` alone would not do: a cancelled call is not waited for, although its thread may just be taking a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from asgiref.sync import sync_to_async

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")


def can_wait() -> bool:
    """Whether a loop runs: a coroutine may be closed after its loop, and then its block cannot await its end."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def attempt(function: Callable[[], R], undo: Callable[[], object] | None = None, *, anywhere: bool = False) -> R:
    """Call a function in the thread of Django's async ORM, or in any, where it needs nothing of that thread.

    Where the task is cancelled the call never begins, or is waited for to its end: what it did is there to be undone.
    Where the coroutine is closed nothing can be waited for: a call that has begun is followed by `undo` in its thread.
    """
    errand = _Errand(function)
    try:
        result: R = await (_send_anywhere if anywhere else _send)(errand)
    except asyncio.CancelledError:
        if not errand.withdraw():
            await errand.end()
        raise
    except GeneratorExit:
        if not errand.withdraw():
            errand.follow_with(undo)
        raise
    return result


async def finish(function: Callable[[], R], *, anywhere: bool = False) -> R:
    """Call a function there to its end, also where the task is cancelled before; the cancellation comes afterwards.

    What may run in any thread need not wait for the one that others keep busy.
    """
    cancelled: asyncio.CancelledError | None = None
    send = _send_anywhere if anywhere else _send
    while True:
        errand = _Errand(function)
        try:
            result: R = await send(errand)
        except asyncio.CancelledError as error:
            if not errand.withdraw():
                await errand.end()
                raise
            cancelled = error
        else:
            if cancelled is not None:
                raise cancelled
            return result


class _Errand(Generic[R]):
    """One call in another thread, that can be taken back until it begins, and waited for until it ends."""

    def __init__(self, function: Callable[[], R]) -> None:
        self.function = function
        self.mutex = threading.Lock()
        self.is_begun = False
        self.is_withdrawn = False
        self.is_over = False
        self.afterwards: Callable[[], object] | None = None

    def run(self) -> R:
        with self.mutex:
            if self.is_withdrawn:
                raise asyncio.CancelledError
            self.is_begun = True
        try:
            return self.function()
        finally:
            with self.mutex:
                self.is_over = True
                afterwards = self.afterwards
            if afterwards is not None:
                afterwards()

    def withdraw(self) -> bool:
        """Take the call back; tell whether it had not begun."""
        with self.mutex:
            self.is_withdrawn = not self.is_begun
        return self.is_withdrawn

    def follow_with(self, function: Callable[[], object] | None) -> bool:
        """Have something called in the thread after a call that has begun; tell whether it is not too late."""
        with self.mutex:
            if not self.is_over:
                self.afterwards = function
            return not self.is_over

    async def end(self) -> None:
        """Wait until the call is over, however often the task is cancelled: it never waits for a lock."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        if self.follow_with(functools.partial(loop.call_soon_threadsafe, over.set)):
            while not over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await over.wait()


def _run(errand: _Errand[Any]) -> Any:
    return errand.run()


# Made once: to wrap a function costs as much as a third of the call.
_send = sync_to_async(_run)
_send_anywhere = sync_to_async(_run, thread_sensitive=False)
