"""How a task waits for a lock: it tries and sleeps in turn, for its thread and session belong to other tasks too."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

from . import hops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .handles import LockHandle
    from .options import Options
    from .owners import Owner

SHORTEST = 0.005  # seconds between the first two tries


async def take_in_task(
    make_handle: Callable[[], LockHandle], owner: Owner, block: tuple[object, int] | None
) -> LockHandle:
    """Make a handle and its attempt, for a task; `block` is what is entered with it, if anything.

    The key is derived in the thread that the lock is taken in, where a namespace may ask that thread's connection.
    """
    attempt = _Attempt(make_handle, owner, block)
    try:
        pauses = None
        while True:
            handle, is_over = await hops.attempt(attempt, attempt.give_up, anywhere=attempt.is_dedicated)
            if is_over:
                return handle
            if is_over is None:
                continue
            pauses = pauses or _pauses(handle)
            await asyncio.sleep(_shortened(next(pauses), handle._options, attempt.started))
    except BaseException as error:
        attempt.forget()
        # A coroutine that is closed cannot wait: what it held goes the way of a handle that is dropped.
        if attempt.keeps_something and not isinstance(error, GeneratorExit):
            await hops.finish(attempt.give_up, anywhere=attempt.is_dedicated)
        raise


class _Attempt:
    """One try after the other, each in the thread of synchronous code."""

    handle: LockHandle | None = None

    def __init__(self, make_handle: Callable[[], LockHandle], owner: Owner, block: tuple[object, int] | None) -> None:
        self.make_handle = make_handle
        self.owner = owner
        self.block = block
        self.started = time.monotonic()

    def __call__(self) -> tuple[LockHandle, bool | None]:
        """Try once; return the handle, and whether that was the last time, or None where no try was made."""
        handle = self.handle
        if handle is None:  # not `or`: as long as it is busy a handle is false
            handle = self.handle = self.make_handle()
            if handle._options.dedicated:
                # The rest needs nothing of this thread, which must not wait for a server that says nothing.
                handle._refuse_other_transactions()
                return handle, None
        return handle, handle._try_for_task(self.owner, self.started, self.block)

    @property
    def keeps_something(self) -> bool:
        """Whether a lock or a session is to be given up; else there is no thread to wait for."""
        return self.handle is not None and self.handle._keeps_something

    @property
    def is_dedicated(self) -> bool:
        return self.handle is not None and self.handle._options.dedicated

    def give_up(self) -> None:
        """Give up in the thread what was taken for a task that wants it no more, and may be gone with its loop."""
        if self.handle is not None:
            self.handle._give_up(self.owner)

    def forget(self) -> None:
        """Take the block back, if it was opened: its owner would seem to be in it for ever."""
        if self.block is not None and self.handle is not None:
            self.owner.forget_block(self.block[0], self.handle)


def _pauses(handle: LockHandle) -> Iterator[float]:
    """Yield the seconds to sleep between tries, spread so that many tasks do not ask at once."""
    pause, longest, interval = SHORTEST, handle._longest_pause, handle._options.poll_interval
    if interval is not None:
        pause = longest = interval
    while True:
        yield pause * random.uniform(0.5, 1.5)  # noqa: S311
        pause = min(2 * pause, longest)


def _shortened(pause: float, options: Options, started: float) -> float:
    """Return the pause, or what is left until the deadline, when the last try is made."""
    if options.timeout is None:
        return pause
    return max(0.0, min(pause, started + options.timeout - time.monotonic()))
