"""What becomes of locks, told by signals and by the log."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.dispatch import Signal
from django.test import override_settings

from django_advisory_lock import (
    AdvisoryLock,
    LockHandle,
    LockLost,
    LockTimeout,
    TryAdvisoryLock,
    advisory_lock,
    advisory_lock_all,
    advisory_semaphore,
    lock_key,
    signals,
    try_advisory_lock,
    try_advisory_semaphore,
)
from django_advisory_lock.lasting import take_over
from django_advisory_lock.locks import AdvisoryLockAll
from django_advisory_lock.semaphores import AdvisorySemaphore, TryAdvisorySemaphore
from django_advisory_lock.slots import slot_key
from tests.support import LIMIT, OtherSession, Thread, backend_pid, in_child, statements, value, wait_until

SIGNALS: dict[str, Signal] = {
    name: getattr(signals, f"lock_{name}") for name in ("acquired", "released", "busy", "lost")
}


class Heard(list[tuple[str, Any, dict[str, Any]]]):
    """What the signals said: each with its sender and its arguments."""

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self]

    def only(self, name: str) -> dict[str, Any]:
        ((_, _, arguments),) = [entry for entry in self if entry[0] == name]
        return arguments


@pytest.fixture
def heard() -> Iterator[Heard]:
    entries = Heard()

    def listener(name: str) -> Callable[..., None]:
        def listen(sender: Any, signal: Signal, **arguments: Any) -> None:
            entries.append((name, sender, arguments))

        return listen

    listeners = {name: listener(name) for name in SIGNALS}
    for name, listen in listeners.items():
        SIGNALS[name].connect(listen)
    yield entries
    for name, listen in listeners.items():
        assert SIGNALS[name].disconnect(listen)


class TestOfALock:
    def test_acquired_and_released(self, name: str, heard: Heard, other: OtherSession) -> None:
        with advisory_lock(name) as lock:
            assert heard.names == ["acquired"]
        assert heard.names == ["acquired", "released"]
        for _, sender, arguments in heard:
            assert sender is AdvisoryLock
            assert {key: arguments[key] for key in ("key", "using", "scope", "handle")} == {
                "key": lock_key(name),
                "using": "default",
                "scope": "session",
                "handle": lock,
            }
        assert heard.only("acquired")["waited"] == lock.waited
        assert 0 < heard.only("released")["held_for"] < 20

    def test_by_hand(self, name: str, heard: Heard, other: OtherSession) -> None:
        lock = advisory_lock(name).acquire()
        lock.release()
        lock.release()
        assert heard.names == ["acquired", "released"]

    def test_nested(self, name: str, heard: Heard, other: OtherSession) -> None:
        with advisory_lock(name), advisory_lock(name):
            pass
        assert heard.names == ["acquired", "acquired", "released", "released"]

    def test_an_error_in_the_body(self, name: str, heard: Heard, other: OtherSession) -> None:
        with pytest.raises(ZeroDivisionError), advisory_lock(name):
            1 / 0  # noqa: B018
        assert heard.names == ["acquired", "released"]

    def test_a_transaction_lock(self, name: str, heard: Heard, other: OtherSession) -> None:
        """It is the server that frees it, and nobody is told."""
        with transaction.atomic(), advisory_lock(name):
            pass
        assert heard.names == ["acquired"]
        assert heard.only("acquired")["scope"] == "transaction"

    @pytest.mark.parametrize(
        ("kind", "make"),
        [
            (TryAdvisoryLock, try_advisory_lock),
            (AdvisoryLockAll, lambda name: advisory_lock_all(name, (name, "another"))),
            (AdvisorySemaphore, lambda name: advisory_semaphore(name, limit=2)),
            (TryAdvisorySemaphore, lambda name: try_advisory_semaphore(name, limit=2)),
            (AdvisoryLock, lambda name: advisory_lock(name, dedicated=True)),
        ],
        ids=["try", "all", "semaphore", "try semaphore", "dedicated"],
    )
    def test_every_kind(self, kind: type, make: Any, name: str, heard: Heard, other: OtherSession) -> None:
        with make(name) as lock:
            assert lock
        assert [(name, sender) for name, sender, _ in heard] == [("acquired", kind), ("released", kind)]

    def test_asynchronous(self, name: str, heard: Heard, other: OtherSession) -> None:
        async def main() -> None:
            async with advisory_lock(name):
                pass
            lock = await advisory_lock(name).aacquire()
            await lock.arelease()

        asyncio.run(main())
        assert heard.names == ["acquired", "released"] * 2

    def test_a_stream_that_takes_it_over(self, name: str, heard: Heard, other: OtherSession) -> None:
        with advisory_lock(name) as lock:
            end = take_over(lock)
        assert end is not None
        assert heard.names == ["acquired"]
        end()
        end()
        assert heard.names == ["acquired", "released"]

    def test_a_child_that_was_forked_says_nothing(self, name: str, heard: Heard, other: OtherSession) -> None:

        with advisory_lock(name) as lock:

            def child() -> list[str]:
                lock.release()
                return heard.names

            assert in_child(child) == "['acquired']"


class TestBusy:
    def test_a_failed_try(self, name: str, heard: Heard, other: OtherSession) -> None:
        other.take(lock_key(name))
        with statements(1):
            assert not try_advisory_lock(name).acquire()
        assert heard.names == ["busy"]
        assert (heard.only("busy")["error"], heard.only("busy")["holders"]) == (None, None)

    @pytest.mark.parametrize(
        "make",
        [
            lambda name: advisory_lock(name, timeout=0),
            lambda name: advisory_lock(name, timeout=0.02),
            lambda name: advisory_lock(name, timeout=0.02, poll_interval=0.01),
            lambda name: advisory_lock_all((name, "free"), name, timeout=0),
        ],
        ids=["one try", "waits", "polls", "several"],
    )
    def test_a_timeout(self, make: Any, name: str, heard: Heard, other: OtherSession) -> None:
        other.take(lock_key(name))
        with pytest.raises(LockTimeout) as caught:
            make(name).acquire()
        assert heard.names == ["busy"]
        busy = heard.only("busy")
        assert busy["error"] is caught.value
        assert [holder.pid for holder in busy["holders"]] == [other.pid]
        assert busy["holders"] == caught.value.holders
        assert busy["handle"].waited == caught.value.waited

    def test_in_a_task(self, name: str, heard: Heard, other: OtherSession) -> None:
        other.take(lock_key(name))
        with pytest.raises(LockTimeout):
            asyncio.run(advisory_lock(name, timeout=0.05).aacquire())
        assert heard.names == ["busy"]

    @pytest.mark.parametrize("timeout", [0, 0.05])
    def test_a_semaphore(self, timeout: float, name: str, heard: Heard, other: OtherSession) -> None:
        """Its gate, which it takes on the way, is nobody's business."""
        other.take(slot_key(lock_key(name), 1))
        with pytest.raises(LockTimeout):
            advisory_semaphore(name, limit=1, timeout=timeout).acquire()
        assert heard.names == ["busy"]
        assert heard.only("busy")["key"] == lock_key(name)
        assert [holder.pid for holder in heard.only("busy")["holders"]] == [other.pid]

    def test_a_gate_that_stays_shut(self, name: str, heard: Heard, other: OtherSession) -> None:
        other.take(slot_key(lock_key(name), "gate"))
        with pytest.raises(LockTimeout):
            advisory_semaphore(name, limit=1, timeout=0.05).acquire()
        assert heard.names == ["busy"]

    def test_whoever_gave_no_answer_is_still_warned(self, name: str, heard: Heard, other: OtherSession) -> None:
        """A receiver that looks at the handle does not look for the body."""

        def look(handle: LockHandle, **_: Any) -> None:
            assert not handle.acquired

        other.take(lock_key(name))
        signals.lock_busy.connect(look)
        try:
            with pytest.warns(RuntimeWarning, match="was not acquired"), try_advisory_lock(name):
                pass
        finally:
            signals.lock_busy.disconnect(look)


class TestLost:
    def test_a_killed_session(self, name: str, heard: Heard, other: OtherSession) -> None:
        with pytest.raises(LockLost) as caught, advisory_lock(name):
            other.kill(backend_pid())
        assert heard.names == ["acquired", "lost"]
        assert heard.only("lost")["error"] is caught.value
        assert heard.only("lost")["handle"].lost.is_set()

    def test_once(self, name: str, heard: Heard, other: OtherSession) -> None:
        with pytest.raises(LockLost), advisory_lock(name) as lock:
            connection.close()
            for _ in range(2):
                with pytest.raises(LockLost):
                    lock.check()
        assert heard.names == ["acquired", "lost"]

    def test_a_lock_that_was_released_is_not_lost(self, name: str, heard: Heard, other: OtherSession) -> None:
        lock = advisory_lock(name).acquire()
        lock.release()
        with pytest.raises(LockLost, match="no longer held"):
            lock.check()
        assert heard.names == ["acquired", "released"]

    def test_a_body_that_raised(self, name: str, heard: Heard, other: OtherSession) -> None:
        with pytest.raises(ZeroDivisionError), advisory_lock(name):
            connection.close()
            1 / 0  # noqa: B018
        assert heard.names == ["acquired", "lost"]

    def test_a_transaction_that_ended(self, name: str, heard: Heard, other: OtherSession) -> None:
        with pytest.raises(LockLost), transaction.atomic():
            with advisory_lock(name):
                connection.close()
        assert heard.names == ["acquired", "lost"]

    def test_a_stream(self, name: str, heard: Heard, other: OtherSession) -> None:
        with advisory_lock(name) as lock:
            end = take_over(lock)
        assert end is not None
        connection.close()
        end()
        assert heard.names == ["acquired", "lost"]

    def test_a_dedicated_session(self, name: str, heard: Heard, other: OtherSession) -> None:
        with pytest.raises(LockLost), advisory_lock(name, dedicated=True) as lock:
            other.kill(other.holder(lock.key))
            wait_until(lock.lost.is_set, "the watcher")
        assert heard.names == ["acquired", "lost"]


class TestReceivers:
    def test_one_that_raises(
        self, name: str, heard: Heard, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is in Django's log, and the lock goes its way."""

        def fail(**_: Any) -> None:
            raise ValueError("of the receiver")

        for signal in SIGNALS.values():
            signal.connect(fail)
        try:
            with advisory_lock(name) as lock:
                assert lock.is_held()
        finally:
            for signal in SIGNALS.values():
                signal.disconnect(fail)
        assert heard.names == ["acquired", "released"]
        assert [record.name for record in caplog.records] == ["django.dispatch"] * 2

    def test_one_that_is_interrupted(self, name: str, other: OtherSession) -> None:
        """Nobody has the handle yet: the lock is free."""

        def interrupt(**_: Any) -> None:
            raise KeyboardInterrupt

        signals.lock_acquired.connect(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                advisory_lock(name).acquire()
            assert other.is_free(lock_key(name))
        finally:
            signals.lock_acquired.disconnect(interrupt)

    def test_one_for_a_kind_of_lock(self, name: str, other: OtherSession) -> None:
        got = []

        def listen(sender: Any, **_: Any) -> None:
            got.append(sender)

        signals.lock_acquired.connect(listen, sender=TryAdvisoryLock)
        try:
            advisory_lock(name).acquire().release()
            try_advisory_lock(name).acquire().release()
        finally:
            signals.lock_acquired.disconnect(listen, sender=TryAdvisoryLock)
        assert got == [TryAdvisoryLock]

    def test_the_thread_of_the_lock(self, name: str, other: OtherSession) -> None:
        threads = []

        def listen(**_: Any) -> None:
            threads.append(threading.current_thread())

        signals.lock_acquired.connect(listen)
        try:
            working = Thread(lambda: advisory_lock(name).acquire().release())
            working.result()
        finally:
            signals.lock_acquired.disconnect(listen)
        assert threads == [working]

    def test_one_that_uses_the_database(self, name: str, heard: Heard, other: OtherSession) -> None:
        held = []

        def listen(handle: LockHandle, **_: Any) -> None:
            held.append(handle.is_held())

        signals.lock_acquired.connect(listen)
        signals.lock_released.connect(listen)
        try:
            with advisory_lock(name):
                pass
        finally:
            signals.lock_acquired.disconnect(listen)
            signals.lock_released.disconnect(listen)
        assert held == [True, False]

    @pytest.mark.parametrize("timeout", [0, 0.02])
    def test_one_that_uses_the_transaction(self, timeout: float, name: str, other: OtherSession) -> None:
        """A wait in vain has left it as it was by then."""
        seen = []

        def listen(**_: Any) -> None:
            seen.append(value("SELECT 1"))

        other.take(lock_key(name))
        signals.lock_busy.connect(listen)
        try:
            with transaction.atomic(), pytest.raises(LockTimeout):
                advisory_lock(name, timeout=timeout).acquire()
        finally:
            signals.lock_busy.disconnect(listen)
        assert seen == [1]


class TestAsynchronousReceivers:
    """Django waits for them in the thread of the lock, on the loop that this thread works for."""

    @pytest.fixture
    def aheard(self) -> Iterator[list[tuple[str, bool]]]:
        """What they were told, and whether they ran on the loop of a task."""
        told: list[tuple[str, bool]] = []

        def listener(name: str) -> Callable[..., Any]:
            async def listen(**_: Any) -> None:
                await asyncio.sleep(0)
                told.append((name, asyncio.get_running_loop() is self.loop))

            return listen

        listeners = {name: listener(name) for name in SIGNALS}
        for name, listen in listeners.items():
            SIGNALS[name].connect(listen)
        yield told
        for name, listen in listeners.items():
            assert SIGNALS[name].disconnect(listen)

    loop: asyncio.AbstractEventLoop | None = None

    def test_of_synchronous_code(self, aheard: list[tuple[str, bool]], name: str, other: OtherSession) -> None:
        with advisory_lock(name):
            pass
        other.take(lock_key(name))
        assert not try_advisory_lock(name).acquire()
        other.drop(lock_key(name))
        with pytest.raises(LockLost), advisory_lock(name):
            connection.close()
        assert [told for told, _ in aheard] == ["acquired", "released", "busy", "acquired", "lost"]

    @pytest.mark.parametrize("dedicated", [False, True])
    def test_of_tasks(self, dedicated: bool, aheard: list[tuple[str, bool]], name: str, other: OtherSession) -> None:
        async def work(begun: asyncio.Event) -> None:
            async with advisory_lock(name, dedicated=dedicated):
                begun.set()
                await asyncio.sleep(LIMIT)

        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            async with advisory_lock(name, dedicated=dedicated):
                pass
            other.take(lock_key(name))
            assert not await try_advisory_lock(name, dedicated=dedicated).aacquire()
            with pytest.raises(LockTimeout):
                await advisory_lock(name, timeout=0.02, dedicated=dedicated).aacquire()
            other.drop(lock_key(name))
            begun = asyncio.Event()
            task = asyncio.create_task(work(begun))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await sync_to_async(connections.close_all)()

        asyncio.run(asyncio.wait_for(main(), LIMIT))
        names = ["acquired", "released", "busy", "busy", "acquired", "released"]
        assert aheard == [(name, True) for name in names]

    def test_in_the_thread_of_a_loop(
        self,
        aheard: list[tuple[str, bool]],
        heard: Heard,
        name: str,
        other: OtherSession,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """As in a notebook: Django cannot wait for them there, and raises. The lock goes its way."""
        monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")

        async def main() -> None:
            with advisory_lock(name) as lock:
                assert lock.is_held()
            with pytest.raises(LockLost), advisory_lock(name):
                connection.close()

        asyncio.run(main())
        assert aheard == []
        assert heard.names == ["acquired", "released", "acquired", "lost"]
        assert [record.levelname for record in caplog.records if "Not all receivers" in record.message] == ["ERROR"] * 4


class TestLog:
    @pytest.fixture
    def log(self, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
        caplog.set_level(logging.INFO, "django_advisory_lock")
        return caplog

    def test_nothing_where_all_is_well(self, name: str, log: pytest.LogCaptureFixture, other: OtherSession) -> None:
        with advisory_lock(name):
            pass
        assert log.records == []

    def test_busy(self, name: str, log: pytest.LogCaptureFixture, other: OtherSession) -> None:
        other.take(lock_key(name))
        try_advisory_lock(name).acquire()
        with pytest.raises(LockTimeout) as caught:
            advisory_lock(name, timeout=0).acquire()
        assert [(record.levelname, record.getMessage()) for record in log.records] == [
            ("INFO", f"The lock {name!r} on 'default' is busy."),
            ("INFO", str(caught.value)),
        ]
        assert f"held by pid {other.pid}" in str(caught.value)

    @override_settings(ADVISORY_LOCK_SLOW_WAIT=0.01)
    def test_a_long_wait(self, name: str, log: pytest.LogCaptureFixture, other: OtherSession) -> None:
        other.take(lock_key(name))
        with pytest.raises(LockTimeout):
            advisory_lock(name, timeout=0.05).acquire()
        waiting = Thread(lambda: advisory_lock(name).acquire().release())
        other.wait_for_waiters(lock_key(name))
        wait_until(lambda: other.one("SELECT clock_timestamp() - %s > '50 ms'", [_waiting_since(other)]), "50 ms")
        other.drop(lock_key(name))
        waiting.result()
        first, second = log.records
        assert (first.levelname, second.levelname) == ("WARNING", "WARNING")
        assert f"held by pid {other.pid}" in first.getMessage()
        assert second.getMessage().startswith("Waited 0.")

    def test_lost(self, name: str, log: pytest.LogCaptureFixture, other: OtherSession) -> None:
        with pytest.raises(LockLost), advisory_lock(name):
            connections["default"].close()
        assert [record.levelname for record in log.records] == ["ERROR"]


def _waiting_since(other: OtherSession) -> Any:
    return other.one("SELECT waitstart FROM pg_locks WHERE NOT granted AND locktype = 'advisory'")
