"""Periodic work on any number of hosts: at most one start in each interval, and never two runs at once."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import gc
import inspect
import itertools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, Error, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase, modify_settings, override_settings
from django.utils.connection import ConnectionDoesNotExist

from django_advisory_lock import (
    LockLost,
    LockUnsupported,
    PoolerDetected,
    advisory_lock,
    lock_key,
    periodic_lock,
    try_advisory_lock,
)
from django_advisory_lock.guards.period import LONGEST_ERROR, NotedPeriod, Period, describe
from django_advisory_lock.guards.periodic import PeriodicLock
from django_advisory_lock.models import PeriodicRun
from tests.bouncer import bouncer
from tests.support import (
    LIMIT,
    OtherSession,
    Thread,
    backend_pid,
    environment,
    extra_alias,
    fork,
    output,
    spawn,
    statements,
    tool,
    value,
    wait_until,
)
from tests.test_async import run, until
from tests.test_interrupts import INTERRUPTS, strike_at_every_line

if TYPE_CHECKING:
    from typing_extensions import assert_type

TABLE = "django_advisory_lock_periodicrun"
MOMENT = 1e-6  # an interval that is over at once


def row(name: str, using: str = "default") -> PeriodicRun:
    run: PeriodicRun = PeriodicRun.objects.using(using).get(name=name)
    return run


def key_of(name: str) -> Any:
    return lock_key("periodic", name)


def set_back(name: str, seconds: float, other: OtherSession) -> None:
    """Let the last start be so much longer ago."""
    text = (
        f"UPDATE {TABLE} SET last_started_at = last_started_at - make_interval(secs => %s) WHERE name = %s RETURNING 1"
    )
    assert other.one(text, [seconds, name])


def every(name: str, min_interval: float | timedelta = 60, **options: Any) -> Callable[[], Any]:
    """Return periodic work that tells that it ran."""
    return periodic_lock(name, min_interval=min_interval, **{"default": "skipped", **options})(lambda: "ran")


async def never() -> None:
    raise AssertionError("ran")  # pragma: no cover - it is not to run


@contextlib.contextmanager
def running(name: str, **options: Any) -> Iterator[None]:
    """Have a run at work in another thread."""
    begun, end = threading.Event(), threading.Event()

    @periodic_lock(name, **{"min_interval": MOMENT, **options})
    def work() -> bool:
        begun.set()
        return end.wait(LIMIT)

    thread = Thread(work)
    try:
        wait_until(begun.is_set, "begun")
        yield
    finally:
        end.set()
        assert thread.result()


WAITING = """SELECT count(*) FROM pg_stat_activity
 WHERE wait_event_type = 'Lock' AND query LIKE %s AND datname = current_database()"""


@contextlib.contextmanager
def row_in_use(name: str) -> Iterator[OtherSession]:
    """Keep the row in a transaction of somebody else."""
    session = OtherSession()
    try:
        with session.raw.transaction():
            session.raw.execute(f"SELECT FROM {TABLE} WHERE name = %s FOR UPDATE", [name])
            yield session
    finally:
        session.close()


class TestRuns:
    def test_at_most_once_in_an_interval(self, name: str, other: OtherSession) -> None:
        """Case 76, Case 79: one after the other."""
        work = every(name)
        assert [work(), work(), work()] == ["ran", "skipped", "skipped"]
        set_back(name, 59, other)
        assert work() == "skipped"
        set_back(name, 1, other)
        assert [work(), work()] == ["ran", "skipped"]
        assert row(name).run_count == 2
        assert other.is_free(key_of(name))

    def test_measured_when_its_row_is_free(self, name: str, other: OtherSession) -> None:
        """A start that has to wait for the row is later than it was sent, and than what was noted meanwhile."""
        work = every(name, MOMENT)
        assert work() == "ran"
        with row_in_use(name) as session:
            late = Thread(work)
            wait_until(lambda: other.one(WAITING, [f"%{name}%"]), "waits for the row")
            session.raw.execute(f"UPDATE {TABLE} SET last_started_at = clock_timestamp() WHERE name = %s", [name])
        assert late.result() == "ran"

    def test_never_twice_at_once(self, name: str, other: OtherSession) -> None:
        """Case 76; Case 60: for as long as a run takes, with no expiry."""
        with running(name):
            set_back(name, 10**6, other)
            assert every(name)() == "skipped"
            assert not other.is_free(key_of(name))
        assert every(name, MOMENT)() == "ran"

    def test_a_lock_of_somebody_else_counts(self, name: str, other: OtherSession) -> None:
        other.take(key_of(name))
        assert every(name)() == "skipped"
        other.drop(key_of(name))
        assert every(name)() == "ran"

    def test_what_is_noted(self, name: str, other: OtherSession) -> None:
        seen: list[PeriodicRun] = []

        @periodic_lock(name, min_interval=timedelta(minutes=5))
        def work() -> None:
            assert not other.is_free(key_of(name))
            seen.append(row(name))

        before = other.one("SELECT clock_timestamp()")
        work()
        (first,), last = seen, row(name)
        assert first.last_started_at == last.last_started_at
        assert first.is_started
        assert (first.last_finished_at, first.last_succeeded_at, first.duration) == (None, None, None)
        assert last.last_started_at is not None
        assert last.last_finished_at is not None
        assert before < last.last_started_at < last.last_finished_at < other.one("SELECT clock_timestamp()")
        assert last.last_succeeded_at == last.last_finished_at
        assert last.duration == last.last_finished_at - last.last_started_at
        assert not last.is_started
        assert (last.last_outcome, last.last_error) == ("succeeded", "")
        assert (last.last_host, last.last_pid) == (socket.gethostname(), os.getpid())
        assert (last.min_interval, last.run_count) == (timedelta(minutes=5), 1)
        assert last.key == str(key_of(name).args[0])
        assert str(last) == name

    def test_arguments_and_results(self, name: str, other: OtherSession) -> None:
        @periodic_lock(name, min_interval=MOMENT)
        def work(*args: Any, **kwargs: Any) -> Any:
            return args, kwargs

        assert work(1, self=2) == ((1,), {"self": 2})

    def test_the_default_is_none(self, name: str, other: OtherSession) -> None:
        work = periodic_lock(name, min_interval=60)(lambda: "ran")
        assert [work(), work()] == ["ran", None]

    def test_methods_and_partials(self, name: str, other: OtherSession) -> None:
        class Report:
            @periodic_lock(name, min_interval=MOMENT)
            def work(self, x: int) -> tuple[Any, int]:
                return self, x

            @staticmethod
            @periodic_lock(name, min_interval=MOMENT)
            def alone(x: int) -> int:
                return x

        report = Report()
        assert report.work(1) == (report, 1)
        assert Report.alone(2) == 2
        assert periodic_lock(name, min_interval=MOMENT)(functools.partial(int, "3"))() == 3

    def test_one_name_is_one_piece_of_work(self, name: str, other: OtherSession) -> None:
        assert [every(name)(), every(name, 30)()] == ["ran", "skipped"]

    @pytest.mark.parametrize("alias", ["binding", "prepared", "serializable", "persistent", "healthy", "pooled"])
    def test_on_every_kind_of_alias(self, alias: str, name: str, other: OtherSession) -> None:
        work = every(name, 0.5, using=alias)
        assert [work(), work()] == ["ran", "skipped"]
        set_back(name, 0.5, other)
        assert work() == "ran"
        assert row(name).last_outcome == "succeeded"
        connections[alias].close()

    def test_a_start_is_when_its_row_was_free(self, name: str, other: OtherSession) -> None:
        """A transaction on the row, as of somebody in the admin: the interval counts from when the work begins."""
        work = every(name, MOMENT)
        work()
        with row_in_use(name):
            thread = Thread(work)
            wait_until(lambda: other.one(WAITING, [f"%{name}%"]), "waits for the row")
            freed = other.one("SELECT clock_timestamp()")
        assert thread.result() == "ran"
        started = row(name).last_started_at
        assert started is not None
        assert started > freed


class TestAsynchronous:
    def test_coroutine_functions(self, name: str, other: OtherSession) -> None:
        @periodic_lock(name, min_interval=60, default="skipped")
        async def work(x: int) -> int:
            assert await sync_to_async(other.is_free)(key_of(name)) is False
            return x

        async def main() -> list[int | str]:
            return [await work(1), await work(2)]

        assert iscoroutinefunction(work)
        assert run(main) == [1, "skipped"]
        assert row(name).last_outcome == "succeeded"

    def test_tasks_of_one_loop(self, name: str, other: OtherSession) -> None:
        """They share a session, and are kept apart all the same; also where each start would be due."""
        inside = most = 0

        @periodic_lock(name, min_interval=MOMENT)
        async def work() -> str:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.02)
            inside -= 1
            return "ran"

        async def main() -> list[Any]:
            return list(await asyncio.gather(*(work() for _ in range(5))))

        answers = run(main)
        assert most == 1
        assert answers.count("ran") == row(name).run_count

    def test_partials_of_coroutine_functions(self, name: str, other: OtherSession) -> None:
        async def work(x: int) -> int:
            return x

        assert run(periodic_lock(name, min_interval=MOMENT)(functools.partial(work, 1))) == 1

    def test_a_task_that_is_cancelled(self, name: str, other: OtherSession) -> None:
        @periodic_lock(name, min_interval=60)
        async def work() -> None:
            begun.set()
            await asyncio.sleep(LIMIT)

        async def main() -> None:
            task = asyncio.create_task(work())
            await until(begun.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await sync_to_async(other.is_free)(key_of(name))

        begun = threading.Event()
        run(main)
        assert row(name).last_outcome == "failed"
        assert "CancelledError" in row(name).last_error

    def test_a_task_that_is_cancelled_while_its_start_is_noted(self, name: str, other: OtherSession) -> None:
        every(name, MOMENT)()

        awork = periodic_lock(name, min_interval=MOMENT)(never)

        async def main() -> None:
            with row_in_use(name):
                task = asyncio.create_task(awork())
                await until(lambda: other.one(WAITING, [f"%{name}%"]), "waits for the row")
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(main)
        assert other.is_free(key_of(name))
        assert row(name).last_outcome != "started"

    def test_skipped_elsewhere(self, name: str, other: OtherSession) -> None:
        work = periodic_lock(name, min_interval=MOMENT, default="skipped")(never)
        with running(name):
            assert run(work) == "skipped"

    # A handle asks for the task that it belongs to, where no loop runs; the same with `advisory_lock`.
    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_coroutine_that_is_closed_after_its_loop(self, name: str, other: OtherSession) -> None:
        """Its lock goes with the handle, and its run stays noted as started."""
        begun = threading.Event()

        @periodic_lock(name, min_interval=60)
        async def work() -> None:
            begun.set()
            await asyncio.sleep(LIMIT)

        async def main() -> None:
            task = asyncio.ensure_future(coroutines[0])
            await until(begun.is_set)
            task._log_destroy_pending = False  # type: ignore[attr-defined]

        async def settle() -> None:
            await sync_to_async(every(f"{name}-next", MOMENT))()

        coroutines = [work()]
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        errors: list[str] = []
        try:
            coroutines.pop().close()
        except RuntimeError as error:
            errors.append(str(error))
        gc.collect()
        run(settle)
        assert other.is_free(key_of(name))
        assert row(name).last_outcome == "started"
        assert errors == []

    def test_a_run_whose_loop_is_gone(self, name: str, other: OtherSession) -> None:
        """There is nothing to wait with."""
        period = NotedPeriod(timedelta(seconds=1), name)
        period.number = 1
        coroutine = period.__aexit__(GeneratorExit, GeneratorExit(), None)
        with pytest.raises(StopIteration), statements(0):
            coroutine.send(None)


class TestDecorator:
    def test_nothing_is_sent_at_decoration(self, name: str, other: OtherSession) -> None:
        with statements(0):
            lock = periodic_lock(name, min_interval=60)
            lock(lambda: None)
        assert repr(lock) == f"<PeriodicLock '{name}' every 0:01:00>"
        assert isinstance(lock, PeriodicLock)

    def test_looks_like_the_function(self) -> None:
        def work(x: int, *, y: str = "") -> bytes:
            """Work."""
            return y.encode() * x

        decorated = periodic_lock("x", min_interval=1)(work)
        assert (decorated.__name__, decorated.__doc__) == ("work", "Work.")
        assert decorated.__wrapped__ is work  # type: ignore[attr-defined]
        assert inspect.signature(decorated) == inspect.signature(work)
        assert work(2, y="x") == b"xx"

    @pytest.mark.parametrize(
        ("work_name", "error"),
        [
            (None, TypeError),
            (5, TypeError),
            (True, TypeError),
            (b"x", TypeError),
            (("a", "b"), TypeError),
            (lambda: "x", TypeError),
            ("", ValueError),
            ("a\x1fb", ValueError),
            ("a\ud800", ValueError),
        ],
        ids=["none", "int", "bool", "bytes", "tuple", "function", "empty", "separator", "surrogate"],
    )
    def test_names_that_are_refused(self, work_name: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            periodic_lock(work_name, min_interval=1)

    def test_a_bare_decorator_is_refused(self) -> None:
        with pytest.raises(TypeError):
            periodic_lock(lambda: None)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="name of the work as text, not function"):
            periodic_lock(lambda: None, min_interval=1)  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            periodic_lock("x", min_interval=1)()

    def test_members_of_an_enum_are_their_values(self, name: str, other: OtherSession) -> None:
        member = enum.Enum("Work", {"REPORT": name}).REPORT  # type: ignore[attr-defined]
        assert every(member)() == "ran"
        assert every(name)() == "skipped"
        assert row(name).name == name

    def test_a_name_that_no_column_holds(self, name: str, other: OtherSession) -> None:
        assert every(f"{name}\0")() == "ran"
        assert row(f"{name}\N{REPLACEMENT CHARACTER}").last_outcome == "succeeded"

    def test_a_very_long_name(self, name: str, other: OtherSession) -> None:
        assert [every(name * 500)(), every(name * 500)()] == ["ran", "skipped"]

    @pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf"), 1e-9, 1e300, timedelta(0), timedelta.max])
    def test_intervals_that_are_none(self, interval: Any) -> None:
        with pytest.raises(ValueError, match="min_interval is the time between two starts") as caught:
            periodic_lock("x", min_interval=interval)
        assert repr(interval) in str(caught.value)

    @pytest.mark.parametrize("interval", [None, "5", True, b"1"])
    def test_intervals_of_another_type(self, interval: Any) -> None:
        with pytest.raises(TypeError, match=f"seconds or a timedelta, not {type(interval).__name__}"):
            periodic_lock("x", min_interval=interval)

    @pytest.mark.parametrize("interval", [MOMENT, 0.5, 90, timedelta(microseconds=1), timedelta(days=36500)])
    def test_intervals_come_back_from_the_table(self, interval: Any, name: str, other: OtherSession) -> None:
        assert every(name, interval)() == "ran"
        length = interval if isinstance(interval, timedelta) else timedelta(seconds=interval)
        assert row(name).min_interval == length

    @pytest.mark.parametrize("function", [int, classmethod(lambda cls: None), "x", (_ for _ in ()), print.__class__])
    def test_what_is_no_function(self, function: Any) -> None:
        with pytest.raises(TypeError):
            periodic_lock("x", min_interval=1)(function)

    def test_generators_are_refused(self, name: str, other: OtherSession) -> None:
        def generate() -> Iterator[int]:
            yield 1  # pragma: no cover - it is not to run

        with pytest.raises(TypeError):
            periodic_lock(name, min_interval=1)(generate)

        def generator() -> Any:
            return generate()

        with pytest.raises(TypeError, match="returned a generator"):
            periodic_lock(name, min_interval=1)(generator)()
        assert row(name).last_outcome == "failed"

    def test_types(self) -> None:  # pragma: no cover - the bodies are for a type checker
        @periodic_lock("x", min_interval=1)
        def work(x: int, *, y: str = "") -> bytes:
            return b""

        @periodic_lock("x", min_interval=timedelta(1), default=0)
        def work_or(x: int) -> bytes:
            return b""

        @periodic_lock("x", min_interval=1, default="skipped")
        async def awork(x: int) -> bytes:
            return b""

        if TYPE_CHECKING:
            assert_type(work(1, y=""), "bytes | None")
            assert_type(work_or(1), "bytes | int")
            assert_type(periodic_lock("x", min_interval=1), PeriodicLock[None])
            assert_type(periodic_lock("x", min_interval=1, default=""), PeriodicLock[str])
            work("1")  # type: ignore[arg-type]
            periodic_lock("x")  # type: ignore[call-overload]
            periodic_lock("x", 5)  # type: ignore[call-overload]

            async def main() -> None:
                assert_type(await awork(1), "bytes | str")


class TestStatementsAndLog:
    def test_how_many_statements(self, name: str, other: OtherSession) -> None:
        work = every(name)
        with statements(5):
            assert work() == "ran"
        with statements(1):
            assert work() == "skipped"
        set_back(name, 60, other)
        with running(name), statements(2):
            assert every(name, MOMENT)() == "skipped"

    def test_too_soon(self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        work = every(name, timedelta(minutes=5))
        work()
        set_back(name, 100, other)
        with caplog.at_level(logging.INFO, "django_advisory_lock"):
            assert work() == "skipped"
        (record,) = caplog.records
        assert record.levelno == logging.INFO
        assert re.fullmatch(
            rf"{name} was skipped, too soon: started 0:01:4\d ago by {re.escape(socket.gethostname())},"
            rf" process {os.getpid()}, may start again in 0:03:\d\d\.",
            record.message,
        )

    def test_running_elsewhere(self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        with running(name):
            caplog.clear()
            with caplog.at_level(logging.INFO, "django_advisory_lock"):
                assert every(name, MOMENT)() == "skipped"
        lines = [record.message for record in caplog.records if record.levelno == logging.INFO]
        who = rf"last started by {re.escape(socket.gethostname())}, process {os.getpid()}, \d+\.\d s ago"
        lock = f"The lock 'periodic:{name}' on 'default' was not acquired: running elsewhere"
        assert re.fullmatch(rf"{name} was skipped\. {lock}, {who}\.", lines[-1])
        assert {record.levelno for record in caplog.records} == {logging.INFO}

    @pytest.mark.parametrize("ran_before", [False, True])
    def test_a_holder_that_is_unknown(
        self, ran_before: bool, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        if ran_before:
            every(name)()
        other.take(key_of(name))
        with caplog.at_level(logging.INFO, "django_advisory_lock"):
            assert every(name, MOMENT)() == "skipped"
        assert caplog.records[-1].message.endswith("was not acquired: running elsewhere, holder unknown.")
        other.drop(key_of(name))

    def test_another_one_was_faster(self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        """Two looked and saw that it was due; the slower one finds out with the lock in hand."""
        looked, go_on = threading.Event(), threading.Event()

        work = every(name)
        work()
        set_back(name, 60, other)
        look = NotedPeriod.look

        def slow_look(period: NotedPeriod, handle: Any) -> bool:
            answer = look(period, handle)
            if threading.current_thread() is not threading.main_thread():
                looked.set()
                assert go_on.wait(LIMIT)
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NotedPeriod, "look", slow_look)
            slow = Thread(work)
            wait_until(looked.is_set, "looked")
            assert work() == "ran"
            with caplog.at_level(logging.INFO, "django_advisory_lock"):
                go_on.set()
                assert slow.result() == "skipped"
        assert caplog.records[-1].message == f"{name} was skipped, too soon: another one was faster."
        assert row(name).run_count == 2

    def test_a_clock_that_was_set_back(self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        """By the database's clock the last start is yet to come. Nothing runs, the log and the check say why."""
        work = every(name)
        work()
        set_back(name, -30, other)
        with caplog.at_level(logging.INFO, "django_advisory_lock"):
            assert work() == "skipped"
        assert re.search(
            r"started \d\d\.\d s ahead of the database's clock by .* again in 0:01:\d\d\.$", caplog.text.strip()
        )
        ignoring = NotedPeriod(timedelta(seconds=60), name, is_ignored=True)
        with advisory_lock("periodic", name).acquire() as handle:
            assert ignoring.look(handle)
            with ignoring:
                assert ignoring.start()
        assert row(name).run_count == 2
        assert row(name).min_interval == timedelta(seconds=60)

    def test_most_guards_have_no_period(self) -> None:
        """What the others do at the same places: nothing."""
        period = Period()
        assert period.look(None) and period.start()  # type: ignore[arg-type]  # noqa: PT018

        async def main() -> bool:
            async with period:
                return await period.alook(None) and await period.astart()  # type: ignore[arg-type]

        assert run(main)


class Stubborn(Exception):
    """Its text is an error of its own."""

    def __str__(self) -> str:
        raise LookupError


class Wordless(Exception):
    """Its text is none."""

    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # noqa: PLE0307


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (ValueError("no money"), "ValueError: no money"),
            (ValueError("a\0b\ud800c"), "ValueError: a\N{REPLACEMENT CHARACTER}b?c"),
            (ValueError("é" * 10**6), ("ValueError: " + "é" * 10**6)[:LONGEST_ERROR]),
            (Stubborn(), "tests.guards.test_periodic.Stubborn: <exception str() failed>"),
            (Wordless(), "tests.guards.test_periodic.Wordless: <exception str() failed>"),
            (ValueError(), "ValueError"),
            (KeyboardInterrupt(), "KeyboardInterrupt"),
            (SystemExit(3), "SystemExit: 3"),
            (asyncio.CancelledError(), "asyncio.exceptions.CancelledError"),
            (GeneratorExit(), "GeneratorExit"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
    )
    def test_a_run_that_fails_counts_as_a_start(
        self, error: BaseException, text: str, name: str, other: OtherSession
    ) -> None:
        @periodic_lock(name, min_interval=60, default="skipped")
        def work() -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            work()
        assert caught.value is error
        assert work() == "skipped"
        failed = row(name)
        assert (failed.last_outcome, failed.last_error, failed.last_succeeded_at) == ("failed", text, None)
        assert failed.duration is not None
        assert other.is_free(key_of(name))

    def test_the_next_success_clears_the_error(self, name: str, other: OtherSession) -> None:
        with pytest.raises(ZeroDivisionError):
            periodic_lock(name, min_interval=MOMENT)(lambda: 1 / 0)()
        every(name, MOMENT)()
        assert (row(name).last_outcome, row(name).last_error) == ("succeeded", "")
        with pytest.raises(ZeroDivisionError):
            periodic_lock(name, min_interval=MOMENT)(lambda: 1 / 0)()
        failed = row(name)
        assert failed.last_succeeded_at is not None
        assert failed.last_started_at is not None
        assert failed.last_succeeded_at < failed.last_started_at

    def test_notes_are_kept(self) -> None:
        error = ValueError("x")
        error.__notes__ = ["while it rained"]  # type: ignore[attr-defined]
        assert describe(error) in ("ValueError: x\nwhile it rained", "ValueError: x")  # Python 3.10 has no notes

    def test_killed(self, name: str, other: OtherSession) -> None:
        """Case 61: the row says that it was started, and stops nobody."""
        process = spawn(KILLED, name)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "at work\n"
            assert every(name, MOMENT)() == "skipped"
        finally:
            process.kill()
            process.communicate()
        other.wait_until_free(key_of(name))
        killed = row(name)
        assert killed.is_started
        assert killed.last_pid == process.pid
        assert every(name)() == "skipped"
        set_back(name, 60, other)
        assert every(name)() == "ran"
        assert row(name).run_count == 2

    def test_the_session_is_killed_in_the_body(self, name: str, other: OtherSession) -> None:
        @periodic_lock(name, min_interval=60)
        def work() -> None:
            other.kill(backend_pid())

        with pytest.raises(LockLost):
            work()
        assert row(name).last_outcome == "failed"
        assert row(name).last_error.startswith("django_advisory_lock.exceptions.LockLost: ")

    def test_the_session_is_killed_and_the_body_fails(self, name: str, other: OtherSession) -> None:
        @periodic_lock(name, min_interval=60)
        def work() -> None:
            other.kill(backend_pid())
            value("SELECT 1")

        with pytest.raises(Error):
            work()
        assert row(name).last_error.startswith("django.db.utils.OperationalError: ")

    def test_the_connection_is_closed_in_the_body(self, name: str, other: OtherSession) -> None:
        with pytest.raises(LockLost):
            periodic_lock(name, min_interval=60)(connection.close)()
        assert row(name).last_outcome == "failed"

    def test_the_session_is_killed_between_two_runs(self, name: str, other: OtherSession) -> None:
        """A scheduler's thread lives for months, and nobody closes its connections."""
        work = every(name, MOMENT)
        work()
        other.kill(backend_pid())
        with pytest.raises(Error):
            work()
        assert work() == "ran"

    @pytest.mark.parametrize("leave", ["autocommit", "atomic", "failed"])
    def test_the_body_leaves_a_transaction_open(
        self, leave: str, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The end is not noted in it: the row would be locked, and the next host's start would wait for it."""

        @periodic_lock(name, min_interval=MOMENT)
        def work() -> None:
            if leave == "atomic":
                transaction.atomic().__enter__()
            else:
                connection.set_autocommit(False)
            with contextlib.suppress(Error):
                value("SELECT 1 / 0" if leave == "failed" else "SELECT 1")

        with contextlib.nullcontext() if leave == "failed" else pytest.warns(RuntimeWarning, match="freed before"):
            work()
        try:
            assert f"The end of '{name}' could not be noted: the body has left a transaction open" in caplog.text
            if leave != "failed":
                assert other.is_free(key_of(name))
                assert Thread(every(name, MOMENT)).result() == "ran"
        finally:
            connection.close()
            del connections["default"]

    def test_the_table_is_gone_at_the_end(
        self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        def gone() -> None:
            value("SELECT set_config('search_path', 'pg_catalog', false)")

        periodic_lock(name, min_interval=60)(gone)()
        assert f"The end of '{name}' could not be noted: Periodic work is noted in a table" in caplog.text
        connection.close()
        assert row(name).is_started

    def test_the_row_is_deleted_meanwhile(self, name: str, other: OtherSession) -> None:
        @periodic_lock(name, min_interval=60)
        def work() -> str:
            row(name).delete()
            return "ran"

        assert work() == "ran"
        assert not PeriodicRun.objects.filter(name=name).exists()
        assert work() == "ran"

    def test_the_next_run_is_allowed_meanwhile(self, name: str, other: OtherSession) -> None:
        @periodic_lock(name, min_interval=60)
        def work() -> str:
            PeriodicRun.objects.filter(name=name).update(last_started_at=None)
            return "ran"

        assert [work(), work()] == ["ran", "ran"]
        assert (row(name).last_outcome, row(name).run_count, row(name).duration) == ("succeeded", 2, None)

    def test_a_run_that_was_overtaken(self, name: str, other: OtherSession) -> None:
        """Its session was lost, and the next one has begun: the row is that one's."""

        @periodic_lock(name, min_interval=MOMENT)
        def work() -> None:
            other.kill(backend_pid())
            assert Thread(every(name, timedelta(hours=1))).result() == "skipped"
            set_back(name, 3600, other)
            assert Thread(every(name, timedelta(hours=1))).result() == "ran"

        with pytest.raises(LockLost):
            work()
        last = row(name)
        assert (last.run_count, last.last_outcome, last.last_error) == (2, "succeeded", "")
        assert last.min_interval == timedelta(hours=1)

    def test_a_forked_child_that_leaves_the_body(self, name: str, other: OtherSession) -> None:
        parent, seen = os.getpid(), []

        @periodic_lock(name, min_interval=60)
        def work() -> None:
            if child := fork():  # pragma: no branch - a child is not measured
                os.waitpid(child, 0)
                seen.append(row(name).last_outcome)

        try:
            work()
        finally:
            if os.getpid() != parent:  # pragma: no cover - a child is not measured
                os._exit(0)
        assert seen == ["started"]
        assert row(name).last_outcome == "succeeded"

    def test_the_start_is_cancelled(self, name: str, other: OtherSession) -> None:
        """Nothing is noted, and the lock is free."""
        every(name, MOMENT)()
        with row_in_use(name), extra_alias("hasty", {"options": "-c statement_timeout=100"}) as alias:
            with pytest.raises(Error):
                every(name, MOMENT, using=alias)()
        assert row(name).run_count == 1
        assert other.is_free(key_of(name))


KILLED = """
import sys, time
from django_advisory_lock import periodic_lock

@periodic_lock(sys.argv[1], min_interval=60)
def work():
    print("at work", flush=True)
    sys.stdin.readline()

work()
"""


class TestNesting:
    def test_a_run_within_its_own_run(self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        """A body that comes back to itself after its interval, as one that polls its scheduler."""
        answers: list[Any] = []

        @periodic_lock(name, min_interval=MOMENT, default="skipped")
        def work() -> str:
            answers.append(work() if len(answers) < 3 else None)
            return "ran"

        with caplog.at_level(logging.INFO, "django_advisory_lock"):
            assert work() == "ran"
        assert answers == ["skipped"]
        assert (
            caplog.records[-1].message == f"{name} was skipped, running already: this call comes from within the run."
        )
        assert row(name).run_count == 1
        assert work() == "ran"

    def test_within_its_own_run_on_another_alias(self, name: str, other: OtherSession) -> None:
        inner = every(name, MOMENT, using="same")
        assert periodic_lock(name, min_interval=MOMENT)(inner)() == "skipped"
        connections["same"].close()

    def test_within_its_own_run_as_a_coroutine(self, name: str, other: OtherSession) -> None:
        answers: list[Any] = []

        @periodic_lock(name, min_interval=MOMENT, default="skipped")
        async def work() -> str:
            answers.append(await work() if not answers else None)
            return "ran"

        assert run(work) == "ran"
        assert answers == ["skipped"]

    def test_another_one_within(self, name: str, other: OtherSession) -> None:
        inner = every(f"{name}-inner", MOMENT)
        assert periodic_lock(name, min_interval=MOMENT)(inner)() == "ran"

    def test_a_plain_lock_of_the_caller(self, name: str, other: OtherSession) -> None:
        with advisory_lock("periodic", name) as lock:
            assert every(name, MOMENT)() == "ran"
            assert every(name, MOMENT)() == "ran"
            assert lock.is_held()
        assert other.is_free(key_of(name))

    def test_a_plain_lock_within(self, name: str, other: OtherSession) -> None:
        def body() -> bool:
            with try_advisory_lock("periodic", name) as lock:
                return bool(lock)

        assert periodic_lock(name, min_interval=MOMENT)(body)() is True


class TestTransactions:
    def test_inside_atomic(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            with pytest.raises(RuntimeError, match="run periodic work outside of atomic"):
                every(name)()
            assert value("SELECT 1") == 1
        assert every(name)() == "ran"

    def test_inside_atomic_of_a_durable_kind(self, name: str, other: OtherSession) -> None:
        async def main() -> None:
            awork = periodic_lock(name, min_interval=60)(never)
            outer = transaction.atomic()
            await sync_to_async(outer.__enter__)()
            try:
                with pytest.raises(RuntimeError, match="outside of atomic"):
                    await awork()
            finally:
                await sync_to_async(outer.__exit__)(None, None, None)
                await sync_to_async(connections.close_all)()

        run(main)

    @pytest.mark.parametrize("connected", [False, True])
    def test_with_autocommit_off(self, connected: bool, name: str, other: OtherSession) -> None:
        """From the first statement on: a connection that is yet to be opened counts as what it will be."""
        with extra_alias("manual", AUTOCOMMIT=False) as alias:
            if connected:
                value("SELECT 1", alias=alias)
            with pytest.raises(RuntimeError, match="on 'manual' is committed"):
                every(name, using=alias)()

    def test_a_transaction_by_hand(self, name: str, other: OtherSession) -> None:
        value("SELECT 1")
        connection.connection.execute("BEGIN")
        with pytest.raises(RuntimeError, match="outside of atomic"):
            every(name)()
        connection.connection.execute("ROLLBACK")

    def test_another_alias_in_a_transaction(self, name: str, other: OtherSession) -> None:
        """What the body writes there could be committed after the next run."""
        with transaction.atomic(using="other"):
            value("SELECT 1", alias="other")
            with pytest.raises(TransactionManagementError, match="before the transaction on 'other' commits"):
                every(name)()
        assert every(name)() == "ran"


class TestInTestCase(TestCase):
    databases = {"default", "other"}  # noqa: RUF012

    def test_runs_as_in_production(self) -> None:
        work = every("in-test-case")
        assert [work(), work()] == ["ran", "skipped"]
        assert row("in-test-case").last_outcome == "succeeded"
        with transaction.atomic(), pytest.raises(RuntimeError):
            work()

    def test_nothing_is_left_of_another_test(self) -> None:
        assert not PeriodicRun.objects.filter(name="in-test-case").exists()
        self.test_runs_as_in_production()

    async def test_coroutines(self) -> None:
        @periodic_lock("in-test-case", min_interval=60)
        async def work() -> str:
            return "ran"

        assert [await work(), await work()] == ["ran", None]

    def test_a_missing_table_leaves_the_test_usable(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {TABLE} RENAME TO elsewhere")
        with pytest.raises(ImproperlyConfigured, match="migrate django_advisory_lock --database default"):
            every("in-test-case")()
        assert value("SELECT 1") == 1

    def test_a_body_that_fails_in_the_database(self) -> None:
        def work() -> None:
            with transaction.atomic():
                value("SELECT 1 / 0")

        with pytest.raises(DataError):
            periodic_lock("in-test-case", min_interval=60)(work)()
        assert row("in-test-case").last_outcome == "failed"


class TestDatabases:
    def test_two_databases_are_two_pieces_of_work(self, name: str, other: OtherSession) -> None:
        assert every(name)() == "ran"
        with running(name, using="other"):
            assert row(name, "other").is_started
        assert every(name)() == "skipped"
        assert every(name, using="other")() == "skipped"

    def test_two_aliases_of_one_database_are_one(self, name: str, other: OtherSession) -> None:
        with running(name):
            assert every(name, MOMENT, using="same")() == "skipped"
        assert every(name, 60, using="same")() == "skipped"
        assert every(name, MOMENT, using="same")() == "ran"
        connections["same"].close()

    def test_the_setting_names_the_database(self, name: str, other: OtherSession) -> None:
        work = every(name)
        with override_settings(ADVISORY_LOCK_DATABASE="other"):
            assert work() == "ran"
        assert row(name, "other").run_count == 1
        assert work() == "ran"

    def test_tenants(self, name: str, other: OtherSession) -> None:
        """Case 52: each namespace has its row and its lock; the name in it is the same."""
        tenants = iter(["a", "b", "a", "b"])
        work = every(name)
        with override_settings(ADVISORY_LOCK_NAMESPACE=lambda: next(tenants)):
            assert [work() for _ in range(4)] == ["ran", "ran", "skipped", "skipped"]
        assert work() == "ran"
        assert PeriodicRun.objects.filter(name=name).count() == 3

    def test_an_alias_that_is_none(self) -> None:
        with pytest.raises(ConnectionDoesNotExist, match="DATABASES has no 'nope'"):
            every("x", using="nope")()

    def test_another_engine(self) -> None:
        with pytest.raises(LockUnsupported, match="sqlite"):
            every("x", using="sqlite")()

    def test_behind_a_pooler(self, name: str, other: OtherSession) -> None:
        with bouncer("transaction") as pooler, pooler.alias() as alias:
            with pytest.raises(PoolerDetected):
                every(name, using=alias)()
        assert not PeriodicRun.objects.filter(name=name).exists()


class TestSetUp:
    def test_no_table(self, name: str, other: OtherSession) -> None:
        with extra_alias("bare", {"options": "-c search_path=pg_catalog"}) as alias:
            with pytest.raises(ImproperlyConfigured, match="migrate django_advisory_lock --database bare`"):
                every(name, using=alias)()
            assert value("SELECT 1", alias=alias) == 1
            with advisory_lock(name, using=alias) as lock:
                assert lock.is_held()

    def test_a_table_of_another_version(self, name: str, other: OtherSession) -> None:
        """Not what `migrate` is to be named for."""
        other.raw.execute(f"CREATE SCHEMA old CREATE TABLE {TABLE} (id int)")
        try:
            with extra_alias("old", {"options": "-c search_path=old"}) as alias:
                with pytest.raises(Error, match=r"last_started_at|does not exist"):
                    every(name, using=alias)()
        finally:
            other.raw.execute("DROP SCHEMA old CASCADE")

    @modify_settings(INSTALLED_APPS={"remove": ["django_advisory_lock"]})
    def test_the_app_is_not_installed(self, name: str, other: OtherSession) -> None:
        with pytest.raises(ImproperlyConfigured, match="add 'django_advisory_lock' to INSTALLED_APPS"):
            every(name)()
        assert other.is_free(key_of(name))

    def test_in_a_process_without_the_app(self, other: OtherSession) -> None:
        """All but periodic work does without."""
        process = subprocess.run(
            [sys.executable, "-W", "error", "-c", WITHOUT_APP],
            env=environment(DJANGO_SETTINGS_MODULE=""),
            capture_output=True,
            text=True,
            timeout=3 * LIMIT,
            check=False,
        )
        assert (process.returncode, process.stdout) == (0, "locked\ntried\nadd 'django_advisory_lock'\n"), (
            process.stderr
        )


WITHOUT_APP = """
import django
from django.conf import settings
from testproject.embedded_postgres import database_settings

settings.configure(DATABASES={"default": database_settings()}, INSTALLED_APPS=[])
django.setup()

from django.core.exceptions import ImproperlyConfigured
from django_advisory_lock import advisory_lock, periodic_lock, try_advisory_lock

with advisory_lock("without-app"):
    print("locked")
print(try_advisory_lock("without-app")(lambda: "tried")())
try:
    periodic_lock("without-app", min_interval=1)(print)()
except ImproperlyConfigured as error:
    print(str(error)[str(error).index("add"):].partition(" to ")[0])
"""


def days_back_to_other_offset(zone: str) -> int:
    """Return how many days ago the clocks of a zone stood otherwise than now."""
    now = datetime.now(ZoneInfo("UTC"))

    def offset(days: int) -> timedelta | None:
        return (now - timedelta(days=days)).astimezone(ZoneInfo(zone)).utcoffset()

    return next(days for days in range(2, 366) if offset(days) != offset(0) and offset(days + 1) != offset(0))


class TestDaylightSaving:
    """An interval of days is so many times 24 hours, also where the clocks were put forward or back in it."""

    zone = "Europe/Berlin"

    def check(self, alias: str, name: str, other: OtherSession) -> None:
        days = days_back_to_other_offset(self.zone)
        work = every(name, timedelta(days=days), using=alias)
        work()
        set_back(name, days * 86400 - 1200, other)
        assert work() == "skipped"
        set_back(name, 1200, other)
        assert work() == "ran"
        wall_clock = f"SELECT extract(epoch FROM now() - (now() - interval '{days} days'))::int"
        assert abs(value(wall_clock, alias=alias) - days * 86400) == 3600  # how it would come out otherwise

    def test_with_time_zones(self, name: str, other: OtherSession) -> None:
        with extra_alias("berlin", TIME_ZONE=self.zone) as alias:
            self.check(alias, name, other)

    def test_without_time_zones(self, name: str, other: OtherSession) -> None:
        connection.close()
        with override_settings(USE_TZ=False, TIME_ZONE=self.zone):
            self.check("default", name, other)
            connection.close()

    @pytest.mark.parametrize("use_tz", [True, False])
    @pytest.mark.parametrize(
        ("started", "finished"),
        [
            ("2024-10-27 00:30:00+00", "2024-10-27 01:10:00+00"),  # 02:30 to 02:10, an hour that comes twice
            ("2024-03-31 00:50:00+00", "2024-03-31 01:30:00+00"),  # 01:50 to 03:30
        ],
        ids=["back", "forward"],
    )
    def test_the_duration_of_a_run(
        self, started: str, finished: str, use_tz: bool, name: str, other: OtherSession
    ) -> None:
        every(name)()
        text = f"UPDATE {TABLE} SET last_started_at = %s, last_finished_at = %s WHERE name = %s RETURNING 1"
        assert other.one(text, [started, finished, name])
        connection.close()
        with override_settings(USE_TZ=use_tz, TIME_ZONE=self.zone):
            with extra_alias("berlin", TIME_ZONE=self.zone if use_tz else None) as alias:
                assert row(name, alias).duration == timedelta(minutes=40)
        connection.close()

    def test_a_run_that_has_no_duration(self) -> None:
        now = datetime.now(ZoneInfo("UTC"))
        before = now - timedelta(seconds=1)
        assert PeriodicRun(last_started_at=now, last_finished_at=before).duration is None
        assert PeriodicRun(last_started_at=now).duration is None
        assert PeriodicRun(last_finished_at=now).duration is None
        assert PeriodicRun(last_started_at=before, last_finished_at=now).duration == timedelta(seconds=1)


# Interrupts


def periodically(name: str) -> None:
    every(name, MOMENT)()


# A body that fails is left out: Python never forgets an error where a trace function raises at the end of its `with`.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_at_every_line(name: str, other: OtherSession) -> None:
    """Case 67: no lock stays, and nothing stops the next run."""
    periodically(name)
    strike_at_every_line(INTERRUPTS["sigint"], lambda: periodically(name), [key_of(name)], other)
    assert every(name, MOMENT)() == "ran"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_at_every_line_of_a_run_that_is_skipped(name: str, other: OtherSession) -> None:
    other.take(key_of(name))
    strike_at_every_line(INTERRUPTS["sigint"], lambda: periodically(name), [], other)
    other.drop(key_of(name))


# Several processes

HOST = """
import json, sys, time
from django.db import connection
from django_advisory_lock import periodic_lock, try_advisory_lock

name = sys.argv[1]
plain = try_advisory_lock(name, default="skipped")(lambda: "ran")
periodic = periodic_lock(name, min_interval=60, default="skipped")(lambda: "ran")
connection.ensure_connection()
print("ready", flush=True)
while line := sys.stdin.readline():
    print({"plain": plain, "periodic": periodic}[line.strip()](), time.time(), flush=True)
"""


class Host:
    """A process whose clock is wrong by some seconds."""

    def __init__(self, shift: int, name: str) -> None:
        program = [tool("faketime", "faketime"), "-f", f"{shift:+d}s"]
        code = f"import django; django.setup()\n{HOST}"
        self.process = subprocess.Popen(
            [*program, sys.executable, "-c", code, name],
            env=environment(FAKETIME_DONT_FAKE_MONOTONIC="1", DONT_FAKE_MONOTONIC="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline() or output(self.process)

    def does(self, what: str) -> tuple[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        answer, clock = self.hears().split()
        return answer, float(clock)


def test_three_hosts_with_clocks_of_their_own(name: str, other: OtherSession) -> None:
    """Case 59: a job of a moment, on hosts that come 300 ms apart. The lock alone runs it three times."""
    hosts = [Host(shift, name) for shift in (-60, 0, 60)]
    try:
        for host in hosts:
            assert host.hears() == "ready\n"
        answers: dict[str, list[tuple[str, float]]] = {"plain": [], "periodic": []}
        for host in hosts:
            for what, given in answers.items():
                given.append(host.does(what))
            time.sleep(0.3)  # what this case is about
        assert [answer for answer, _ in answers["plain"]] == ["ran"] * 3
        assert [answer for answer, _ in answers["periodic"]] == ["ran", "skipped", "skipped"]
        clocks = [clock for _, clock in answers["periodic"]]
        assert clocks[1] - clocks[0] > 59
        assert clocks[2] - clocks[1] > 59
        set_back(name, 60, other)
        assert [host.does("periodic")[0] for host in reversed(hosts)] == ["ran", "skipped", "skipped"]
        for host in hosts:
            output(host.process)
    finally:
        for host in hosts:
            host.process.kill()
            host.process.communicate()
    assert row(name).run_count == 2


# One interpreter that forks: what it prints is a line of JSON for each child.
FORKS = """
import json, os, signal, sys, threading, time
from django.db import connection, connections
from django_advisory_lock import advisory_lock, periodic_lock

name, count = sys.argv[1], int(sys.argv[2])
starting, go = os.pipe()
ready, is_ready = os.pipe()


def child():
    signal.alarm(60)
    os.close(go)
    connection.ensure_connection()
    os.write(is_ready, b".")
    os.read(starting, 1)
    return work()


def in_threads(count, function):
    threads = [threading.Thread(target=function) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@WORK@

children = []
for _ in range(count):
    pid = os.fork()
    if pid == 0:
        try:
            answer = child()
        except BaseException as error:
            answer = repr(error)
        os.write(1, (json.dumps(answer) + "\\n").encode())
        os._exit(0)
    children.append(pid)
for _ in range(count):
    os.read(ready, 1)
os.close(go)
for pid in children:
    os.waitpid(pid, 0)
"""

AT_ONCE = """
def work():
    answers = [periodic_lock(name, min_interval=60, default="skipped")(lambda: "ran")()]
    with advisory_lock(name):
        return [*answers, "ran"]
"""

HAMMER = """
STARTED = "SELECT extract(epoch FROM last_started_at)::text FROM django_advisory_lock_periodicrun WHERE name = %s"


def hammer(interval, seconds, starts):
    def started():
        with connection.cursor() as cursor:
            cursor.execute(STARTED, [name])
            starts.append(float(cursor.fetchone()[0]))

    call = periodic_lock(name, min_interval=interval)(started)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        call()
    connections.close_all()


def work():
    kept, control = [], []
    in_threads(8, lambda: hammer(0.15, 1, kept))
    in_threads(8, lambda: hammer(0.000001, 0.2, control))
    return kept, control
"""


def in_forks(work: str, name: str, count: int) -> list[Any]:
    return [json.loads(line) for line in output(spawn(FORKS.replace("@WORK@", work), name, str(count))).splitlines()]


def test_fifty_processes_at_once(name: str, other: OtherSession) -> None:
    """Case 76: one runs. The plain lock, where they wait for it, lets all of them run."""
    answers = in_forks(AT_ONCE, name, 50)
    assert sorted(first for first, _ in answers) == ["ran"] + ["skipped"] * 49
    assert [second for _, second in answers] == ["ran"] * 50
    assert row(name).run_count == 1


def gaps(starts: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(starts)]


def test_many_threads_of_many_processes(name: str, other: OtherSession) -> None:
    """By the database's clock no two starts are closer than the interval, and each is noted; without it they are."""
    answers = in_forks(HAMMER, name, 4)
    kept = sorted(start for one, _ in answers for start in one)
    control = sorted(start for _, one in answers for start in one)
    assert len(kept) >= 2
    assert min(gaps(kept)) >= 0.15 - 1e-6  # what a float of an epoch tells
    assert len(kept) + len(control) == row(name).run_count
    assert min(gaps(control)) < 0.15
