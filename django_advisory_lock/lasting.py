"""A lock that outlasts its block: a streaming response takes it over, and whoever closes the response frees it."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from . import releasing
from .exceptions import LockLost
from .notices import logger, names, tell_lost, tell_released

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from .handles import LockHandle
    from .holds import Hold


def take_over(handle: LockHandle) -> Callable[[], None] | None:
    """Take a session lock out of its block; what is returned frees it, once, in any thread. None where it is lost.

    Its thread or task goes on to other work, which must not nest in it: from now on the lock belongs to nobody.
    """
    hold = handle._hold
    if hold is None or not releasing.is_open(hold):
        return None
    savepoint, handle._savepoint = handle._savepoint, None
    releasing.end_body(hold, savepoint)
    hold.disclaim()
    handle._outlasts_block = True

    def end() -> None:
        is_first = hold.noted
        try:
            _release(hold)
            if is_first:
                tell_released(handle)
        except LockLost as error:
            tell_lost(handle, error)
        except BaseException as error:
            # An interrupt may strike before the release has begun; after it this sends nothing.
            with contextlib.suppress(Exception):
                _release(hold)
            if not isinstance(error, Exception):
                raise
            logger.exception("The lock %r on %r could not be released.", handle.key.name, handle.using)

    return end


def _release(hold: Hold) -> None:
    """Release a lock, unless this process has inherited it, or leave that to the next lock operation."""
    if releasing.is_inherited(hold) or not hold.noted:
        return
    raw = hold.session.raw()
    if raw is None or not raw.lock.locked() or not _is_in_a_query():
        releasing.release(hold)
        return
    if hold in hold.session.abandoned:
        return  # its handle was collected at the same time, which warns
    hold.session.abandoned.append(hold)
    hold.session.unpin(hold)
    hold.unwatch()
    logger.warning(
        "A response was collected as garbage in the middle of a query. The next lock operation on %r frees %s.",
        hold.using,
        names(hold.keys),
    )


def _is_in_a_query() -> bool:
    """Whether this thread is inside psycopg, and would wait for its own lock: garbage is collected anywhere."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("psycopg."):
            return True
        frame = frame.f_back
    return False
