"""The kinds of work of a task; all tasks of a process share one thread for what is synchronous, and so its sessions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from asgiref.sync import sync_to_async
from django.db import close_old_connections

from django_advisory_lock import (
    AdvisoryLockJobMixin,
    advisory_lock,
    advisory_lock_all,
    advisory_semaphore,
    periodic_lock,
    try_advisory_lock,
)
from tests.soak import work
from tests.soak.attempt import Attempt
from tests.soak.plan import DIRECT, KEPT, KEYS, POOLED, PROXIED, SEMAPHORES, SHORT
from tests.soak.work import Hand

AsyncKind = Callable[[Hand, str], Awaitable[None]]


async def wait(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        async with advisory_lock(key, using=route, timeout=hand.timeout(None)) as lock:
            await attempt.abody(lock)


async def try_(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        async with try_advisory_lock(key, using=route) as lock:
            if lock:
                await attempt.abody(lock)


async def shared(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key, limit=0) as attempt:
        async with advisory_lock(key, using=route, timeout=hand.timeout(None), shared=True) as lock:
            await attempt.abody(lock)


async def by_hand(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        lock = await advisory_lock(key, using=route, timeout=hand.timeout(None)).aacquire()
        try:
            await attempt.abody(lock)
        finally:
            await lock.arelease()


async def nested(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        async with advisory_lock(key, using=route, timeout=hand.timeout(None)) as lock:
            async with advisory_lock(key, using=route, timeout=0), try_advisory_lock(key, using=route) as inner:
                assert inner, "the owner was refused"
            await attempt.abody(lock)


async def several(hand: Hand, kind: str) -> None:
    route, keys = hand.route(), hand.chance.sample(KEYS, 2)
    with hand.attempt(kind, route, *keys) as attempt:
        async with advisory_lock_all(*keys, using=route, timeout=hand.timeout(None)) as lock:
            await attempt.abody(lock)


async def semaphore(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.chance.choice(list(SEMAPHORES))
    with hand.attempt(kind, route, key, limit=SEMAPHORES[key]) as attempt:
        async with advisory_semaphore(key, limit=SEMAPHORES[key], using=route, timeout=hand.timeout(None)) as lock:
            await attempt.abody(lock)


async def dedicated(hand: Hand, kind: str) -> None:
    route, key = hand.chance.choice((DIRECT, PROXIED, POOLED)), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        async with advisory_lock(key, using=route, timeout=hand.timeout(None), dedicated=True) as lock:
            await attempt.abody(lock)


@advisory_lock(lambda attempt, key: key, using=KEPT, timeout=0.5)
async def _decorated(attempt: Attempt, key: str) -> None:
    with attempt.inside(None):
        await asyncio.sleep(0.01)


async def decorated(hand: Hand, kind: str) -> None:
    key = hand.key()
    with hand.attempt(kind, KEPT, key) as attempt:
        await _decorated(attempt, key)


class _Job(AdvisoryLockJobMixin):
    lock_timeout = 0.3
    lock_using = POOLED

    def get_lock_key(self, attempt: Attempt, key: str) -> str:
        return key

    async def run(self, attempt: Attempt, key: str) -> None:
        with attempt.inside(None):
            await asyncio.sleep(0.01)


async def job(hand: Hand, kind: str) -> None:
    key = hand.key()
    with hand.attempt(kind, POOLED, key) as attempt:
        await _Job().run(attempt, key)


@periodic_lock("soak", min_interval=0.2, using=SHORT)
async def _periodic(attempt: Attempt) -> None:
    with attempt.inside(None):
        await asyncio.sleep(0.01)


async def periodic(hand: Hand, kind: str) -> None:
    with hand.attempt(kind, SHORT, "soak-periodic") as attempt:
        await _periodic(attempt)


async def transaction_beside(hand: Hand, kind: str) -> None:
    """Over the same session as the locks of the other tasks."""
    await sync_to_async(work.in_transaction_beside_tasks)(hand, kind)


def _named(*functions: AsyncKind) -> dict[str, AsyncKind]:
    return {f"async {function.__name__.strip('_').replace('_', ' ')}": function for function in functions}


KINDS = _named(
    *(wait, try_, shared, by_hand, nested, several, semaphore, dedicated, decorated, job, periodic),
    transaction_beside,
)


async def do_one(hand: Hand) -> None:
    """Do one piece of work in a task of its own, and cancel some at any moment, once or twice."""
    await sync_to_async(close_old_connections)()
    name = hand.chance.choice(list(KINDS))
    task = asyncio.ensure_future(KINDS[name](hand, name))
    if hand.chance.random() < 0.3:
        await asyncio.wait([task], timeout=hand.chance.choice((0.002, 0.02, 0.2)) * hand.chance.random())
        for _ in range(hand.chance.choice((1, 1, 2))):
            task.cancel()
            await asyncio.sleep(0)
    await asyncio.wait([task])
    with contextlib.suppress(asyncio.CancelledError):
        task.result()
