"""Many at once: a counter that is read, and written a moment later, is right under a lock, and wrong without one."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.db import Error, connections, transaction

from django_advisory_lock import LockLost, LockTimeout, advisory_lock, lock_key, try_advisory_lock
from tests.support import LIMIT, OtherSession, Thread, backend_pid, extra_alias, output, spawn, value, wait_until
from tests.testapp.models import Account

Turn = Callable[[], None]
PAUSE = 0.001  # seconds between the reading and the writing of a number, in which another one may come


class Counter:
    """A number in the database."""

    def __init__(self, name: str, pk: int | None = None) -> None:
        self.name = name
        self.pk = Account.objects.create(name=name).pk if pk is None else pk

    def add(self, alias: str = "default") -> int:
        number = 1 + int(value("SELECT balance FROM testapp_account WHERE id = %s", [self.pk], alias))
        time.sleep(PAUSE)
        with connections[alias].cursor() as cursor:
            cursor.execute("UPDATE testapp_account SET balance = %s WHERE id = %s", [number, self.pk])
        return number

    @property
    def total(self) -> int:
        return int(value("SELECT balance FROM testapp_account WHERE id = %s", [self.pk]))


@pytest.fixture
def counter(name: str, other: OtherSession) -> Iterator[Counter]:
    made = Counter(name)
    yield made
    Account.objects.filter(name=name).delete()


def race(*workers: Turn, turns: int = 10) -> None:
    """Let threads begin at once and take their turns. Each one gets all of them in time, or this fails."""
    start = threading.Barrier(len(workers))

    def run(turn: Turn) -> None:
        start.wait(LIMIT)
        for _ in range(turns):
            turn()

    threads = [Thread(partial(run, worker)) for worker in workers]
    for thread in threads:
        thread.result()


def collides(counter: Counter, *workers: Turn, turns: int = 10) -> bool:
    """Whether the same without a lock goes wrong: the negative control. It is given a few chances on a busy machine."""
    for _ in range(5):
        before = counter.total
        race(*workers, turns=turns)
        if counter.total < before + turns * len(workers):
            return True
    return False


# One turn, with a lock of each kind and without


def under_session_lock(counter: Counter, alias: str = "default", **options: Any) -> None:
    with advisory_lock(counter.name, using=alias, **options):
        counter.add(alias)


def under_transaction_lock(counter: Counter, alias: str = "default", **options: Any) -> None:
    with transaction.atomic(using=alias), advisory_lock(counter.name, using=alias, **options):
        counter.add(alias)


def session_lock_around_a_transaction(counter: Counter, alias: str = "default") -> None:
    with advisory_lock(counter.name, using=alias), transaction.atomic(using=alias):
        counter.add(alias)


def nested(counter: Counter, alias: str = "default") -> None:
    with advisory_lock(counter.name, using=alias), advisory_lock(counter.name, "inner", using=alias):
        with advisory_lock(counter.name, using=alias, timeout=LIMIT), transaction.atomic(using=alias):
            with advisory_lock(counter.name, using=alias):
                counter.add(alias)


def by_trying(counter: Counter, alias: str = "default") -> None:
    while True:
        with try_advisory_lock(counter.name, using=alias) as lock:
            if lock:
                counter.add(alias)
                return
        time.sleep(random.uniform(0, 0.004))


def by_trying_in_transactions(counter: Counter) -> None:
    while True:
        with transaction.atomic(), try_advisory_lock(counter.name) as lock:
            if lock:
                counter.add()
                return
        time.sleep(random.uniform(0, 0.004))


def by_hand(counter: Counter) -> None:
    lock = advisory_lock(counter.name).acquire()
    try:
        counter.add()
    finally:
        lock.release()


@advisory_lock(lambda counter: counter.name)
def decorated(counter: Counter) -> None:
    counter.add()


@transaction.atomic
@advisory_lock(lambda counter: counter.name, timeout=LIMIT)
def decorated_in_a_transaction(counter: Counter) -> None:
    counter.add()


def unlocked(counter: Counter, alias: str = "default") -> None:
    counter.add(alias)


def unlocked_in_a_transaction(counter: Counter, alias: str = "default") -> None:
    with transaction.atomic(using=alias):
        counter.add(alias)


def giving_back(turn: Callable[[Counter, str], None], counter: Counter, alias: str) -> None:
    """Take a turn as a request does that gives its connection back to the pool at its end."""
    try:
        turn(counter, alias)
    finally:
        connections[alias].close()


WITH_ALIAS = [
    under_session_lock,
    under_transaction_lock,
    session_lock_around_a_transaction,
    nested,
]
ALL = [*WITH_ALIAS, by_trying, by_trying_in_transactions, by_hand, decorated, decorated_in_a_transaction]


class TestThreads:
    @pytest.mark.parametrize("turn", ALL)
    def test_eight_of_a_kind(self, turn: Callable[[Counter], None], counter: Counter, other: OtherSession) -> None:
        race(*[partial(turn, counter)] * 8)
        assert counter.total == 80

    @pytest.mark.parametrize("turn", [unlocked, unlocked_in_a_transaction])
    def test_without_a_lock(self, turn: Callable[[Counter], None], counter: Counter, other: OtherSession) -> None:
        assert collides(counter, *[partial(turn, counter)] * 8)

    def test_all_kinds_at_once(self, counter: Counter, other: OtherSession) -> None:
        waits: list[dict[str, Any]] = [{"timeout": LIMIT}, {"poll_interval": 0.003}]
        waiters = [
            partial(kind, counter, **options)
            for kind in (under_session_lock, under_transaction_lock)
            for options in (*waits, {**waits[0], **waits[1]})
        ]
        workers = [*(partial(turn, counter) for turn in ALL), *waiters]
        race(*workers, turns=6)
        assert counter.total == 6 * len(workers)

    @pytest.mark.parametrize("alias", ["same", "binding", "prepared", "persistent", "healthy"])
    def test_another_alias_beside_the_default_one(self, alias: str, counter: Counter, other: OtherSession) -> None:
        """Case 53: two aliases of one database exclude each other."""
        race(*(partial(turn, counter, using) for turn in WITH_ALIAS for using in ("default", alias)))
        assert counter.total == 80

    @pytest.mark.filterwarnings("ignore:The lock .* was taken inside a .* transaction:RuntimeWarning")
    def test_a_lock_taken_before_a_serializable_transaction(self, counter: Counter, other: OtherSession) -> None:
        """It is what README says to do there: no update fails, and none is lost."""
        race(*[partial(session_lock_around_a_transaction, counter, "serializable")] * 6)
        assert counter.total == 60

    def test_waits_that_are_given_up(self, counter: Counter, other: OtherSession) -> None:
        """Short timeouts, of which the server may grant the lock too late: each is a count or a LockTimeout."""
        done = itertools.count()

        def turn(kind: Callable[..., None], **options: Any) -> None:
            with contextlib.suppress(LockTimeout):
                kind(counter, timeout=0.002, **options)
                next(done)

        race(*[partial(turn, under_session_lock)] * 4, *[partial(turn, under_transaction_lock)] * 4, turns=25)
        assert counter.total == next(done)


class TestPools:
    @pytest.mark.parametrize("size", [1, 4])
    def test_more_threads_than_connections(self, size: int, counter: Counter, other: OtherSession) -> None:
        """Case 2, 33: a session goes from thread to thread, and no lock with it."""
        options = {"min_size": size, "max_size": size, "timeout": LIMIT}
        with extra_alias(f"pool-{counter.name}", {"pool": options}) as alias:
            race(*(partial(giving_back, turn, counter, alias) for turn in WITH_ALIAS for _ in range(2)))
            assert counter.total == 80
            if size > 1:
                assert collides(counter, *[partial(giving_back, unlocked, counter, alias)] * 8)


class TestProcesses:
    CODE = """
import os, signal, sys
from django.db import connections
from tests import test_contention
name, pk, count, *turns = sys.argv[1:]
counter = test_contention.Counter(name, int(pk))
ready, go = os.pipe(), os.pipe()
children = []
for turn in turns:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.close(go[1])
        connections["default"].ensure_connection()
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        for _ in range(int(count)):
            getattr(test_contention, turn)(counter)
        sys.exit()
    children.append(child)
for _ in children:
    os.read(ready[0], 1)
os.close(go[1])  # all of them begin
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""

    def race(self, counter: Counter, *turns: str, count: int = 20) -> None:
        output(spawn(self.CODE, counter.name, str(counter.pk), str(count), *turns))

    @pytest.mark.parametrize("turn", ["under_session_lock", "under_transaction_lock"])
    def test_four_of_a_kind(self, turn: str, counter: Counter, other: OtherSession) -> None:
        self.race(counter, turn, turn, turn, turn)
        assert counter.total == 80

    def test_all_kinds_at_once_beside_threads(self, counter: Counter, other: OtherSession) -> None:
        beside = Thread(lambda: race(*[partial(decorated, counter)] * 4))
        self.race(counter, "under_session_lock", "under_transaction_lock", "by_trying", "nested")
        beside.result()
        assert counter.total == 80 + 40

    def test_without_a_lock(self, counter: Counter, other: OtherSession) -> None:
        for _ in range(3):
            before = counter.total
            self.race(counter, *["unlocked"] * 4, count=40)
            if counter.total < before + 160:
                return
        pytest.fail("four processes never collided")


class TestReadersAndWriters:
    """Two numbers that are equal whenever no writer is at work."""

    @pytest.fixture(autouse=True)
    def set_up(self, counter: Counter) -> None:
        self.pks = [counter.pk, Counter(counter.name).pk]
        self.mutex = threading.Lock()
        self.inside = self.most = self.torn = 0

    def write(self, lock: Any) -> None:
        with lock:
            for pk in self.pks:
                value("UPDATE testapp_account SET balance = balance + 1 WHERE id = %s RETURNING id", [pk])
                time.sleep(PAUSE)

    def read(self, lock: Any) -> None:
        with lock:
            with self.mutex:
                self.inside += 1
                self.most = max(self.most, self.inside)
            first, second = (value("SELECT balance FROM testapp_account WHERE id = %s", [pk]) for pk in self.pks)
            time.sleep(PAUSE)
            with self.mutex:
                self.inside -= 1
                self.torn += first != second

    @pytest.mark.parametrize("options", [{}, {"timeout": LIMIT}, {"poll_interval": 0.003}], ids=str)
    def test_shared_and_exclusive(self, options: dict[str, Any], counter: Counter, other: OtherSession) -> None:
        readers = [partial(self.read, advisory_lock(counter.name, shared=True, **options))] * 6
        writers = [partial(self.write, advisory_lock(counter.name))] * 2
        race(*readers, *writers)
        assert self.torn == 0
        assert self.most > 1, "the readers kept each other out"
        assert counter.total == 20

    def test_without_a_lock(self, counter: Counter, other: OtherSession) -> None:
        free = contextlib.nullcontext()
        for _ in range(5):
            race(*[partial(self.read, free)] * 6, *[partial(self.write, free)] * 2)
        assert self.torn > 0


class TestLosses:
    """Sessions that are killed while they hold: each holder is told, and nobody writes under a lock that is lost."""

    def test_holders_that_are_killed_before_or_after_they_write(self, counter: Counter, other: OtherSession) -> None:
        numbers, written = itertools.count(), []

        def turn() -> None:
            number = next(numbers)
            if number % 3 == 0:
                with pytest.raises(LockLost), advisory_lock(counter.name) as lock:
                    written.append(counter.add())
                    other.kill(backend_pid())
            elif number % 3 == 1:
                with pytest.raises(Error), advisory_lock(counter.name) as lock:
                    other.kill(backend_pid())
                    counter.add()
                assert lock.lost.is_set()
            else:
                with advisory_lock(counter.name) as lock:
                    written.append(counter.add())
                assert not lock.lost.is_set()

        race(*[turn] * 6, turns=6)
        assert written == list(range(1, 25))
        assert counter.total == 24

    def test_transactions_that_are_killed(self, counter: Counter, other: OtherSession) -> None:
        """What they wrote under the lock is gone with the lock."""
        numbers, kept = itertools.count(), itertools.count()

        def turn() -> None:
            if next(numbers) % 2:
                with pytest.raises((Error, LockLost)), transaction.atomic(), advisory_lock(counter.name):
                    counter.add()
                    other.kill(backend_pid())
            else:
                under_transaction_lock(counter)
                next(kept)

        race(*[turn] * 6, turns=6)
        assert counter.total == next(kept) == 18

    @pytest.mark.parametrize("turn_under", [advisory_lock, try_advisory_lock])
    def test_a_killer_at_random(self, turn_under: Any, counter: Counter, other: OtherSession) -> None:
        """Whoever it hits, in whatever moment: no number is written twice, and every thread goes on."""
        key, over = lock_key(counter.name), threading.Event()
        written: list[int] = []
        killed: list[int] = []
        in_doubt = itertools.count()

        def kill() -> None:
            session = OtherSession()
            with contextlib.closing(session):
                while not over.is_set():
                    with contextlib.suppress(TypeError):  # nobody holds it just now
                        killed.append(session.holder(key))
                        session.kill(killed[-1])
                    over.wait(0.02)

        def turn() -> None:
            before = len(written)
            while len(written) == before:
                started = False
                try:
                    with turn_under(counter.name) as lock:
                        if lock:
                            started = True
                            number = counter.add()
                            started = False
                            written.append(number)
                        else:
                            time.sleep(PAUSE)
                except (LockLost, Error):
                    if started:
                        next(in_doubt)  # killed around its write, which may be there or not

        killer = Thread(kill)
        try:
            race(*[turn] * 6, turns=8)
        finally:
            over.set()
            killer.result()
        assert killed
        assert len(set(written)) == len(written)
        assert len(written) <= counter.total <= len(written) + next(in_doubt)
        wait_until(lambda: other.holders(key) == 0, "free")


class TestPolling:
    def test_twenty_pollers(self, name: str, other: OtherSession) -> None:
        """Case 25: each tries once an interval, more or less for the jitter, and once at its deadline."""
        other.take(lock_key(name))
        sent = itertools.count()

        def count(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            if "pg_try" in sql:
                next(sent)
            return execute(sql, params, many, context)

        def poll() -> float:
            start = time.monotonic()
            with connections["default"].execute_wrapper(count), pytest.raises(LockTimeout):
                advisory_lock(name, timeout=0.8, poll_interval=0.1).acquire()
            return time.monotonic() - start

        threads = [Thread(poll) for _ in range(20)]
        times = [thread.result() for thread in threads]
        assert min(times) >= 0.8
        # Half an interval is the shortest pause.
        assert 20 * 2 <= next(sent) <= sum(elapsed / 0.05 + 2 for elapsed in times)

    def test_a_poller_among_waiters_that_keep_arriving(self, counter: Counter, other: OtherSession) -> None:
        """Case 25: the queue goes first. A deadline holds all the same, and the lock comes once the queue is empty."""
        over = threading.Event()

        def keep_arriving() -> None:
            while not over.is_set():
                under_session_lock(counter)

        def poll() -> None:
            with contextlib.suppress(LockTimeout):
                under_session_lock(counter, timeout=0.3, poll_interval=0.01)

        waiters = [Thread(keep_arriving) for _ in range(4)]
        try:
            polling = Thread(partial(under_session_lock, counter, poll_interval=0.01))
            Thread(poll).result()
        finally:
            over.set()
        for thread in (*waiters, polling):
            thread.result()
        assert other.is_free(lock_key(counter.name))
