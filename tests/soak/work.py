"""The kinds of work of a thread: every way to take a lock, each with one attempt that the witness sees."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

from django.db import close_old_connections, transaction

from django_advisory_lock import (
    advisory_lock,
    advisory_lock_all,
    advisory_semaphore,
    try_advisory_lock,
    try_advisory_semaphore,
)
from tests.soak.attempt import Attempt
from tests.soak.plan import (
    BY_SESSION,
    BY_TRANSACTION,
    DIRECT,
    KEYS,
    POOLED,
    PROXIED,
    ROUTES,
    SEMAPHORES,
)
from tests.soak.witness import Witness


class Hand:
    """What one thread or task works with."""

    def __init__(self, witness: Witness, name: str) -> None:
        self.witness = witness
        self.chance = random.Random(f"{witness.plan.seed} {witness.worker} {name}")

    def attempt(self, kind: str, route: str, *keys: str, limit: int = 1) -> Attempt:
        return Attempt(self.witness, self.chance, kind, route, keys, limit)

    def key(self) -> str:
        return self.chance.choice(KEYS)

    def route(self, *more: str) -> str:
        return self.chance.choice(ROUTES + more)

    def timeout(self, *more: None) -> float | None:
        return self.chance.choice((0, 0.05, 0.3, 1.0, *more))

    def work(self, kinds: dict[str, Kind]) -> None:
        """Do one piece of work, as a request or a task of a queue does it."""
        close_old_connections()
        name = self.chance.choice(list(kinds))
        kinds[name](self, name)
        close_old_connections()


Kind = Callable[[Hand, str], None]


def wait(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        with advisory_lock(key, using=route, timeout=hand.timeout(None)) as lock:
            attempt.body(lock)


def try_(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        with try_advisory_lock(key, using=route) as lock:
            if lock:
                attempt.body(lock)


def shared(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key, limit=0) as attempt:
        with advisory_lock(key, using=route, timeout=hand.timeout(None), shared=True) as lock:
            attempt.body(lock)


def poll(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        with advisory_lock(key, using=route, timeout=hand.timeout(None), poll_interval=0.02) as lock:
            attempt.body(lock)


def by_hand(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        lock = advisory_lock(key, using=route, timeout=hand.timeout(None)).acquire()
        try:
            attempt.body(lock)
        finally:
            lock.release()


def nested(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        with advisory_lock(key, using=route, timeout=hand.timeout(None)) as lock:
            with advisory_lock(key, using=route, timeout=0), try_advisory_lock(key, using=route) as inner:
                assert inner, "the owner was refused"
            attempt.body(lock)


def in_transaction(hand: Hand, kind: str) -> None:
    _in_transaction(hand, kind, hand.timeout(None))


def in_transaction_beside_tasks(hand: Hand, kind: str) -> None:
    """In the thread of all tasks: one that holds the key on another alias needs the thread to release it."""
    _in_transaction(hand, kind, hand.timeout())


def _in_transaction(hand: Hand, kind: str, timeout: float | None) -> None:
    route, key = hand.route(BY_TRANSACTION, BY_TRANSACTION), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        with transaction.atomic(route), advisory_lock(key, using=route, timeout=timeout) as lock:
            attempt.body(lock)


def session_in_transaction(hand: Hand, kind: str) -> None:
    """The lock ends before the transaction, whose own end is another matter."""
    route, key = hand.route(), hand.key()
    with hand.attempt(f"{kind}: around", route), transaction.atomic(route):
        with hand.attempt(kind, route, key) as attempt:
            with advisory_lock(key, using=route, timeout=hand.timeout(None), scope="session") as lock:
                attempt.body(lock)


def several(hand: Hand, kind: str) -> None:
    route = hand.route()
    keys = hand.chance.sample(KEYS, hand.chance.choice((2, 3)))
    inside = hand.chance.random() < 0.3
    with hand.attempt(kind, route, *keys) as attempt:
        with transaction.atomic(route) if inside else contextlib.nullcontext():
            with advisory_lock_all(*keys, using=route, timeout=hand.timeout(None)) as lock:
                attempt.body(lock)


def semaphore(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.chance.choice(list(SEMAPHORES))
    with hand.attempt(kind, route, key, limit=SEMAPHORES[key]) as attempt:
        with advisory_semaphore(key, limit=SEMAPHORES[key], using=route, timeout=hand.timeout(None)) as lock:
            attempt.body(lock)


def try_semaphore(hand: Hand, kind: str) -> None:
    route, key = hand.route(), hand.chance.choice(list(SEMAPHORES))
    with hand.attempt(kind, route, key, limit=SEMAPHORES[key]) as attempt:
        with try_advisory_semaphore(key, limit=SEMAPHORES[key], using=route) as lock:
            if lock:
                attempt.body(lock)


def dedicated(hand: Hand, kind: str) -> None:
    route, key = hand.chance.choice((DIRECT, PROXIED, POOLED, BY_SESSION)), hand.key()
    with hand.attempt(kind, route, key) as attempt:
        with advisory_lock(key, using=route, timeout=hand.timeout(None), dedicated=True) as lock:
            attempt.body(lock)


def refused(hand: Hand, kind: str) -> None:
    """A session lock behind a pooler in transaction mode."""
    key = hand.key()
    with hand.attempt(kind, BY_TRANSACTION, key) as attempt:
        with advisory_lock(key, using=BY_TRANSACTION, timeout=hand.timeout(None)) as lock:
            attempt.body(lock)


def named(*functions: Kind) -> dict[str, Kind]:
    return {function.__name__.strip("_").replace("_", " "): function for function in functions}


KINDS = named(
    *(wait, try_, shared, poll, by_hand, nested, in_transaction, session_in_transaction, several, semaphore),
    *(try_semaphore, dedicated, refused),
)
