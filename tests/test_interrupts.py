"""Interrupts at every line of the library while a lock is taken, held and released."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from django.db import transaction

import django_advisory_lock
from django_advisory_lock import advisory_lock, lock_key, try_advisory_lock
from django_advisory_lock.locks import _Lock
from django_advisory_lock.owners import current_owner
from tests.support import OtherSession

PACKAGE = str(Path(django_advisory_lock.__file__).parent)


class TimeLimitExceeded(Exception):
    """What task queues raise from a signal handler, at any line."""


def interrupt_at(
    point: int, interrupt: type[BaseException], function: Callable[[], None]
) -> tuple[CodeType, int] | None:
    """Run a function and raise at its n-th line within the library; return the place, or None where it ended before."""
    seen = 0
    place = None

    def in_frame(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen, place
        if event == "line":
            seen += 1
            if seen == point:
                place = (frame.f_code, frame.f_lineno)
                raise interrupt
        return in_frame

    def in_library(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        return in_frame if code.co_filename.startswith(PACKAGE) and code.co_name != "__del__" else None

    before = sys.gettrace()
    sys.settrace(in_library)
    try:
        function()
    except (interrupt, ZeroDivisionError):
        pass
    finally:
        sys.settrace(before)
    return place


def waits(name: str) -> None:
    with advisory_lock(name):
        pass


def waits_with_timeout(name: str) -> None:
    with advisory_lock(name, timeout=5):
        pass


def fails(name: str) -> None:
    with advisory_lock(name):
        raise ZeroDivisionError


def tries(name: str) -> None:
    with try_advisory_lock(name) as lock:
        assert lock


def nests(name: str) -> None:
    with advisory_lock(name), advisory_lock(name):
        pass


def by_hand(name: str) -> None:
    advisory_lock(name).acquire().release()


def decorated(name: str) -> None:
    advisory_lock(name)(lambda: None)()


def session_scope_in_a_transaction(name: str) -> None:
    with transaction.atomic(), advisory_lock(name, scope="session"):
        pass


def transaction_lock(name: str) -> None:
    with transaction.atomic(), advisory_lock(name):
        pass


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, TimeLimitExceeded])
@pytest.mark.parametrize(
    "function",
    [
        waits,
        waits_with_timeout,
        fails,
        tries,
        nests,
        by_hand,
        decorated,
        session_scope_in_a_transaction,
        transaction_lock,
    ],
)
def test_at_every_line(
    function: Callable[[str], None], interrupt: type[BaseException], name: str, other: OtherSession
) -> None:
    """Case 67: free at once; or, where the handle was the caller's to release, with the next lock operation."""
    key = lock_key(name)
    with contextlib.suppress(ZeroDivisionError):
        function(name)
    exit_of_block = _Lock.__exit__.__code__
    for point in range(1, 1000):
        place = interrupt_at(point, interrupt, lambda: function(name))
        if place is None:
            assert point > 100
            return
        if other.is_free(key):
            continue
        if current_owner().entered:
            # Python can be interrupted before the first line of any __exit__: the block was never told that it ended.
            assert place[0] is exit_of_block
            assert place[1] - exit_of_block.co_firstlineno < 5
            current_owner().entered.clear()
        gc.collect()
        with advisory_lock(name, "next"):
            assert other.is_free(key), place
    pytest.fail("never ran to its end")
