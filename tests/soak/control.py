"""What is no lock, so that the witness has something to find."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from django_advisory_lock import LockHandle, LockLost, advisory_lock
from tests.soak.plan import DEAF, DIRECT, KEPT, NOTHING
from tests.soak.work import Hand, Kind


def takes_nothing(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        attempt.body()


@contextlib.contextmanager
def _deaf(lock: Any) -> Iterator[LockHandle]:
    handle = lock.acquire()
    try:
        yield handle
    finally:
        with contextlib.suppress(LockLost):
            handle.release()


def hides_losses(hand: Hand, kind: str) -> None:
    route, key = hand.chance.choice((DIRECT, KEPT)), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        with _deaf(advisory_lock(key, using=route, timeout=hand.timeout(None))) as lock:
            attempt.body(lock)


CONTROLS: dict[str, dict[str, Kind]] = {NOTHING: {NOTHING: takes_nothing}, DEAF: {DEAF: hides_losses}}
