"""Ending a session: the one that was meant, and no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from django.db import ProgrammingError, connection, connections, transaction
from django.test import override_settings

from django_advisory_lock import LockUnsupported, advisory_lock, lock_key
from django_advisory_lock.ending import Outcome, end_session, own_sessions, start_of
from django_advisory_lock.inspection import all_locks, holders_of
from tests.server import Watcher, new_server
from tests.support import OtherSession, Thread, backend_pid, extra_alias, value


def lives(session: OtherSession) -> bool:
    """Whether a session answers."""
    return bool(session.one("SELECT true"))


def start(session: OtherSession, name: str, alias: str = "default") -> int:
    """Return when a session, which holds a key, began."""
    (found,) = [start_of(lock) for lock in holders_of(name, using=alias) if lock.pid == session.pid]
    assert found is not None
    return found


@pytest.fixture
def victim(other: OtherSession) -> Iterator[OtherSession]:
    session = OtherSession()
    yield session
    session.close()


class TestEnding:
    def test_who_waits_is_next(self, name: str, victim: OtherSession, other: OtherSession) -> None:
        victim.take(lock_key(name))
        waiting = Thread(lambda: advisory_lock(name).acquire().release())
        other.wait_for_waiters(lock_key(name))
        assert end_session(victim.pid, start(victim, name), "default", timeout=5) is Outcome.ENDED
        waiting.result()
        assert other.is_free(lock_key(name))

    def test_who_waits_is_ended(self, name: str, victim: OtherSession, other: OtherSession) -> None:
        other.take(lock_key(name))
        waiting = Thread(lambda: victim.wait(lock_key(name)))
        other.wait_for_waiters(lock_key(name))
        (lock,) = [lock for lock in all_locks() if not lock.granted]
        began = start_of(lock)
        assert began is not None
        assert end_session(victim.pid, began, "default", timeout=5) is Outcome.ENDED
        with pytest.raises(Exception, match="terminating connection"):
            waiting.result()
        assert other.waiters(lock_key(name)) == 0

    @pytest.mark.parametrize("change", [-1, 1, 10**6])
    def test_another_session_with_its_pid(self, change: int, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        assert end_session(victim.pid, start(victim, name) + change, "default", timeout=5) is Outcome.GONE
        assert lives(victim)

    def test_it_has_no_lock_any_more(self, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        began = start(victim, name)
        victim.drop(lock_key(name))
        assert end_session(victim.pid, began, "default", timeout=5) is Outcome.GONE
        assert lives(victim)

    def test_it_is_gone(self, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        pid, began = victim.pid, start(victim, name)
        victim.close()
        assert end_session(pid, began, "default", timeout=5) is Outcome.GONE

    def test_it_locks_in_another_database(self, name: str, other: OtherSession) -> None:
        with contextlib.closing(OtherSession("other")) as victim:
            victim.take(lock_key(name))
            assert end_session(victim.pid, start(victim, name, "other"), "default", timeout=5) is Outcome.GONE
            assert lives(victim)
            assert end_session(victim.pid, start(victim, name, "other"), "other", timeout=5) is Outcome.ENDED

    def test_the_session_that_asks(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name):
            (lock,) = holders_of(name)
            began = start_of(lock)
            assert began is not None
            assert end_session(backend_pid(), began, "default", timeout=5) is Outcome.GONE
            assert value("SELECT 1") == 1

    def test_a_role_that_may_not(self, name: str, victim: OtherSession, other: OtherSession) -> None:
        victim.take(lock_key(name))
        other.raw.execute(f'CREATE ROLE "{name}" IN ROLE pg_read_all_stats')
        try:
            with extra_alias("weak", {"options": f"-c role={name}"}) as weak:
                # Before PostgreSQL 16 in other words.
                with pytest.raises(ProgrammingError, match=r"permission denied|must be a superuser"):
                    end_session(victim.pid, start(victim, name, weak), weak, timeout=5)
            assert lives(victim)
        finally:
            other.raw.execute(f'DROP ROLE "{name}"')

    def test_one_that_does_not_end_in_time(self, name: str) -> None:
        with new_server() as server, server.alias("frozen") as alias:
            with contextlib.closing(Watcher(server)) as watcher, contextlib.closing(Watcher(server)) as victim:
                victim.take(lock_key(name))
                began = start(victim, name, alias)
                with server.frozen([victim.pid]):
                    assert end_session(victim.pid, began, alias, timeout=0.01) is Outcome.STAYS
                    assert watcher.holders(lock_key(name)) == 1
                watcher.wait_until_free(lock_key(name))

    def test_another_engine(self) -> None:
        with pytest.raises(LockUnsupported):
            end_session(1, 1, "sqlite", timeout=5)


class TestStart:
    @pytest.mark.parametrize("zone", ["UTC", "America/St_Johns", "Europe/Berlin"])
    @pytest.mark.parametrize("use_tz", [True, False])
    def test_in_every_time_zone(self, use_tz: bool, zone: str, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        sent = "SELECT CAST(extract(epoch FROM backend_start) * 1000000 AS bigint) FROM pg_stat_activity WHERE pid = %s"
        expected = victim.one(sent, [victim.pid])
        with override_settings(USE_TZ=use_tz, TIME_ZONE=zone), extra_alias("zone") as alias:
            (lock,) = holders_of(name, using=alias)
            assert lock.backend_start is not None
            assert (lock.backend_start.tzinfo is not None) is use_tz
            assert start(victim, name, alias) == expected

    def test_hidden(self, name: str, victim: OtherSession) -> None:
        victim.take(lock_key(name))
        (lock,) = holders_of(name)
        assert start_of(replace(lock, backend_start=None)) is None


class TestOwnSessions:
    def test_of_every_alias(self, other: OtherSession) -> None:
        connections.close_all()
        pids = {backend_pid(alias) for alias in ("default", "same")}
        value("SELECT 1", alias="sqlite")
        assert {pid for pid, _ in own_sessions()} == pids

    def test_as_a_lock_has_it(self, name: str, other: OtherSession) -> None:
        with advisory_lock(name):
            (lock,) = holders_of(name)
        assert (lock.pid, start_of(lock)) in own_sessions()

    def test_one_that_is_dead(self, other: OtherSession) -> None:
        connections.close_all()
        alive, dead = backend_pid(), backend_pid("same")
        other.kill(dead)
        assert {pid for pid, _ in own_sessions()} == {alive}
        connections["same"].close()

    def test_one_whose_transaction_has_failed(self, other: OtherSession) -> None:
        connections.close_all()
        with transaction.atomic():
            with pytest.raises(ProgrammingError), connection.cursor() as cursor:
                cursor.execute("SELECT nonsense")
            assert own_sessions() == set()
            transaction.set_rollback(True)
        assert {pid for pid, _ in own_sessions()} == {backend_pid()}
