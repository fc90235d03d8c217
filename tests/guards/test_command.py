"""Ten copies of a command start at once: one works, nine skip."""

from __future__ import annotations

import io
import logging
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import BaseCommand, CommandError, call_command
from django.db import connection, connections, transaction
from django.test import TestCase, override_settings

from django_advisory_lock import (
    AdvisoryLockCommandMixin,
    LockLost,
    LockTimeout,
    PoolerDetected,
    advisory_lock,
    lock_key,
)
from tests.guards.periods import Runs
from tests.support import LIMIT, OtherSession, Thread, backend_pid, spawn, statements, value, wait_until

MODULE = "tests.testapp.management.commands.work"


def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start a management command in a process of its own."""
    code = (
        "import sys\nfrom django.core.management import execute_from_command_line\nexecute_from_command_line(sys.argv)"
    )
    return spawn(code, *arguments, **environment)


def called(command: Any, *arguments: str, **options: Any) -> str:
    out = io.StringIO()
    call_command(command, *arguments, stdout=out, **options)
    return out.getvalue()


class Work(AdvisoryLockCommandMixin, BaseCommand):
    """A command to be called as an object."""

    def __init__(self, body: Any = None, **attributes: Any) -> None:
        super().__init__()
        self.body = body
        vars(self).update(attributes)

    def handle(self, *args: Any, **options: Any) -> Any:
        return self.body() if self.body else "ran"


class TestRuns:
    def test_under_the_lock_and_free_right_after(self, name: str, other: OtherSession) -> None:
        """Case 71: twice in one process, with and without a pool."""
        for using in ("default", "pooled", "default", "pooled"):
            seen: list[bool] = []
            command = Work(
                lambda seen=seen: seen.append(other.is_free(lock_key(name))), lock_key=name, lock_using=using
            )
            called(command)
            assert seen == [False]
            assert other.is_free(lock_key(name))
            assert command.held_lock is None
        connections["pooled"].close()

    def test_the_default_key_is_the_module(self, other: OtherSession) -> None:
        """Case 74: whatever the arguments."""
        key = lock_key("command", MODULE)
        other.take(key)
        assert called("work", "--wait").startswith(f"Skipped. The lock 'command:{MODULE}'")
        other.drop(key)
        assert "working" in called("work", verbosity=2)

    def test_a_key_from_the_options(self, name: str, other: OtherSession) -> None:
        """Case 74: a lock for each tenant."""
        other.take(lock_key(name, "a"))

        class PerTenant(Work):
            def add_arguments(self, parser: Any) -> None:
                parser.add_argument("tenant")

            def get_lock_key(self, *args: Any, **options: Any) -> tuple[str, ...]:
                assert not [option for option in options if "lock" in option]
                return name, options["tenant"]

        assert called(PerTenant(), "a").startswith("Skipped")
        assert called(PerTenant(), "b") == "ran\n"
        other.drop(lock_key(name, "a"))

    def test_a_tenant_of_its_own_namespace(self, other: OtherSession) -> None:
        """Case 52."""
        other.take(lock_key("command", MODULE))
        assert called("work").startswith("Skipped")
        with override_settings(ADVISORY_LOCK_NAMESPACE="tenant-b"):
            assert "working" in called("work")

    def test_the_handle_is_at_hand(self, name: str, other: OtherSession) -> None:
        def body() -> str:
            assert command.held_lock is not None
            command.held_lock.check()
            return command.held_lock.key.name

        command = Work(body, lock_key=name)
        assert called(command) == f"{name}\n"

    def test_a_nested_call_runs(self, name: str, other: OtherSession) -> None:
        """Case 74: the same command from within itself."""
        command = Work(lambda: called(Work(lock_key=name)).strip(), lock_key=name)
        assert called(command) == "ran\n"

    def test_executed_without_a_parser(self, name: str, other: OtherSession) -> None:
        options = {"force_color": False, "no_color": True, "skip_checks": True, "verbosity": 0}
        other.take(lock_key(name))
        assert Work(lock_key=name).execute(**options) is None
        with pytest.raises(CommandError):
            Work(lock_key=name).execute(lock_busy_exit_code=3, **options)
        assert Work(lock_key=name).execute(no_lock=True, **options) == "ran"

    def test_an_alias_from_the_options(self, name: str, other: OtherSession) -> None:
        class Somewhere(Work):
            lock_key = name

            def add_arguments(self, parser: Any) -> None:
                parser.add_argument("--database")

            def get_lock_using(self, *args: Any, **options: Any) -> str:
                return str(options["database"])

        other.take(lock_key(name))
        assert called(Somewhere(), database="other") == "ran\n"
        assert called(Somewhere(), database="same").startswith("Skipped")

    def test_shared(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name), shared=True)
        assert called(Work(lock_key=name, lock_shared=True)) == "ran\n"
        assert called(Work(lock_key=name)).startswith("Skipped")

    def test_inside_a_transaction_it_lasts_until_the_commit(self, name: str, other: OtherSession) -> None:
        with transaction.atomic():
            called(Work(lock_key=name))
            assert not other.is_free(lock_key(name))
        assert other.is_free(lock_key(name))


class TestBusy:
    def test_skips_with_one_line(self, name: str, other: OtherSession) -> None:
        """Case 35, 64, 73: which lock, who holds it."""
        other.take(lock_key(name))
        out = called("work", key=name)
        assert out.count("\n") == 1
        for part in ("Skipped", name, str(lock_key(name).args[0]), f"pid {other.pid} (other-session), idle for"):
            assert part in out
        assert called("work", key=name, verbosity=0) == ""

    def test_an_exit_code(self, name: str, other: OtherSession) -> None:
        """Case 64."""
        other.take(lock_key(name))
        out = io.StringIO()
        for command, options in (("strict_work", {}), ("work", {"lock_busy_exit_code": 75})):
            with pytest.raises(CommandError, match=name) as caught:
                call_command(command, key=name, stdout=out, **options)
            assert caught.value.returncode == 75
            assert isinstance(caught.value.__cause__, LockTimeout)
        assert out.getvalue() == ""

    def test_exit_codes_of_processes(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        strict, lenient, option = (
            run(*arguments, "--key", name)
            for arguments in (["strict_work"], ["work"], ["work", "--lock-busy-exit-code", "3"])
        )
        assert "CommandError: The lock" in strict.communicate(timeout=LIMIT)[1]
        assert "Skipped" in lenient.communicate(timeout=LIMIT)[0]
        option.communicate(timeout=LIMIT)
        assert [strict.returncode, lenient.returncode, option.returncode] == [75, 0, 3]

    def test_a_hook(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))

        class Hooked(Work):
            def handle_lock_busy(self, error: LockTimeout, *args: Any, **options: Any) -> str:
                assert error.key == lock_key(name)
                return f"busy at {options['verbosity']}"

        assert called(Hooked(lock_key=name)) == "busy at 1\n"

    @pytest.mark.parametrize("raised", [LockTimeout("of the body"), PoolerDetected("of the body")], ids=repr)
    def test_other_errors_pass_through(self, raised: Exception, name: str, other: OtherSession) -> None:
        def body() -> None:
            raise raised

        with pytest.raises(type(raised), match="of the body"):
            called(Work(body, lock_key=name))
        assert other.is_free(lock_key(name))

    def test_it_leaves_no_connection(self, name: str, other: OtherSession) -> None:
        """Case 58: the skipped run."""
        other.take(lock_key(name))
        process = run("work", "--key", name, PGAPPNAME=name)
        process.communicate(timeout=LIMIT)
        wait_until(lambda: other.one("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name]) == 0)


class TestOptions:
    def test_waits_when_told(self, name: str, other: OtherSession) -> None:
        """Case 69, 73: by polling, so that nothing stands in the server's queue."""
        key = lock_key(name)
        other.take(key)
        started = threading.Event()
        command = Work(lock_key=name, lock_timeout=LIMIT)

        def call() -> str:
            def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
                result = execute(sql, params, many, context)
                started.set()
                return result

            with connection.execute_wrapper(wrapper):
                return called(command)

        waiting = Thread(call)
        assert started.wait(10)
        assert other.waiters(key) == 0
        other.drop(key)
        assert waiting.result() == "ran\n"

    def test_time_is_up(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        assert "within 0.05 s" in called("work", key=name, lock_timeout=0.05)
        process = run("work", "--key", name, "--lock-timeout", "0.05")
        assert "within 0.05 s" in process.communicate(timeout=LIMIT)[0]

    @pytest.mark.parametrize("told", ["lock_timeout=None", "'--lock-timeout', 'none'"])
    def test_none_waits_for_ever(self, told: str, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key)
        process = spawn(
            f"from django.core.management import call_command\ncall_command('work', {told}, key={name!r})",
            PGAPPNAME=name,
        )
        tried = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND query LIKE '%%pg_try_%%'"
        wait_until(lambda: other.one(tried, [name]), "it has tried")
        other.drop(key)
        assert "working" in process.communicate(timeout=LIMIT)[0]

    def test_no_lock(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name))
        assert "working" in called("work", key=name, no_lock=True)
        assert "working" in called("work", "--no-lock", key=name)

    def test_handle_does_not_see_them(self, name: str, other: OtherSession) -> None:
        assert "working []" in called("work", "--lock-timeout", "1", "--lock-busy-exit-code", "3", key=name)

    def test_they_are_in_a_group_of_their_own(self) -> None:
        text = Work().create_parser("manage.py", "work").format_help()
        assert text.index("advisory lock:") < text.rindex("--lock-timeout SECONDS")

    def test_a_command_keeps_its_own(self, other: OtherSession) -> None:
        assert called("own_options") == "mine False\n"
        assert called("own_options", "--lock-timeout", "x", "--no-lock") == "x False\n"

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--lock-timeout", "-1"),
            ("--lock-timeout", "nan"),
            ("--lock-timeout", "soon"),
            ("--lock-busy-exit-code", "256"),
        ],
        ids=str,
    )
    def test_bad_values(self, arguments: tuple[str, str]) -> None:
        with pytest.raises(CommandError, match=arguments[0]):
            call_command("work", *arguments)

    def test_the_object_is_as_before(self, name: str, other: OtherSession) -> None:
        command = Work(lock_key=name, lock_busy_exit_code=7)
        before = dict(vars(command))
        called(command, lock_busy_exit_code=3)
        assert command.lock_busy_exit_code == 7
        assert before.keys() - vars(command).keys() == set()
        assert "handle" not in vars(command)
        assert "held_lock" not in vars(command)


class TestProcesses:
    def test_many_copies_one_works(self, name: str, other: OtherSession) -> None:
        """Case 58: run, skipped, and run again when the first is done."""
        copies = [run("work", "--key", name, "--wait") for _ in range(4)]
        wait_until(lambda: sum(copy.poll() is None for copy in copies) == 1, "three have skipped")
        assert not other.is_free(lock_key(name))
        outputs = [copy.communicate("\n", timeout=LIMIT)[0] for copy in copies]
        assert sorted("working" in out for out in outputs) == [False, False, False, True]
        assert all(copy.returncode == 0 for copy in copies)
        assert "working" in called("work", key=name)

    def test_killed_in_the_middle(self, name: str, other: OtherSession) -> None:
        """Case 60, 61: the next run gets in at once, nothing to clean up."""
        holder = run("work", "--key", name, "--wait")
        assert holder.stdout is not None
        assert "working" in holder.stdout.readline()
        assert called("work", key=name).startswith("Skipped")
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=LIMIT)
        other.wait_until_free(lock_key(name))
        assert "working" in called("work", key=name)

    def test_killed_in_the_middle_of_a_query(self, name: str, other: OtherSession) -> None:
        """Case 35: busy for as long as the server still works for the dead client, then free by itself."""
        other.one("SELECT pg_advisory_lock(%s) IS NULL", lock_key(name, "gate").args)
        holder = spawn(
            "from django.db import connection\nfrom django_advisory_lock import *\n"
            f"with advisory_lock({name!r}):\n"
            f" connection.cursor().execute('SELECT pg_advisory_lock(%s)', lock_key({name!r}, 'gate').args)",
        )
        other.wait_for_waiters(lock_key(name, "gate"))
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=LIMIT)
        other.one("SELECT pg_advisory_unlock(%s)", lock_key(name, "gate").args)
        other.wait_until_free(lock_key(name))
        assert "working" in called("work", key=name, lock_timeout=LIMIT)

    def test_a_lost_lock_is_no_success(self, name: str, other: OtherSession) -> None:
        """Case 72."""
        holder = run("work", "--key", name, "--wait")
        assert holder.stdout is not None
        assert "working" in holder.stdout.readline()
        other.kill(other.holder(lock_key(name)))
        out, errors = holder.communicate("\n", timeout=LIMIT)
        assert holder.returncode != 0
        assert "LockLost" in errors
        assert "done" not in out

    def test_a_lost_lock_when_called(self, name: str, other: OtherSession) -> None:
        command = Work(lambda: other.kill(backend_pid()), lock_key=name)
        with pytest.raises(LockLost):
            called(command)

    def test_concurrent_migrations(self, name: str, other: OtherSession) -> None:
        """Case 68: on a database without any table; the others wait, find nothing to do, and succeed."""
        other.raw.execute(f'CREATE DATABASE "{name}"')
        code = """
from django.core.management import call_command
from django.core.management.commands.migrate import Command as Migrate
from django_advisory_lock import AdvisoryLockCommandMixin

class Command(AdvisoryLockCommandMixin, Migrate):
    lock_key = "migrate"
    lock_timeout = 60

call_command(Command(), verbosity=1)
"""
        try:
            copies = [spawn(code, PGDATABASE=name) for _ in range(3)]
            outputs = [copy.communicate(timeout=3 * LIMIT) for copy in copies]
            assert [copy.returncode for copy in copies] == [0, 0, 0], outputs
            assert sum("Applying contenttypes.0001_initial" in out for out, _ in outputs) == 1
            assert sum("No migrations to apply" in out for out, _ in outputs) == 2
        finally:
            other.raw.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


class TestRefusals:
    def test_the_wrong_order_of_bases(self) -> None:
        with pytest.raises(TypeError):
            type("Wrong", (BaseCommand, AdvisoryLockCommandMixin), {})

    def test_a_base_that_would_hide_the_lock(self) -> None:
        class Legacy(BaseCommand):
            def execute(self, *args: Any, **options: Any) -> str:
                return "unlocked"

        with pytest.raises(TypeError, match="Name AdvisoryLockCommandMixin first"):
            type("Wrong", (Legacy, AdvisoryLockCommandMixin), {})

        class Right(AdvisoryLockCommandMixin, Legacy):  # type: ignore[misc]
            """Locked first."""

        class Child(Right):
            def execute(self, *args: Any, **options: Any) -> Any:
                return super().execute(*args, **options)

        assert type("Grandchild", (Child,), {}).__mro__[1] is Child

    def test_a_coroutine_function(self) -> None:
        """Case 95."""

        async def handle(self: Any, *args: Any, **options: Any) -> None: ...

        with pytest.raises(TypeError, match="coroutine"):
            type("Wrong", (AdvisoryLockCommandMixin, BaseCommand), {"handle": handle})


@pytest.fixture
def runs(other: OtherSession) -> Iterator[Runs]:
    yield Runs()
    Runs().forget()


class Periodic(Work):
    """A command with an interval of a minute."""

    lock_min_interval: Any = 60


class Attempt:
    """A call in a thread, which tells when it has tried for the lock."""

    def __init__(self, command: BaseCommand, **options: Any) -> None:
        self.tried = threading.Event()
        self.thread = Thread(lambda: self._call(command, options))

    def _call(self, command: BaseCommand, options: dict[str, Any]) -> str:
        with connection.execute_wrapper(self._watch):
            return called(command, **options)

    def _watch(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if "pg_try_advisory_lock" in sql:
            self.tried.set()
        return result


class TestInterval:
    """`lock_min_interval`: at most one start in each interval."""

    def test_one_start_in_each(self, name: str, runs: Runs, other: OtherSession) -> None:
        """Case 59: however short the run."""
        command = Periodic(lock_key=name)
        with statements(5):
            assert called(command) == "ran\n"
        with statements(1):
            out = called(command)
        assert out.startswith("Skipped, too soon: started ")
        assert out.count("\n") == 1
        runs.let_pass(59, name)
        assert called(command).startswith("Skipped")
        runs.let_pass(2, name)
        assert called(command) == "ran\n"
        assert (runs.count(name), runs.outcome(name)) == (2, "succeeded")
        assert other.is_free(lock_key(name))

    @pytest.mark.parametrize("interval", [60, 60.0, timedelta(minutes=1)], ids=repr)
    def test_seconds_or_a_timedelta(self, interval: Any, name: str, runs: Runs) -> None:
        called(Work(lock_key=name, lock_min_interval=interval))
        assert runs.get(name).min_interval == timedelta(minutes=1)

    def test_the_default_key_is_the_module(self, runs: Runs) -> None:
        """Case 74."""
        assert called(Periodic()) == "ran\n"
        assert runs.get("command", __name__).name == f"command:{__name__}"

    def test_a_tenant_has_an_interval_of_its_own(self, name: str, runs: Runs) -> None:
        """Case 52, 74: by its key, or its namespace."""

        class PerTenant(Periodic):
            def add_arguments(self, parser: Any) -> None:
                parser.add_argument("tenant")

            def get_lock_key(self, *args: Any, **options: Any) -> tuple[str, ...]:
                assert not [option for option in options if "lock" in option]
                return name, options["tenant"]

        outputs = [called(PerTenant(), tenant)[:3] for tenant in ("a", "b", "a")]
        with override_settings(ADVISORY_LOCK_NAMESPACE="another"):
            outputs.append(called(PerTenant(), "a")[:3])
        assert outputs == ["ran", "ran", "Ski", "ran"]

    def test_a_subclass_with_another(self, name: str, runs: Runs) -> None:
        """The key is theirs, the interval is each one's own."""

        class Longer(Periodic):
            lock_min_interval = timedelta(hours=1)

        called(Periodic(lock_key=name))
        runs.let_pass(120, name)
        assert called(Longer(lock_key=name)).startswith("Skipped, too soon")
        assert called(Periodic(lock_key=name)) == "ran\n"

    def test_on_another_database(self, name: str, runs: Runs) -> None:
        """Case 57: its own table, its own interval."""
        assert called(Periodic(lock_key=name, lock_using="other")) == "ran\n"
        assert called(Periodic(lock_key=name, lock_using="other")).startswith("Skipped")
        assert called(Periodic(lock_key=name)) == "ran\n"
        assert (runs.count(name, using="other"), runs.count(name)) == (1, 1)

    def test_the_handle_is_at_hand(self, name: str, runs: Runs, other: OtherSession) -> None:
        def body() -> str:
            assert command.held_lock is not None
            command.held_lock.check()
            return "checked"

        command = Periodic(body, lock_key=name)
        assert called(command) == "checked\n"
        assert called(command).startswith("Skipped")
        assert command.held_lock is None

    def test_shared(self, name: str, runs: Runs, other: OtherSession) -> None:
        """Two may hold the lock at once, and yet only one of them may start."""
        other.take(lock_key(name), shared=True)
        outputs = [called(Periodic(lock_key=name, lock_shared=True))[:3] for _ in range(2)]
        assert outputs == ["ran", "Ski"]

    def test_a_failure_counts(self, name: str, runs: Runs) -> None:
        def body() -> None:
            raise CommandError("no disk")

        with pytest.raises(CommandError, match="no disk"):
            called(Periodic(body, lock_key=name))
        assert called(Periodic(lock_key=name)).startswith("Skipped, too soon")
        assert (runs.outcome(name), runs.get(name).last_succeeded_at) == ("failed", None)
        assert "no disk" in runs.get(name).last_error

    def test_a_killed_run_counts(self, name: str, runs: Runs, other: OtherSession) -> None:
        """Case 61: for its interval, and no longer."""
        holder = run("periodic_work", "--key", name, "--wait")
        assert holder.stdout is not None
        assert "working" in holder.stdout.readline()
        busy = called("periodic_work", key=name, lock_ignore_interval=True)
        assert f"running elsewhere, last started by {runs.get(name).last_host}, process {holder.pid}," in busy
        holder.kill()
        holder.communicate(timeout=LIMIT)
        other.wait_until_free(lock_key(name))
        assert called("periodic_work", key=name).startswith("Skipped, too soon")
        assert runs.outcome(name) == "started"
        runs.let_pass(300, name)
        assert "working" in called("periodic_work", key=name)

    def test_a_lost_lock_is_no_success(self, name: str, runs: Runs, other: OtherSession) -> None:
        """Case 72: and the row says so, over a new session."""
        command = Periodic(lambda: other.kill(backend_pid()), lock_key=name)
        with pytest.raises(LockLost):
            called(command)
        assert runs.outcome(name) == "failed"
        assert "LockLost" in runs.get(name).last_error
        assert called(command).startswith("Skipped, too soon")

    def test_inside_a_transaction(self, name: str, runs: Runs, other: OtherSession) -> None:
        """Nobody would see the start before the COMMIT."""
        with transaction.atomic(), pytest.raises(RuntimeError, match=r"outside of atomic\(\)"):
            called(Periodic(lock_key=name))
        assert runs.count(name) == 0

    def test_within_itself_it_comes_too_soon(self, name: str, runs: Runs, other: OtherSession) -> None:
        """Case 74: the same command from within itself."""
        command = Periodic(lambda: called(Periodic(lock_key=name)).strip(), lock_key=name)
        assert called(command).startswith("Skipped, too soon")
        ignoring = Periodic(lambda: called(Periodic(lock_key=name), lock_ignore_interval=True).strip(), lock_key=name)
        assert called(ignoring, lock_ignore_interval=True).startswith("Skipped, running already")
        assert other.is_free(lock_key(name))

    def test_a_failure_after_a_run_within_itself_is_noted(self, name: str, runs: Runs) -> None:
        def body() -> None:
            called(Periodic(lock_key=name), lock_ignore_interval=True)
            raise CommandError("no disk")

        with pytest.raises(CommandError):
            called(Periodic(body, lock_key=name))
        assert runs.outcome(name) == "failed"

    def test_without_one_nothing_is_noted(self, name: str, runs: Runs) -> None:
        with statements(2):
            called(Work(lock_key=name))
        assert runs.count(name) == 0


class TestIntervalWhenBusy:
    def test_skips_with_one_line(
        self, name: str, runs: Runs, other: OtherSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Case 35, 62, 73: by whom, if that is known."""
        command = Periodic(lock_key=name)
        other.take(lock_key(name))
        with statements(2), caplog.at_level(logging.INFO):
            out = called(command)
        assert out == f"Skipped. The lock {name!r} on 'default' was not acquired: running elsewhere, holder unknown.\n"
        assert f"{__name__} was skipped. The lock {name!r}" in caplog.text
        assert runs.count(name) == 0
        assert called(command, verbosity=0) == ""

    def test_too_soon_is_logged(self, name: str, runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
        command = Periodic(lock_key=name)
        called(command)
        with caplog.at_level(logging.INFO):
            assert called(command, verbosity=0) == ""
        row = runs.get(name)
        assert f"{__name__} was skipped, too soon: started " in caplog.text
        assert f"ago by {row.last_host}, process {row.last_pid}, may start again in " in caplog.text

    def test_an_exit_code_is_for_busy_alone(self, name: str, runs: Runs, other: OtherSession) -> None:
        """Case 64: too soon is a run that has nothing to do."""
        command = Periodic(lock_key=name, lock_busy_exit_code=75)
        other.take(lock_key(name))
        with pytest.raises(CommandError) as caught:
            called(command)
        assert (caught.value.returncode, type(caught.value.__cause__)) == (75, LockTimeout)
        other.drop(lock_key(name))
        called(command)
        assert called(command).startswith("Skipped, too soon")

    def test_the_hook_is_for_busy_alone(self, name: str, runs: Runs, other: OtherSession) -> None:
        class Hooked(Periodic):
            def handle_lock_busy(self, error: LockTimeout, *args: Any, **options: Any) -> str:
                assert error.key is not None
                return f"busy: {error.key.name}"

        other.take(lock_key(name))
        assert called(Hooked(lock_key=name)) == f"busy: {name}\n"
        other.drop(lock_key(name))
        outputs = [called(Hooked(lock_key=name)) for _ in range(2)]
        assert outputs[0] == "ran\n"
        assert outputs[1].startswith("Skipped, too soon")

    def test_a_wait_in_vain(self, name: str, runs: Runs, other: OtherSession) -> None:
        other.take(lock_key(name))
        out = called(Periodic(lock_key=name, lock_timeout=0.05))
        assert f"within 0.05 s: held by pid {other.pid}" in out
        assert runs.count(name) == 0

    def test_too_soon_is_not_waited_for(self, name: str, runs: Runs, other: OtherSession) -> None:
        """A wait is for the lock alone."""
        called(Periodic(lock_key=name))
        other.take(lock_key(name))
        with statements(1):
            assert called(Periodic(lock_key=name, lock_timeout=None)).startswith("Skipped, too soon")

    @pytest.mark.parametrize(("interval", "outputs"), [(0.05, ["ran", "ran"]), (60, ["Ski", "ran"])])
    def test_who_has_waited_looks_again(
        self, interval: float, outputs: list[str], name: str, runs: Runs, other: OtherSession
    ) -> None:
        """Case 59: by then another one may have started, and that may be long ago."""

        def body() -> str:
            value("SELECT pg_sleep(0.06)")  # longer than the shorter interval, by the same clock
            return "ran"

        other.take(lock_key(name))
        attempts = [
            Attempt(Work(body, lock_key=name, lock_timeout=LIMIT, lock_min_interval=interval)) for _ in range(2)
        ]
        assert all(attempt.tried.wait(LIMIT) for attempt in attempts)
        other.drop(lock_key(name))
        said = sorted(attempt.thread.result() for attempt in attempts)
        assert [line[:3] for line in said] == outputs
        assert interval < 1 or said[0] == "Skipped, too soon: another one was faster.\n"
        assert runs.count(name) == outputs.count("ran")


class TestIntervalOptions:
    def test_only_where_there_is_an_interval(self, name: str, runs: Runs) -> None:
        assert "--lock-ignore-interval" not in Work().create_parser("manage.py", "work").format_help()
        text = Periodic().create_parser("manage.py", "work").format_help()
        assert text.index("advisory lock:") < text.rindex("--lock-ignore-interval")
        assert "Run although the last start is less than the command's interval ago." in " ".join(text.split())
        with pytest.raises(TypeError, match="lock_ignore_interval"):
            called(Work(lock_key=name), lock_ignore_interval=True)
        with pytest.raises(CommandError, match="--lock-ignore-interval"):
            called("work", "--lock-ignore-interval", key=name)

    def test_a_start_in_spite_of_the_interval(self, name: str, runs: Runs, other: OtherSession) -> None:
        """Case 81: under the lock all the same, and it counts."""
        assert "working []" in called("periodic_work", key=name)
        assert "working []" in called("periodic_work", "--lock-ignore-interval", key=name)
        assert "working []" in called("periodic_work", key=name, lock_ignore_interval=True)
        assert runs.count(name) == 3
        assert called("periodic_work", key=name).startswith("Skipped, too soon")
        other.take(lock_key(name))
        assert called("periodic_work", key=name, lock_ignore_interval=True).startswith("Skipped. The lock")

    def test_a_start_in_spite_of_a_clock_that_was_put_back(self, name: str, runs: Runs) -> None:
        """As after a failover to a server whose clock is behind."""
        called(Periodic(lock_key=name))
        runs.let_pass(-3600, name)
        assert called(Periodic(lock_key=name), lock_ignore_interval=True) == "ran\n"

    def test_it_keeps_the_interval_in_the_row(self, name: str, runs: Runs) -> None:
        called(Periodic(lock_key=name), lock_ignore_interval=True)
        assert runs.get(name).min_interval == timedelta(minutes=1)

    def test_a_command_keeps_its_own(self, name: str, runs: Runs) -> None:
        class Mine(Periodic):
            def add_arguments(self, parser: Any) -> None:
                parser.add_argument("--lock-ignore-interval", default="mine")

            def handle(self, *args: Any, **options: Any) -> str:
                return str(options["lock_ignore_interval"])

        assert called(Mine(lock_key=name)) == "mine\n"
        assert called(Mine(lock_key=name), "--lock-ignore-interval", "x").startswith("Skipped, too soon")

    def test_no_lock_is_no_interval(self, name: str, runs: Runs, other: OtherSession) -> None:
        """In spite of everything, and nothing is noted."""
        other.take(lock_key(name))
        with statements(0):
            assert [called(Periodic(lock_key=name), no_lock=True) for _ in range(2)] == ["ran\n"] * 2
        assert runs.count(name) == 0

    @pytest.mark.parametrize(
        ("interval", "error"),
        [
            (0, ValueError),
            (-1, ValueError),
            (timedelta(0), ValueError),
            (float("nan"), ValueError),
            (float("inf"), ValueError),
            (1e300, ValueError),
            ("5 minutes", TypeError),
            (True, TypeError),
        ],
        ids=repr,
    )
    def test_what_is_refused(self, interval: Any, error: type[Exception], name: str, runs: Runs) -> None:
        """When the class is made; of an object, before anything is sent."""
        with pytest.raises(error, match=r"^Wrong\.lock_min_interval: "):
            type("Wrong", (Work,), {"lock_min_interval": interval})
        if interval != 1e300:
            with statements(0), pytest.raises(error, match="min_interval"):
                called(Work(lock_key=name, lock_min_interval=interval))

    def test_a_property_is_asked_when_it_runs(self, name: str, runs: Runs) -> None:
        class Computed(Work):
            @property
            def lock_min_interval(self) -> timedelta:  # type: ignore[override]
                return timedelta(hours=1)

        called(Computed(lock_key=name))
        assert runs.get(name).min_interval == timedelta(hours=1)

    def test_the_object_is_as_before(self, name: str, runs: Runs) -> None:
        command = Periodic(lock_key=name)
        for _ in range(2):
            called(command, lock_ignore_interval=True)
        assert called(command).startswith("Skipped")
        assert not {"handle", "held_lock"} & vars(command).keys()


class TestIntervalInTestCase(TestCase):
    def test_the_transaction_of_a_test_is_none(self) -> None:
        outputs = [called(Periodic(lock_key="interval-in-a-test"))[:3] for _ in range(2)]
        assert outputs == ["ran", "Ski"]


def test_mutual_exclusion_is_not_deduplication(name: str, other: OtherSession) -> None:
    """Case 59: a short command that starts again after it has ended runs again."""
    assert called(Work(lock_key=name)) == called(Work(lock_key=name)) == "ran\n"


def test_a_view_and_a_command_may_share_a_key(name: str, other: OtherSession) -> None:
    with advisory_lock(name):
        assert value("SELECT 1") == 1
        waiting = Thread(lambda: called(Work(lock_key=name)))
        assert waiting.result().startswith("Skipped")
