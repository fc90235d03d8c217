"""What the pages say that tie the others together: the API, recipes, limits, how it works, promises, the comparison.

Their examples run, and their links are looked at, with those of all pages in test_docs. Here is what they claim.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, get_args

import pytest
from django.contrib.auth.models import Permission
from django.core.cache import cache
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connection, transaction
from django.http import HttpRequest
from django.test import RequestFactory

import django_advisory_lock
from django_advisory_lock import (
    LockDeadlock,
    LockTimeout,
    advisory_lock,
    advisory_lock_all,
    advisory_semaphore,
    conf,
    doctor,
    inspection,
    lock_key,
    model_key,
    signals,
    testing,
    try_advisory_lock,
)
from django_advisory_lock.doctor import Finding, FindingId, Severity
from django_advisory_lock.inspection import KeyLock
from django_advisory_lock.keys import LockKey
from django_advisory_lock.management.subcommands.diagnosing import Doctor, _document
from django_advisory_lock.management.subcommands.listing import List, document
from django_advisory_lock.management.subcommands.running import Run
from django_advisory_lock.management.subcommands.terminating import Terminate
from tests.support import OtherSession, Thread, statements, value
from tests.test_docs import BLOCKS, NAMES, PAGES, SIGNALS, SOURCE, cells, numbers, reader, run_section, table
from tests.test_peers import peer
from tests.testapp.models import Account

pytestmark = pytest.mark.slow


@pytest.fixture
def page(other: OtherSession) -> Iterator[dict[str, Any]]:
    with reader() as namespace:
        yield namespace


def words(text: str) -> list[str]:
    return text.split(", ")


class TestApi:
    """What docs/api.md has a place for."""

    TEXT = "\n".join(block.text for block in BLOCKS if block.page == "docs/api.md")

    def documented(self, module: str) -> set[str]:
        """Return the names below one `currentmodule`."""
        found, current = set(), ""
        for kind, name in re.findall(r"^\.\. ([\w:]+):: ([\w.]+)", self.TEXT, flags=re.MULTILINE):
            if kind == "currentmodule":
                current = name
            elif current == module:
                found.add(name)
        return found

    def test_every_name_of_the_facade(self) -> None:
        assert set(django_advisory_lock.__all__) <= self.documented("django_advisory_lock")

    @pytest.mark.parametrize("module", [doctor, inspection, testing, django_advisory_lock])
    def test_every_name_is_there(self, module: Any) -> None:
        names = {name for name in self.documented(module.__name__) if "." not in name}
        assert names
        assert [name for name in names if not hasattr(module, name)] == []

    def test_every_function_for_tests(self) -> None:
        made = {name for name, thing in vars(testing).items() if getattr(thing, "__module__", "") == testing.__name__}
        public = {name for name in made if name.startswith(("assert_", "hold_"))}
        assert public <= self.documented(testing.__name__)

    def test_every_question_about_locks(self) -> None:
        assert {"held_locks", "waiting_locks", "holders_of", "KeyLock"} <= self.documented(inspection.__name__)

    def test_every_signal(self) -> None:
        assert self.documented(signals.__name__) == set(SIGNALS)


class TestRecipes:
    """What docs/recipes.md says."""

    PAGE = "docs/recipes.md"

    @pytest.fixture(autouse=True)
    def empty_cache(self) -> Iterator[None]:
        cache.clear()
        yield
        cache.clear()

    def test_the_second_one_takes_what_the_first_one_made(self, page: dict[str, Any], other: OtherSession) -> None:
        run_section(self.PAGE, "rebuild-a-cache-once", page)
        cache.clear()
        computed = []

        def compute() -> dict[str, int]:
            computed.append(1)
            return {"tea": 4}

        page["compute_prices"] = compute
        other.take(lock_key("rebuild-prices"))
        threads = [Thread(page["prices"]) for _ in range(3)]
        other.wait_for_waiters(lock_key("rebuild-prices"), 3)
        other.drop(lock_key("rebuild-prices"))
        assert [thread.result() for thread in threads] == [{"tea": 4}] * 3
        assert computed == [1]

    def test_an_old_value_while_somebody_rebuilds(self, page: dict[str, Any], other: OtherSession) -> None:
        run_section(self.PAGE, "rebuild-a-cache-once", page)
        cache.set("prices-and-time", ({"tea": 1}, 0.0))
        other.take(lock_key("rebuild-prices"))
        assert page["prices_that_may_be_old"]() == {"tea": 1}
        other.drop(lock_key("rebuild-prices"))
        assert page["prices_that_may_be_old"]() == {"tea": 3}

    def test_a_customer_is_synced_once_at_a_time(self, page: dict[str, Any], other: OtherSession) -> None:
        run_section(self.PAGE, "one-sync-per-customer", page)
        pk = page["account"].pk
        post = RequestFactory().post("/")

        def tried() -> list[Any]:
            out = io.StringIO()
            call_command(page["Command"](), str(pk), stdout=out)
            answer = page["sync_now"](post, pk)
            return [page["SyncCustomer"]().run(pk), out.getvalue()[:7], answer.status_code, page["sync_all"]()]

        assert tried() == [f"synced {pk}", "synced ", 200, []]
        other.take(model_key(Account, pk=pk, purpose="sync"))
        assert tried() == [None, "Skipped", 409, [pk]]

    def test_a_leader_that_is_deposed_is_elected_again(self, page: dict[str, Any], other: OtherSession) -> None:
        command = run_section(self.PAGE, "a-leader", page)["Command"](stdout=io.StringIO())
        key, led = lock_key("dispatcher"), []

        class Done(Exception):
            pass

        def dispatch() -> None:
            led.append(other.holder(key))
            if len(led) == 2:
                raise Done
            other.kill(led[0])

        command.dispatch = dispatch
        with pytest.raises(Done):
            command.handle()
        assert command.stdout.getvalue().splitlines() == ["Leading.", "No longer the leader.", "Leading."]
        assert len(set(led)) == 2

    def test_the_database_is_away(self, page: dict[str, Any]) -> None:
        command = run_section(self.PAGE, "a-leader", page)["Command"](stdout=io.StringIO())
        command.pause = 0
        answers: list[Any] = [OperationalError("gone"), KeyboardInterrupt()]

        def lead(lock: Any) -> None:
            raise answers.pop(0)

        command.lead = lead
        with pytest.raises(KeyboardInterrupt):
            command.handle()
        assert command.stdout.getvalue().splitlines() == ["Leading.", "The database is away: gone", "Leading."]

    def test_a_fourth_export_comes_back_later(self, page: dict[str, Any]) -> None:
        export = run_section(self.PAGE, "at-most-so-many-exports", page)["export"]
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                assert export(HttpRequest()).status_code == 200
                stack.enter_context(advisory_semaphore("export", limit=3))
            answer = export(HttpRequest())
        assert (answer.status_code, answer["Retry-After"]) == (503, "30")

    def test_a_form_is_free_again_in_time(self, page: dict[str, Any]) -> None:
        run_section(self.PAGE, "who-is-at-it", page)
        begin = page["begin_editing"]
        page["Editing"].objects.update(until=value("SELECT now() - interval '1 second'"))
        assert begin(page["account"], "Grace")
        assert not begin(page["account"], "Ada")


class TestLimits:
    """What docs/limits.md says."""

    def circle(self, name: str, other: OtherSession, options: dict[str, Any]) -> BaseException | None:
        """Hold a row and want the lock, while the other session holds the lock and wants the row."""
        account = Account.objects.create()
        other.take(lock_key(name))
        row = "SELECT FROM testapp_account WHERE id = %s FOR UPDATE"
        has_row = threading.Event()

        def want_lock() -> None:
            with transaction.atomic():
                Account.objects.select_for_update().get(pk=account.pk)
                has_row.set()
                with advisory_lock(name, **options):
                    pass

        waiting = Thread(want_lock)
        try:
            assert has_row.wait(10)
            with contextlib.suppress(Exception):  # one of the two is the victim
                other.raw.execute(row, [account.pk])
            other.drop(lock_key(name))
            waiting.join(20)
            assert not waiting.is_alive()
            return waiting.error
        finally:
            other.drop(lock_key(name))
            account.delete()

    def test_a_circle_through_a_row_is_found(self, name: str, other: OtherSession) -> None:
        other.raw.execute("SET deadlock_timeout = '100ms'")
        found = self.circle(name, other, {})
        assert found is None or isinstance(found, LockDeadlock)

    def test_no_circle_is_seen_through_who_polls(self, name: str, other: OtherSession) -> None:
        """It ends by the timeout alone."""
        other.raw.execute("SET deadlock_timeout = '50ms'")
        assert isinstance(self.circle(name, other, {"poll_interval": 0.05, "timeout": 0.6}), LockTimeout)

    def test_a_shared_request_waits_behind_an_exclusive_one(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name), shared=True)
        waiting = Thread(lambda: advisory_lock(name).acquire().release())
        other.wait_for_waiters(lock_key(name))
        assert not try_advisory_lock(name, shared=True).acquire()
        assert not try_advisory_lock(name).acquire()
        other.drop(lock_key(name), shared=True)
        waiting.result()

    def test_readers_keep_out_a_writer_who_only_tries(self, name: str, other: OtherSession) -> None:
        other.take(lock_key(name), shared=True)
        assert not try_advisory_lock(name).acquire()
        with try_advisory_lock(name, shared=True) as second:
            other.drop(lock_key(name), shared=True)
            assert second
            assert not Thread(lambda: bool(try_advisory_lock(name).acquire())).result()


class TestHowItWorks:
    """What docs/how-it-works.md says."""

    @pytest.fixture(autouse=True)
    def rows(self) -> None:
        self.counts = {row[0]: row[1:] for row in table("docs/how-it-works.md", "what", columns=3)}

    def count(self, what: str) -> tuple[int, int]:
        take, free = self.counts.pop(what)
        return int(take), int(free)

    def test_statements(self, name: str, other: OtherSession) -> None:
        self.free_ones(name)
        self.busy_ones(name, other)
        assert self.counts == {}

    def free_ones(self, name: str) -> None:
        take, free = self.count("a free lock, with or without a timeout")
        for lock in (advisory_lock(name), advisory_lock(name, timeout=5)):
            self.takes(lock, take, free)
        self.takes(advisory_lock_all(name, (name, 2)), *self.count("several keys, free"))
        self.takes(advisory_semaphore(name, limit=2), *self.count("a slot of a semaphore, free"))
        with transaction.atomic():
            self.takes(advisory_lock(name), *self.count("a free lock in a transaction"))
            take, free = self.count('scope="session" in a transaction, free')
            with statements(take + free), advisory_lock(name, "2", scope="session"):
                pass

    def takes(self, lock: Any, take: int, free: int) -> None:
        with statements(take):
            handle = lock.acquire()
        with statements(free):
            handle.release()

    def busy_ones(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        other.take(key)
        self.waits_in_vain(try_advisory_lock(name), *self.count("a try that fails"))
        self.waits_in_vain(advisory_lock(name, timeout=0), *self.count("timeout=0 that fails"))
        other.drop(key)
        for what, timeout, in_transaction in (
            ("a busy lock, without a timeout, outside a transaction", None, False),
            ("a busy lock, with a timeout", 30, False),
            ("a busy lock in a transaction", None, True),
        ):
            take, free = self.count(what)
            other.take(key)

            def drop_once_waited_for() -> None:
                other.wait_for_waiters(key)
                other.drop(key)

            dropping = Thread(drop_once_waited_for)
            with transaction.atomic() if in_transaction else contextlib.nullcontext():
                self.takes(advisory_lock(name, timeout=timeout), take, free)
            dropping.result()

    def waits_in_vain(self, lock: Any, take: int, free: int) -> None:
        assert free == 0
        with statements(take), contextlib.suppress(LockTimeout):
            assert not lock.acquire()

    def test_a_lock_that_is_held_three_times_is_one_row(self, name: str, other: OtherSession) -> None:
        key = lock_key(name)
        with advisory_lock(name), advisory_lock(name), advisory_lock(name):
            assert other.holders(key) == 1
        assert other.is_free(key)

    def test_no_lock_is_freed_by_the_function_that_frees_all(self) -> None:
        assert "pg_advisory_unlock_all" not in SOURCE


class TestPromises:
    """What docs/promises.md says: a change of any of these fails here."""

    PAGE = "docs/promises.md"

    @pytest.mark.parametrize(("text", "golden"), table(PAGE, "in Python"))
    def test_golden_values(self, text: str, golden: str) -> None:
        assert eval(text, dict(NAMES)).args == numbers(golden)

    def test_settings(self) -> None:
        defaults = {
            "ADVISORY_LOCK_DATABASE": conf.get_database(),
            "ADVISORY_LOCK_NAMESPACE": conf.get_namespace(),
            "ADVISORY_LOCK_SESSION_POOLER": list(conf.session_pooler_aliases()),
            "ADVISORY_LOCK_SLOW_WAIT": conf.get_slow_wait(),
        }
        assert {name: eval(text) for name, text in cells(self.PAGE, "setting").items()} == defaults
        assert set(re.findall(r'_setting\("(\w+)"', SOURCE)) == set(defaults)

    def test_ids(self) -> None:
        checks, findings, severities, permissions = map(words, cells(self.PAGE, "what").values())
        assert checks == sorted(set(re.findall(r'"([EW]\d{3})"', SOURCE)))
        assert set(checks) == set(re.findall(r"^### ([EW]\d{3})$", PAGES["docs/checks.md"].read_text(), re.MULTILINE))
        assert tuple(findings) == get_args(FindingId)
        assert tuple(severities) == get_args(Severity)
        own = Permission.objects.filter(content_type__app_label="django_advisory_lock", codename__in=permissions)
        assert own.count() == len(permissions) == 2

    @pytest.mark.parametrize("subcommand", [List, Run, Terminate, Doctor])
    def test_exit_statuses(self, subcommand: Any) -> None:
        rows = cells(self.PAGE, "command")
        told = re.findall(r"^  (\S+)  +", subcommand.epilog.partition("exit status")[2], flags=re.MULTILINE)
        assert words(rows[f"advisory_lock {subcommand.name}"]) == told

    def test_names_in_json(self) -> None:
        rows = {row[0]: words(row[1]) for row in self.json_rows()}
        assert rows["each lock"] == list(document(KeyLock(LockKey((1,)), 7, False, False, True, "", None, None)))
        assert rows["each finding"] == [field.name for field in fields(Finding)]
        out = io.StringIO()
        call_command("advisory_lock", "list", "--json", stdout=out)
        for name, text in (("list", out.getvalue()), ("doctor", _document("default", []))):
            assert rows[f"{name} --json"] == list(json.loads(text))

    def json_rows(self) -> list[tuple[str, ...]]:
        section = PAGES[self.PAGE].read_text().partition("## JSON")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, flags=re.MULTILINE)
        return [(first.replace("`", ""), second) for first, second in rows if first not in ("command", "---")]

    def test_signals(self, name: str, other: OtherSession) -> None:
        sent: dict[str, set[str]] = {}

        def receiver(signal: str) -> Callable[..., None]:
            def receive(**kwargs: Any) -> None:
                sent[signal] = set(kwargs) - {"signal"}

            return receive

        receivers = {signal: receiver(signal) for signal in SIGNALS}
        for signal, receive in receivers.items():
            getattr(signals, signal).connect(receive)
        try:
            with advisory_lock(name):
                pass
            with pytest.raises(django_advisory_lock.LockLost), advisory_lock(name):
                connection.close()
            other.wait_until_free(lock_key(name))
            other.take(lock_key(name))
            assert not try_advisory_lock(name).acquire()
        finally:
            for signal, receive in receivers.items():
                getattr(signals, signal).disconnect(receive)
        assert {signal: set(words(text)) for signal, text in cells(self.PAGE, "signal").items()} == sent


class TestComparison:
    """What docs/comparison.md says of those that are here. Others were run by hand."""

    def lock_of(self, library: str, name: str) -> Callable[[], Any]:
        if library == "pglock":
            pglock = peer("pglock", "django-pglock")
            return lambda: pglock.advisory(name)
        pgware = peer("django_pg_utils", "django-pgware")
        return lambda: pgware.advisory_lock(name)

    def is_free(self, lock: Callable[[], Any]) -> bool:
        """Whether another thread gets it within 50 ms."""

        def take() -> bool:
            with connection.cursor() as cursor:
                cursor.execute("SET lock_timeout = 50")
                try:
                    with lock() as acquired:
                        return bool(acquired)
                except OperationalError:
                    return False

        return Thread(take).result()

    @pytest.mark.parametrize("library", ["pglock", "pgware"])
    def test_free_before_the_commit(self, library: str, name: str, other: OtherSession) -> None:
        lock = self.lock_of(library, name)
        with transaction.atomic():
            with lock():
                assert not self.is_free(lock)
            assert self.is_free(lock)

    @pytest.mark.parametrize(("library", "is_free"), [("pglock", True), ("pgware", False)])
    def test_a_database_error_in_a_transaction(
        self, library: str, is_free: bool, name: str, other: OtherSession
    ) -> None:
        lock = self.lock_of(library, name)
        warns = contextlib.nullcontext() if is_free else pytest.warns(RuntimeWarning, match="failed to release")
        with warns, pytest.raises(DatabaseError, match="division"), transaction.atomic(), lock():
            value("SELECT 1/0")
        assert self.is_free(lock) is is_free
        connection.close()

    @pytest.mark.parametrize("library", ["pglock", "pgware"])
    def test_nothing_is_said_of_a_connection_that_was_closed(
        self, library: str, name: str, other: OtherSession
    ) -> None:
        with self.lock_of(library, name)():
            connection.close()
        connection.close()

    def test_the_lock_timeout_of_the_session(self, name: str, other: OtherSession) -> None:
        pglock = peer("pglock", "django-pglock")
        try:
            value("SELECT set_config('lock_timeout', '7s', false)")
            with advisory_lock(name, timeout=1):
                pass
            assert value("SHOW lock_timeout") == "7s"
            with pglock.advisory(name, timeout=1):
                pass
            assert value("SHOW lock_timeout") == "0"
        finally:
            connection.close()

    def test_the_table_has_a_cell_for_each(self) -> None:
        rows = table("docs/comparison.md", "", columns=7)
        assert len(rows[0]) == 7
        assert all(all(row) for row in rows)
