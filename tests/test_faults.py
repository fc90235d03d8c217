"""Faults of the server and of the link to it, each made for real, at each moment in the life of a lock."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
import pytest
from django.db import Error, OperationalError, connections, transaction
from django.test import override_settings

from django_advisory_lock import (
    LockHandle,
    LockLost,
    LockNotAcquired,
    LockTableFull,
    LockTimeout,
    LockUnsupported,
    advisory_lock,
    advisory_lock_all,
    lock_key,
    try_advisory_lock,
)
from tests.proxy import Proxy
from tests.server import FAST, IMMEDIATE, Server, Watcher, new_home, new_server
from tests.support import LIMIT, Thread, backend_pid, value, wait_until

FAULTY = "faulty"


class Site:
    """A server that is broken, the link that is cut, and a session beside it all that watches."""

    def __init__(self, server: Server, proxy: Proxy) -> None:
        self.server = server
        self.proxy = proxy
        self.watcher = Watcher(server)

    def mend(self) -> None:
        self.proxy.resume()
        self.server.start()
        self.server.wait_until_it_answers()
        self.watcher.close()
        self.watcher = Watcher(self.server)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with new_server(max_connections="40") as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.socket) as proxy:
        yield proxy


@pytest.fixture
def site(server: Server, proxy: Proxy, django_db_setup: None) -> Iterator[Site]:
    site = Site(server, proxy)
    with server.alias(FAULTY, **proxy.settings):
        yield site
        site.mend()
    wait_until(lambda: site.watcher.advisory_locks() == [], "no lock is left")
    site.watcher.close()


# -- The faults -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What happens while the victims stand still, and what happens once they went on and were caught in it."""

    name: str
    strike: Callable[[Site, list[int]], None]
    then: Callable[[Site], None] | None = None

    def __str__(self) -> str:
        return self.name


def terminate(site: Site, pids: list[int]) -> None:
    for pid in pids:
        site.watcher.kill(pid)


def cancel(site: Site, pids: list[int]) -> None:
    for pid in pids:
        site.watcher.cancel(pid)


def stall(site: Site, pids: list[int]) -> None:
    site.proxy.pause()


def cut_and_resume(site: Site) -> None:
    """Clients that come anew are let through, as atomic() connects again by itself before it ends."""
    site.proxy.cut()
    site.proxy.resume()


DEADLY = [
    Fault("terminate", terminate),
    Fault("kill_9", lambda site, pids: site.server.kill_backend(pids[0])),
    Fault("fast_stop", lambda site, pids: site.server.stop(FAST)),
    Fault("immediate_stop", lambda site, pids: site.server.stop(IMMEDIATE)),
    Fault("restart", lambda site, pids: site.server.restart()),
    Fault("power_cut", lambda site, pids: site.server.kill()),
    Fault("cut", lambda site, pids: site.proxy.cut()),
    Fault("stall_and_cut", stall, cut_and_resume),
]
NOTHING = Fault("nothing", lambda site, pids: None)
HARMLESS = [
    Fault("cancel", cancel),
    Fault("stall_and_resume", stall, lambda site: site.proxy.resume()),
]


# -- The victims ------------------------------------------------------------------------------------------------------

Context = Callable[..., "contextlib.AbstractContextManager[LockHandle]"]


Errors = list[BaseException]


@contextlib.contextmanager
def plain(name: str, errors: Errors, **options: Any) -> Iterator[LockHandle]:
    with noted(errors), advisory_lock(name, using=FAULTY, **options) as lock:
        yield lock


@contextlib.contextmanager
def by_hand(name: str, errors: Errors, **options: Any) -> Iterator[LockHandle]:
    with noted(errors):
        lock = advisory_lock(name, using=FAULTY, **options).acquire()
        try:
            yield lock
        finally:
            lock.release()


@contextlib.contextmanager
def transaction_lock(name: str, errors: Errors, **options: Any) -> Iterator[LockHandle]:
    with transaction.atomic(FAULTY), noted(errors), advisory_lock(name, using=FAULTY, **options) as lock:
        yield lock


@contextlib.contextmanager
def session_in_atomic(name: str, errors: Errors, **options: Any) -> Iterator[LockHandle]:
    with transaction.atomic(FAULTY), noted(errors):
        with advisory_lock(name, using=FAULTY, scope="session", **options) as lock:
            yield lock


@contextlib.contextmanager
def autocommit_off(name: str, errors: Errors, **options: Any) -> Iterator[LockHandle]:
    connection = connections[FAULTY]
    connection.set_autocommit(False)
    try:
        with noted(errors), advisory_lock(name, using=FAULTY, **options) as lock:
            yield lock
        connection.commit()
    finally:
        try:
            connection.rollback()
            connection.set_autocommit(True)
        except Error:
            connection.close()


@contextlib.contextmanager
def noted(errors: Errors) -> Iterator[None]:
    """Note how a block ends: where the server is down, Django's atomic() around it fails to reconnect and says that."""
    try:
        yield
    except BaseException as error:
        errors.append(error)
        raise


CONTEXTS: list[Context] = [plain, by_hand, transaction_lock, session_in_atomic, autocommit_off]


@dataclass(eq=False)
class Victim:
    """A thread that takes a lock in one context, and stands still at one moment until it is told to go on."""

    context: Context
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    moment: str = "body"
    raises: bool = False
    pid: int = 0
    result: str = "none"
    errors: Errors = field(default_factory=list)
    outer_error: BaseException | None = None
    lock: LockHandle | None = None

    def __post_init__(self) -> None:
        self.key = lock_key(self.name)
        self.ready, self.stands, self.may_go_on, self.is_over, self.is_mended = (threading.Event() for _ in range(5))
        self.thread = Thread(self.run)
        assert self.ready.wait(LIMIT)

    def run(self) -> None:
        self.pid = backend_pid(FAULTY)
        with connections[FAULTY].execute_wrapper(self.watch_statements):
            self.ready.set()
            try:
                with self.context(self.name, self.errors, **self.options) as self.lock:
                    if self.moment == "body":
                        self.stand()
                    if self.raises:
                        raise ZeroDivisionError
                    self.result = "kept"
            except Exception as error:
                self.outer_error = error
            self.is_over.set()
        assert self.is_mended.wait(LIMIT)
        self.use_the_alias()

    def use_the_alias(self) -> None:
        """After an error it has to work at once; where the session died later, Django reconnects as it ever does."""
        if self.outer_error is None:
            with contextlib.suppress(Error):
                backend_pid(FAULTY)
            connections[FAULTY].close_if_unusable_or_obsolete()
        assert backend_pid(FAULTY)

    def stand(self) -> None:
        if not self.stands.is_set():
            self.stands.set()
            assert self.may_go_on.wait(LIMIT)

    def watch_statements(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        kind = "unlock" if "_unlock" in sql else "take" if "advisory" in sql and "SELECT" in sql else "other"
        if self.moment == f"before {kind}":
            self.stand()
        result = execute(sql, params, many, context)
        if self.moment == f"after {kind}":
            self.stand()
        return result

    @property
    def error(self) -> BaseException | None:
        """How the block of the lock ended."""
        return self.errors[0] if self.errors else None

    @property
    def says(self) -> str:
        return f"{self.context.__name__}: {self.error!r}, outside {self.outer_error!r}"


def finish(site: Site, fault: Fault, victims: list[Victim]) -> None:
    """Let the victims run into what was done, and see that each of them can go on afterwards."""
    for victim in victims:
        victim.may_go_on.set()
    if fault.then is not None:
        over_or_stalled = lambda: sum(victim.is_over.is_set() for victim in victims) + site.proxy.stalled  # noqa: E731
        wait_until(lambda: over_or_stalled() >= len(victims), "caught in the fault")
        fault.then(site)
    wait_until(lambda: all(victim.is_over.is_set() for victim in victims), "all are over")
    site.mend()
    for victim in victims:
        victim.is_mended.set()
        victim.thread.result()
    for victim in victims:
        site.watcher.wait_until_free(victim.key)
        assert site.watcher.is_free(victim.key)


def stand_still(name: str, moment: str, contexts: list[Context] = CONTEXTS) -> list[Victim]:
    victims = [Victim(context, f"{name}-{context.__name__}", moment=moment) for context in contexts]
    wait_until(lambda: all(victim.stands.is_set() or victim.is_over.is_set() for victim in victims), "all stand still")
    return victims


LOSES: list[Context] = [plain, session_in_atomic, autocommit_off]


class TestWhileHolding:
    @pytest.mark.parametrize("fault", DEADLY, ids=str)
    def test_a_lock_that_was_lost(self, fault: Fault, name: str, site: Site) -> None:
        """Case 4, 32, 72: each learns it at the end of its block at the latest, and others were in meanwhile."""
        victims = stand_still(name, "body")
        fault.strike(site, [victim.pid for victim in victims])
        finish(site, fault, victims)
        for victim in victims:
            assert victim.result == "kept", victim.says
            if victim.context is transaction_lock:  # ends with its transaction, whose COMMIT fails
                assert isinstance(victim.outer_error, Error), victim.says
                continue
            assert isinstance(victim.error, LockLost), victim.says
            assert victim.lock is not None
            assert victim.lock.lost.is_set(), victim.says

    @pytest.mark.parametrize("fault", HARMLESS, ids=str)
    def test_what_does_no_harm(self, fault: Fault, name: str, site: Site) -> None:
        victims = stand_still(name, "body")
        fault.strike(site, [victim.pid for victim in victims])
        assert not any(site.watcher.take(victim.key) for victim in victims)
        finish(site, fault, victims)
        assert [victim.says for victim in victims if victim.outer_error] == []

    @pytest.mark.parametrize("fault", DEADLY, ids=str)
    def test_the_error_of_the_body_is_never_hidden(self, fault: Fault, name: str, site: Site) -> None:
        """Case 4, 8: it stays itself, and says in a note that the lock was lost."""
        victims = [Victim(context, f"{name}-{context.__name__}", raises=True) for context in LOSES]
        wait_until(lambda: all(victim.stands.is_set() for victim in victims), "all stand still")
        fault.strike(site, [victim.pid for victim in victims])
        finish(site, fault, victims)
        for victim in victims:
            assert isinstance(victim.error, ZeroDivisionError), victim.says
            assert victim.lock is not None
            assert victim.lock.lost.is_set(), victim.says
            if sys.version_info >= (3, 11):
                assert ["was lost" in note for note in victim.error.__notes__] == [True], victim.says


class TestWhileReleasing:
    @pytest.mark.parametrize("fault", DEADLY, ids=str)
    def test_before_the_unlock_it_is_a_loss(self, fault: Fault, name: str, site: Site) -> None:
        victims = stand_still(name, "before unlock", [plain, by_hand, session_in_atomic])
        fault.strike(site, [victim.pid for victim in victims])
        finish(site, fault, victims)
        for victim in victims:
            assert isinstance(victim.error, LockLost), victim.says
            assert victim.result == "kept"

    @pytest.mark.parametrize("fault", DEADLY, ids=str)
    def test_after_the_unlock_it_is_none(self, fault: Fault, name: str, site: Site) -> None:
        victims = stand_still(name, "after unlock", [plain, by_hand, session_in_atomic])
        fault.strike(site, [victim.pid for victim in victims])
        finish(site, fault, victims)
        for victim in victims:
            assert victim.error is None, victim.says
            if victim.context is session_in_atomic:  # whose COMMIT fails
                assert isinstance(victim.outer_error, Error), victim.says

    @pytest.mark.parametrize("moment", ["before unlock", "after unlock"])
    @pytest.mark.parametrize("fault", HARMLESS, ids=str)
    def test_what_does_no_harm(self, fault: Fault, moment: str, name: str, site: Site) -> None:
        victims = stand_still(name, moment, [plain, by_hand, session_in_atomic])
        fault.strike(site, [victim.pid for victim in victims])
        finish(site, fault, victims)
        assert [victim.says for victim in victims if victim.outer_error] == []


class TestAtTheTry:
    @pytest.mark.parametrize("fault", DEADLY, ids=str)
    def test_before_the_take_it_is_the_error_of_the_database(self, fault: Fault, name: str, site: Site) -> None:
        victims = stand_still(name, "before take")
        fault.strike(site, [victim.pid for victim in victims])
        finish(site, fault, victims)
        for victim in victims:
            assert isinstance(victim.error, OperationalError), victim.says
            assert victim.result == "none"

    @pytest.mark.parametrize("fault", DEADLY, ids=str)
    def test_after_the_take_it_is_a_loss(self, fault: Fault, name: str, site: Site) -> None:
        """The answer had come, so the body begins; its end tells."""
        victims = stand_still(name, "after take")
        fault.strike(site, [victim.pid for victim in victims])
        finish(site, fault, victims)
        for victim in victims:
            if victim.context in (plain, by_hand):
                assert isinstance(victim.error, LockLost), victim.says
            assert isinstance(victim.outer_error, (LockLost, Error)), victim.says

    @pytest.mark.parametrize("moment", ["before take", "after take"])
    @pytest.mark.parametrize("fault", HARMLESS, ids=str)
    def test_what_does_no_harm(self, fault: Fault, moment: str, name: str, site: Site) -> None:
        victims = stand_still(name, moment)
        fault.strike(site, [victim.pid for victim in victims])
        finish(site, fault, victims)
        assert [victim.says for victim in victims if victim.outer_error] == []


WAITS: dict[str, dict[str, Any]] = {"for_ever": {}, "with_timeout": {"timeout": 60}, "polling": {"poll_interval": 0.02}}


ways = pytest.mark.parametrize("way", WAITS)


def queue_up(way: str, name: str, site: Site) -> tuple[Watcher, list[Victim]]:
    """Let victims wait in all contexts for a rival's locks."""
    rival = Watcher(site.server)
    victims = []
    for context in CONTEXTS:
        assert rival.take(lock_key(f"{name}-{context.__name__}"))
        victims.append(Victim(context, f"{name}-{context.__name__}", WAITS[way], moment="never"))
    for victim in victims:
        if way == "polling":
            wait_until(partial(has_tried, site, victim.pid), "polling")
        else:
            site.watcher.wait_for_waiters(victim.key)
    return rival, victims


def has_tried(site: Site, pid: int) -> bool:
    return bool(site.watcher.one("SELECT query LIKE '%%pg_try%%' FROM pg_stat_activity WHERE pid = %s", [pid]))


class TestWhileWaiting:
    @ways
    @pytest.mark.parametrize("fault", DEADLY, ids=str)
    def test_a_session_that_dies(self, fault: Fault, way: str, name: str, site: Site) -> None:
        """Its error stays the database's; nobody is left in the queue."""
        rival, victims = queue_up(way, name, site)
        fault.strike(site, [victim.pid for victim in victims])
        if fault.then is not None:
            fault.then(site)
        wait_until(lambda: all(victim.is_over.is_set() for victim in victims), "all are over")
        rival.close()
        for victim in victims:
            assert isinstance(victim.error, OperationalError), victim.says
            assert victim.result == "none"
        finish(site, NOTHING, victims)

    @ways
    def test_a_cancelled_wait(self, way: str, name: str, site: Site) -> None:
        """Where the client polls there is nothing to cancel between two tries."""
        rival, victims = queue_up(way, name, site)
        for victim in victims:
            site.watcher.cancel(victim.pid)
        if way != "polling":
            wait_until(lambda: all(victim.is_over.is_set() for victim in victims), "all are over")
        rival.close()
        finish(site, NOTHING, victims)
        for victim in victims:
            assert type(victim.error) is LockNotAcquired or (victim.error is None and way == "polling"), victim.says

    @ways
    def test_a_link_that_stalls(self, way: str, name: str, site: Site) -> None:
        rival, victims = queue_up(way, name, site)
        site.proxy.pause()
        rival.close()
        if way != "polling":
            for victim in victims:
                wait_until(partial(site.watcher.holders, victim.key), "granted behind the stalled link")
        site.proxy.resume()
        finish(site, NOTHING, victims)
        assert [victim.says for victim in victims if victim.outer_error] == []

    @pytest.mark.parametrize("way", ["for_ever", "with_timeout"])
    def test_a_link_that_is_cut_after_the_grant(self, way: str, name: str, site: Site) -> None:
        """The server gave the lock, the answer never came: nobody believes to hold it, and it does not stay."""
        rival, victims = queue_up(way, name, site)
        site.proxy.pause()
        rival.close()
        for victim in victims:
            wait_until(partial(site.watcher.holders, victim.key), "granted behind the stalled link")
        cut_and_resume(site)
        finish(site, NOTHING, victims)
        for victim in victims:
            assert isinstance(victim.error, OperationalError), victim.says
            assert victim.result == "none"

    @ways
    def test_the_holder_dies_with_its_link(self, way: str, name: str, site: Site) -> None:
        """Who waits gets the lock, once, and the one who had it learns of that: never two who believe to hold it."""
        holder = stand_still(name, "body", [plain])[0]
        waiting = Victim(by_hand, holder.name, WAITS[way], moment="body")
        if way == "polling":
            wait_until(lambda: has_tried(site, waiting.pid), "polling")
        else:
            site.watcher.wait_for_waiters(holder.key)
        assert not waiting.stands.is_set()
        site.watcher.kill(holder.pid)
        assert waiting.stands.wait(LIMIT)
        finish(site, NOTHING, [holder, waiting])
        assert isinstance(holder.error, LockLost)
        assert waiting.error is None


class TestTimeoutsOfTheServer:
    """Settings that people, and hosters, give to a role. A canary with the same setting tells when the time was up."""

    @contextlib.contextmanager
    def setting(self, site: Site, setting: str, length: str = "300ms") -> Iterator[None]:
        site.watcher.raw.execute(f"ALTER ROLE CURRENT_USER SET {setting} = '{length}'")
        try:
            yield
        finally:
            site.watcher.raw.execute(f"ALTER ROLE CURRENT_USER RESET {setting}")

    def wait_for_canary(self, site: Site, begin: str = "") -> None:
        """Wait until a session that went quiet after all others was ended."""
        with contextlib.closing(site.server.connect()) as canary:
            if begin:
                canary.execute(begin)
            pid = canary.info.backend_pid
            gone = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s"
            wait_until(lambda: site.watcher.one(gone, [pid]), "end of the canary")

    @pytest.mark.parametrize(
        ("setting", "begin", "losers"),
        [
            ("idle_session_timeout", "", [plain, by_hand]),
            ("idle_in_transaction_session_timeout", "BEGIN", [transaction_lock, session_in_atomic, autocommit_off]),
        ],
    )
    def test_a_quiet_holder(self, setting: str, begin: str, losers: list[Context], name: str, site: Site) -> None:
        """Case 31: who lost it is told, who did not keeps it."""
        with self.setting(site, setting):
            victims = stand_still(name, "body")
            self.wait_for_canary(site, begin)
            for victim in victims:
                assert site.watcher.is_free(victim.key) == (victim.context in losers), victim.says
            finish(site, NOTHING, victims)
        for victim in victims:
            assert victim.result == "kept"
            if victim.context not in losers:
                assert victim.outer_error is None, victim.says
            elif victim.context is transaction_lock:
                assert isinstance(victim.outer_error, Error), victim.says
            else:
                assert isinstance(victim.error, LockLost), victim.says

    @pytest.mark.parametrize("setting", ["statement_timeout", "lock_timeout"])
    def test_a_holder_at_work(self, setting: str, name: str, site: Site) -> None:
        """The body's own statement is cut: its error stays, and the lock is freed as ever."""
        rival = Watcher(site.server)
        assert rival.take(lock_key(name))
        with self.setting(site, setting):
            for context in CONTEXTS:
                errors: Errors = []
                with pytest.raises(Error):
                    with context(f"{name}-{context.__name__}", errors):
                        value("SELECT pg_advisory_lock(%s)", lock_key(name).args, alias=FAULTY)
                assert isinstance(errors[0], OperationalError), errors
                assert not getattr(errors[0], "__notes__", []), errors
                assert site.watcher.is_free(lock_key(f"{name}-{context.__name__}"))
                assert backend_pid(FAULTY)
            connections[FAULTY].close()
        rival.close()

    @ways
    @pytest.mark.parametrize(
        "setting",
        ["statement_timeout", "lock_timeout", "idle_session_timeout", "idle_in_transaction_session_timeout"],
    )
    def test_those_who_wait(self, setting: str, way: str, name: str, site: Site) -> None:
        """`statement_timeout` ends a wait; the others are not about it, and in the server's queue nobody is idle."""
        # Long enough for all to be in the queue at once, on a busy machine too.
        with self.setting(site, setting, "1s" if setting == "statement_timeout" else "300ms"):
            rival, victims = queue_up(way, name, site)
            if "idle" in setting:
                self.wait_for_canary(site, "BEGIN" if "transaction" in setting else "")
            else:
                with contextlib.closing(site.server.connect()) as canary, pytest.raises(psycopg.OperationalError):
                    canary.execute("SELECT pg_advisory_lock(%s)", victims[0].key.args)
            ends = setting == "statement_timeout" and way != "polling"
            if ends:
                wait_until(lambda: all(victim.is_over.is_set() for victim in victims), "all are over")
            rival.close()
            finish(site, NOTHING, victims)
        for victim in victims:
            if ends:
                assert type(victim.error) is LockNotAcquired, victim.says
                assert not isinstance(victim.error, LockTimeout)
            else:
                assert victim.outer_error is None, victim.says


class TestFrozen:
    def test_a_session_that_stands_still(self, name: str, site: Site) -> None:
        """A server that swaps, or is stopped by its host: the others are served, and it goes on where it was."""
        victims = stand_still(name, "before unlock", [plain, by_hand])
        with site.server.frozen([victims[0].pid]):
            for victim in victims:
                victim.may_go_on.set()
            assert victims[1].is_over.wait(LIMIT)
            assert site.watcher.is_free(victims[1].key)
            assert not site.watcher.is_free(victims[0].key)
            assert not victims[0].is_over.is_set()
        finish(site, NOTHING, victims)
        assert [victim.says for victim in victims if victim.outer_error] == []

    def test_a_server_that_refuses_for_a_while(self, name: str, site: Site) -> None:
        """Django's own error, whichever way the lock is taken; then all works again."""
        site.proxy.refuse()
        for context in CONTEXTS:
            connections[FAULTY].close()
            with pytest.raises(OperationalError), context(name, []):
                pytest.fail("the body ran")
        assert site.proxy.refused
        site.proxy.resume()
        with plain(name, []):
            assert not site.watcher.is_free(lock_key(name))


# -- A full lock table ------------------------------------------------------------------------------------------------

SMALL = {
    "max_connections": "20",
    "max_locks_per_transaction": "10",
    "max_worker_processes": "1",
    "max_wal_senders": "0",
    "wal_level": "minimal",
    "autovacuum": "off",
}


@pytest.fixture(scope="module")
def small_server() -> Iterator[Server]:
    with new_server(**SMALL) as server:
        yield server


class Crowd(Watcher):
    """A session that fills the lock table of the server."""

    def fill(self) -> None:
        """Take locks until there is no room for one more."""
        many = "SELECT pg_advisory_lock(n) FROM generate_series(%s::int, %s::int) n"
        with pytest.raises(psycopg.errors.OutOfMemory):
            for start in range(0, 1_000_000, 50):
                self.raw.execute(many, [start, start + 49])
        with pytest.raises(psycopg.errors.OutOfMemory):
            for number in range(1_000_000):
                self.raw.execute("SELECT pg_advisory_lock(7, %s::int)", [number])

    def leave(self) -> None:
        self.raw.execute("SELECT pg_advisory_unlock_all()")


@pytest.fixture
def crowd(small_server: Server, django_db_setup: None) -> Iterator[Crowd]:
    crowd = Crowd(small_server)
    with contextlib.closing(crowd), small_server.alias("small"), small_server.alias("late"):
        backend_pid("small")
        yield crowd
        crowd.leave()
        wait_until(lambda: crowd.advisory_locks() == [], "no lock is left")


class TestFullLockTable:
    """The error of the server: 53200, and a hint at the setting."""

    takes = pytest.mark.parametrize(
        "take",
        [
            lambda *key, **options: advisory_lock(*key, using="small", **options).acquire(),
            lambda *key, **options: advisory_lock(*key, using="small", timeout=5, **options).acquire(),
            lambda *key, **options: advisory_lock(*key, using="small", poll_interval=0.01, **options).acquire(),
            lambda *key, **options: try_advisory_lock(*key, using="small", **options).acquire(),
        ],
        ids=["waits", "waits_with_timeout", "polls", "tries"],
    )

    @takes
    def test_outside_a_transaction(self, take: Callable[..., LockHandle], name: str, crowd: Crowd) -> None:
        crowd.fill()
        with pytest.raises(LockTableFull, match="max_locks_per_transaction"):
            take(name)
        crowd.leave()
        with advisory_lock(name, using="small") as lock:
            assert lock.is_held()

    @takes
    @pytest.mark.parametrize("scope", ["auto", "session"])
    def test_inside_a_transaction(self, scope: Any, take: Callable[..., LockHandle], name: str, crowd: Crowd) -> None:
        crowd.fill()
        with transaction.atomic("small"):
            with pytest.raises(LockTableFull, match="max_locks_per_transaction"):
                take(name, scope=scope)
            transaction.set_rollback(True, using="small")
        crowd.leave()
        with transaction.atomic("small"), advisory_lock(name, using="small", scope=scope) as lock:
            assert lock.is_held()

    @takes
    def test_what_was_held_before_stays(self, take: Callable[..., LockHandle], name: str, crowd: Crowd) -> None:
        with advisory_lock(name, using="small"):
            pid = backend_pid("small")
            crowd.fill()
            with pytest.raises(LockTableFull):
                take(name, "another")
            assert backend_pid("small") == pid, "the session was given up, and the lock with it"
            crowd.leave()
        assert not connections["small"].connection.closed

    def test_a_nested_lock_needs_no_room(self, name: str, crowd: Crowd) -> None:
        with advisory_lock(name, using="small"):
            crowd.fill()
            with advisory_lock(name, using="small") as inner:
                assert inner
            crowd.leave()

    @pytest.mark.parametrize("timeout", [0, 0.05])
    def test_busy_in_a_full_table(self, timeout: float, name: str, crowd: Crowd, small_server: Server) -> None:
        """Who holds it may be out of reach for the question; the session, and what it holds besides, stays."""
        with contextlib.closing(Watcher(small_server)) as holder, advisory_lock(name, "mine", using="small"):
            assert holder.take(lock_key(name))
            pid = backend_pid("small")
            crowd.fill()
            with pytest.raises((LockTimeout, LockTableFull)):
                advisory_lock(name, using="small", timeout=timeout).acquire()
            assert backend_pid("small") == pid
            crowd.leave()
            assert not try_advisory_lock(name, using="small").acquire()

    def test_a_new_connection_fails_as_django_says(self, name: str, crowd: Crowd) -> None:
        crowd.fill()
        with pytest.raises(OperationalError, match="shared memory"):
            advisory_lock(name, using="late").acquire()
        crowd.leave()
        with advisory_lock(name, using="late"):
            pass


# -- Servers that answer, and exclude nobody --------------------------------------------------------------------------


class TestStubs:
    """Case 41: a database whose functions are there, and do nothing, as some that speak PostgreSQL's protocol have."""

    @pytest.fixture
    def stub(self, server: Server, django_db_setup: None) -> Iterator[str]:
        with server.connect() as raw:
            raw.execute("CREATE DATABASE stub")
        with server.connect(dbname="stub") as raw:
            raw.execute("CREATE SCHEMA stub")
            for function, body in {
                "pg_try_advisory_lock(bigint) RETURNS boolean": "RETURN true",
                "pg_advisory_lock(bigint) RETURNS void": "NULL",
                "pg_advisory_unlock(bigint) RETURNS boolean": "RETURN true",
            }.items():
                raw.execute(f"CREATE FUNCTION stub.{function} LANGUAGE plpgsql AS 'BEGIN {body}; END'")
            raw.execute("ALTER DATABASE stub SET search_path = stub, pg_catalog, public")
        with server.alias("stub", NAME="stub"):
            yield "stub"
        with server.connect() as raw:
            raw.execute("DROP DATABASE stub")

    @pytest.mark.parametrize("timeout", [None, 0, 5])
    def test_the_question_tells(self, timeout: float | None, name: str, stub: str) -> None:
        with advisory_lock(name, using=stub, timeout=timeout) as lock:
            assert lock.acquired
            assert not lock.is_held()
            with pytest.raises(LockLost):
                lock.check()
            with advisory_lock(name, using=stub, timeout=0):
                pass  # nothing excludes: this is what check() is for

    def change(self, server: Server, *commands: str) -> None:
        with server.connect(dbname="stub") as raw:
            for command in commands:
                raw.execute(command)

    @pytest.mark.parametrize("answer", ["false", "NULL"])
    def test_an_unlock_that_does_not_say_true_is_a_loss(
        self, answer: str, name: str, server: Server, stub: str
    ) -> None:
        self.change(
            server,
            "CREATE OR REPLACE FUNCTION stub.pg_advisory_unlock(bigint) RETURNS boolean LANGUAGE plpgsql"
            f" AS 'BEGIN RETURN {answer}; END'",
        )
        for lock in (advisory_lock(name, using=stub), advisory_lock_all(name, f"{name}-2", using=stub)):
            with pytest.raises(LockLost, match="does not hold it"), lock:
                pass

    @pytest.mark.parametrize("timeout", [None, 5])
    def test_a_wait_that_is_answered_with_null_is_no_lock(
        self, timeout: float | None, name: str, server: Server, stub: str
    ) -> None:
        """Case 29: nothing says that it was taken, so no body may run."""
        self.change(
            server,
            "DROP FUNCTION stub.pg_advisory_lock(bigint)",
            # A function of this language that returns void answers NULL.
            "CREATE FUNCTION stub.pg_advisory_lock(bigint) RETURNS void LANGUAGE sql AS ''",
            "CREATE OR REPLACE FUNCTION stub.pg_try_advisory_lock(bigint) RETURNS bool LANGUAGE sql AS 'SELECT false'",
        )
        self.expect_nothing(name, stub, timeout)
        with override_settings(ADVISORY_LOCK_SESSION_POOLER=[stub]):
            self.expect_nothing(name, stub, timeout)

    def expect_nothing(self, name: str, stub: str, timeout: float | None) -> None:
        several = advisory_lock_all(name, f"{name}-2", using=stub, timeout=timeout)
        for lock in (advisory_lock(name, using=stub, timeout=timeout), several):
            with pytest.raises((LockNotAcquired, LockUnsupported)), lock:
                pytest.fail("the body ran without its lock")


class TestStandby:
    """Case 36: a server that follows another one has locks of its own."""

    @pytest.fixture
    def primary_and_standby(self, django_db_setup: None) -> Iterator[tuple[Server, Server]]:
        with new_home() as (account, home, bindir), contextlib.ExitStack() as stack:
            (home / "copy").mkdir()
            primary = Server(account, home, bindir, max_connections="20")
            stack.callback(primary.wipe)
            primary.start()
            primary.stop()
            where = " ".join(f"{name}={primary.parameters[name]}" for name in ("host", "port", "user"))
            standby = primary.copy(home / "copy", primary_conninfo=where)
            stack.callback(standby.wipe)
            standby.mark_as_standby()
            primary.start()
            standby.start()
            yield primary, standby

    def test_it_excludes_those_on_the_standby_alone(
        self, primary_and_standby: tuple[Server, Server], name: str
    ) -> None:
        primary, standby = primary_and_standby
        with standby.alias("standby"), primary.alias("primary"):
            assert value("SELECT pg_is_in_recovery()", alias="standby")
            with advisory_lock(name, using="standby", timeout=5) as lock:
                assert lock.is_held()
                watchers = [Watcher(server) for server in (primary, standby)]
                assert [watcher.is_free(lock_key(name)) for watcher in watchers] == [True, False]
                with advisory_lock(name, using="primary", timeout=0) as another:
                    assert another.is_held()
            with transaction.atomic("standby"), advisory_lock(name, using="standby") as lock:
                assert lock.is_held()
            with transaction.atomic("standby"), advisory_lock(name, using="standby", scope="session"):
                pass
            for watcher in watchers:
                assert watcher.advisory_locks() == []
                watcher.close()
