"""What becomes of a lock, told: to the log and to the signals; and warnings that point to the caller's own line."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from . import conf, signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.dispatch import Signal

    from .exceptions import LockLost, LockTimeout
    from .handles import LockHandle
    from .keys import LockKey

logger = logging.getLogger("django_advisory_lock")

MOMENT = 0.01  # seconds; a shorter wait is never a slow one


def tell_acquired(handle: LockHandle) -> None:
    if handle.waited > MOMENT and handle.waited >= conf.get_slow_wait():
        logger.warning("Waited %.1f s for the lock %r on %r.", handle.waited, handle.key.name, handle.using)
    _send(signals.lock_acquired, handle, waited=handle.waited)


def tell_busy(handle: LockHandle, error: LockTimeout | None = None) -> None:
    """Tell that an attempt has failed: after a try without an error, which would name the holder."""
    if handle._kind is None:
        return  # it is a part of another one, which tells
    if error is None:
        logger.info("The lock %r on %r is busy.", handle.key.name, handle.using)
    else:
        is_slow = handle.waited > MOMENT and handle.waited >= conf.get_slow_wait()
        logger.log(logging.WARNING if is_slow else logging.INFO, "%s", error)
    _send(signals.lock_busy, handle, error=error, holders=error and error.holders)


def tell_released(handle: LockHandle) -> None:
    _send(signals.lock_released, handle, held_for=time.monotonic() - handle._since)


def tell_lost(handle: LockHandle, error: LockLost) -> None:
    """Tell of a loss, once for each handle. It is in the log already."""
    handle.lost.set()
    if not handle._loss_told:
        handle._loss_told = True
        _send(signals.lock_lost, handle, error=error)


def _send(signal: Signal, handle: LockHandle, **more: Any) -> None:
    if signal.receivers and handle._kind is not None:
        was_asked = handle._was_asked  # by the body, whose answer a receiver does not give
        more.update(key=handle.key, using=handle.using, scope=handle.scope, handle=handle)
        try:
            signal.send_robust(handle._kind, **more)
        except Exception:
            # Django raises where asynchronous receivers cannot be waited for: in the thread of a running loop.
            logger.exception("Not all receivers were told of the lock %r on %r.", handle.key.name, handle.using)
        handle._was_asked = was_asked


def warn_caller(message: str) -> None:
    """Emit a RuntimeWarning for the nearest line outside this package, and outside Django's `async_unsafe`."""
    level, frame = 2, sys._getframe(1)
    ours = (f"{__package__}.", "django.utils.asyncio")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def names(keys: Sequence[LockKey]) -> str:
    """Return the names of some keys for a message: all of a few, or the first of many."""
    shown = ", ".join(repr(key.name) for key in keys[:3])
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3} more"
