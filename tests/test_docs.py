"""The pages that people read: every example runs, every link leads somewhere, every name exists, every claim is shown.

Examples run as they stand on the page, against the database of the tests, in a namespace with what a reader has:
the names of the library, an account, a name. `<!-- continues -->` before a block carries on with the names of the one
before it. A `pycon` block shows what comes out, and is compared.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import logging
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import unittest
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import psycopg
import pytest
from django.core.handlers.base import BaseHandler
from django.core.management import CommandError, call_command, load_command_class
from django.core.management.base import BaseCommand
from django.db import DatabaseError, IntegrityError, connection, connections, models, transaction
from django.db.models.signals import class_prepared
from django.dispatch import Signal
from django.http import HttpRequest, HttpResponse
from django.test import TestCase, override_settings
from django.test.utils import isolate_apps
from django.utils import timezone
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from psycopg.types.range import TimestamptzRange

import django_advisory_lock
from django_advisory_lock import (
    LockKey,
    LockLost,
    advisory_lock,
    lock_key,
    locks,
    model_key,
    semaphores,
    signals,
    testing,
    try_advisory_lock,
)
from django_advisory_lock.configured import ConfiguredLock
from django_advisory_lock.guards.admin import AdvisoryLockAdminMixin
from django_advisory_lock.inspection import KeyLock
from django_advisory_lock.keys import derive
from django_advisory_lock.management.subcommands.base import Subcommand, read_key
from django_advisory_lock.management.subcommands.listing import HEAD, List, document
from django_advisory_lock.management.subcommands.running import Run
from django_advisory_lock.management.subcommands.terminating import Terminate
from django_advisory_lock.models import PeriodicRun
from tests.support import (
    LIMIT,
    OtherSession,
    Thread,
    backend_pid,
    environment,
    extra_alias,
    parameters,
    run_nested,
    spawn,
    value,
    wait_until,
)
from tests.testapp.models import Account, Membership, Token

pytestmark = pytest.mark.slow
pytest_plugins = ["pytester"]

PROJECT = Path(__file__).resolve().parent.parent
PAGES = {path.relative_to(PROJECT).as_posix(): path for path in [PROJECT / "README.md", *PROJECT.glob("docs/*.md")]}
# Pages that stand for files beside docs/, which the index links to instead.
STAND_INS = {"docs/tour.md": "../README.md", "docs/changelog.md": "../CHANGELOG.md"}
CONTINUES = "<!-- continues -->"
SIGNALS = {name: thing for name, thing in vars(signals).items() if isinstance(thing, Signal)}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, below a heading."""

    page: str
    line: int
    heading: str
    language: str
    text: str
    continues: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def compile(self) -> Any:
        # The empty lines make a traceback name the line of the page.
        return compile("\n" * self.line + self.text, str(PAGES[self.page]), "exec", dont_inherit=True)

    def run(self, namespace: dict[str, Any]) -> None:
        if self.language == "python":
            exec(self.compile(), namespace)
        else:
            self._compare(namespace)

    def _compare(self, namespace: dict[str, Any]) -> None:
        example = doctest.DocTestParser().get_doctest(self.text, {}, str(self), str(PAGES[self.page]), self.line)
        example.globs = namespace
        told = io.StringIO()
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert runner.run(example, out=told.write, clear_globs=False).failed == 0, told.getvalue()


def read_blocks(page: str) -> Iterator[Block]:
    """Return the fenced blocks of a page."""
    lines = PAGES[page].read_text(encoding="utf-8").splitlines()
    heading, before, language, start = "", "", "", None
    for number, line in enumerate(lines):
        fence = re.fullmatch(r"```(\w*|{[\w-]+})\s*", line)
        if start is None and fence:
            start, language = number + 1, fence[1]
        elif start is not None and fence:
            text = "\n".join(lines[start:number]) + "\n"
            yield Block(page, start, heading, language, text, before == CONTINUES)
            start, before = None, ""
        elif start is None:
            heading = slug(line.lstrip("# ")) if re.match("#+ ", line) else heading
            before = line or before


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def read_examples() -> Iterator[list[Block]]:
    """Return the blocks of Python that belong together."""
    example: list[Block] = []
    for block in BLOCKS:
        if block.language not in ("python", "pycon"):
            continue
        if example and not (block.continues and block.page == example[0].page):
            yield example
            example = []
        example.append(block)
    yield example


@contextlib.contextmanager
def reader() -> Iterator[dict[str, Any]]:
    """Give a namespace with what a reader has, and to each model that an example defines a table."""
    made: list[type[models.Model]] = []

    def make_table(sender: type[models.Model], **kwargs: Any) -> None:
        with connection.schema_editor() as editor:
            editor.create_model(sender)
        made.append(sender)

    account = Account.objects.create(name="Ada")
    library = {name: getattr(django_advisory_lock, name) for name in django_advisory_lock.__all__}
    project = {"Account": Account, "BaseCommand": BaseCommand, "account": account, "name": "nightly-report"}
    modules = {"connection": connection, "models": models, "transaction": transaction, "zlib": zlib, "urlpatterns": []}
    namespace: dict[str, Any] = {
        "__name__": "tests.testapp.example",
        "contextmanager": contextlib.contextmanager,
        **library,
        **project,
        **modules,
    }
    with isolate_apps("tests.testapp"):
        class_prepared.connect(make_table)
        try:
            yield namespace
        finally:
            class_prepared.disconnect(make_table)
            forget_metrics(namespace)
            for model in reversed(made):
                with connection.schema_editor() as editor:
                    editor.delete_model(model)
            account.delete()
            PeriodicRun.objects.all().delete()


def forget_metrics(namespace: dict[str, Any]) -> None:
    """Disconnect the receivers of an example, and let its metrics be made once more."""
    for thing in namespace.values():
        if isinstance(thing, FunctionType):
            for signal in SIGNALS.values():
                signal.disconnect(thing)
        elif isinstance(thing, MetricWrapperBase):
            REGISTRY.unregister(thing)


def run_section(page: str, heading: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run the Python below one heading of a page and return its names."""
    blocks = [block for block in BLOCKS if (block.page, block.heading, block.language) == (page, heading, "python")]
    assert blocks, f"{page} has no example below #{heading}"
    for block in blocks:
        block.run(namespace)
    return namespace


class TestExamples:
    @pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=str)
    def test_it_compiles(self, block: Block) -> None:
        block.compile()

    @pytest.mark.parametrize("example", list(read_examples()), ids=lambda example: str(example[0]))
    def test_it_runs(self, example: list[Block], other: OtherSession) -> None:
        if find_spec("django.tasks") is None and any("from django.tasks import" in block.text for block in example):
            pytest.skip("django.tasks came with Django 6.0")
        with reader() as namespace:
            for block in example:
                block.run(namespace)

    @pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sql"], ids=str)
    def test_sql_runs(self, block: Block, other: OtherSession) -> None:
        """On top of the SQL that came before it on the page, which may define functions."""
        earlier = BLOCKS[: BLOCKS.index(block) + 1]
        with psycopg.connect(**parameters()) as raw:
            for each in earlier:
                if (each.page, each.language) == (block.page, "sql"):
                    raw.execute(each.text)
            raw.rollback()

    @pytest.mark.parametrize("block", BLOCKS, ids=str)
    def test_no_language_is_one_that_nobody_runs(self, block: Block) -> None:
        known = {"python", "pycon", "sql", "console", "text", "ini", "toml", "yaml", "diff"}
        assert block.language in known or (block.page, block.language) == ("docs/api.md", "{eval-rst}")

    @pytest.mark.parametrize("page", PAGES)
    def test_no_fence_is_left_open(self, page: str) -> None:
        fences = re.findall("^ *```.*$", PAGES[page].read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert len(fences) == 2 * sum(block.page == page for block in BLOCKS)

    @pytest.mark.parametrize("page", PAGES)
    def test_a_block_that_continues_has_one_before_it(self, page: str) -> None:
        lines = [line for line in PAGES[page].read_text(encoding="utf-8").splitlines() if line]
        heads = [block for example in read_examples() for block in example[:1]]
        assert not any(block.continues for block in heads)
        assert all(lines[number + 1].startswith("```py") for number, line in enumerate(lines) if line == CONTINUES)


def prose(page: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub("^```.*?^```", "", PAGES[page].read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    page = path.relative_to(PROJECT).as_posix()
    return {slug(heading.replace("`", "")) for heading in re.findall("^#+ (.*)$", prose(page), flags=re.MULTILINE)}


class TestLinks:
    @pytest.mark.parametrize("page", PAGES)
    def test_each_leads_somewhere(self, page: str) -> None:
        text = re.sub("`[^`]*`", "", prose(page))
        wrong = []
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            path = (PAGES[page].parent / name).resolve() if name else PAGES[page]
            if not path.exists() or (anchor and anchor not in anchors(path)):
                wrong.append(target)
        assert wrong == []

    def test_every_page_is_in_the_index(self) -> None:
        index = PAGES["docs/index.md"].read_text(encoding="utf-8")
        links = {page: STAND_INS.get(page, Path(page).name) for page in PAGES if page.startswith("docs/")}
        assert [page for page, link in links.items() if f"({link})" not in index] == ["docs/index.md"]


SOURCE = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted((PROJECT / "django_advisory_lock").rglob("*.py"))
)


MIXINS: dict[str, type] = {
    "docs/admin.md": AdvisoryLockAdminMixin,
    "docs/jobs.md": django_advisory_lock.AdvisoryLockJobMixin,
    "docs/views.md": django_advisory_lock.AdvisoryLockViewMixin,
}


class TestNames:
    """What a page calls a setting, an option or an attribute is one."""

    @pytest.mark.parametrize("page", PAGES)
    def test_settings(self, page: str) -> None:
        named = set(re.findall(r"\bADVISORY_LOCK_\w+", PAGES[page].read_text(encoding="utf-8")))
        assert {setting for setting in named if f'"{setting}"' not in SOURCE} == set()

    @pytest.mark.parametrize("page", PAGES)
    def test_options_of_commands(self, page: str) -> None:
        class Command(django_advisory_lock.AdvisoryLockCommandMixin, BaseCommand):
            """A command with the options of the mixin."""

            lock_min_interval = 60

        known = Command().create_parser("manage.py", "work").format_help()
        named = re.findall(r"--(?:no-)?lock[\w-]*", PAGES[page].read_text(encoding="utf-8"))
        assert [option for option in named if option not in known] == []

    @pytest.mark.parametrize("page", PAGES)
    def test_code_in_tables(self, page: str) -> None:
        """A word alone in the first cell of a row whose column is called after what it names."""
        for header, name in first_cells(page):
            if header in ("attribute", "hook"):
                assert hasattr(MIXINS.get(page, django_advisory_lock.AdvisoryLockCommandMixin), name), name
            elif header == "option":
                assert re.search(rf"^ +{name}: ", SOURCE, flags=re.MULTILINE), name
            elif header == "setting":
                assert f'"{name}"' in SOURCE, name

    @pytest.mark.parametrize("page", PAGES)
    def test_imports(self, page: str) -> None:
        text = PAGES[page].read_text(encoding="utf-8")
        for names in re.findall("^from django_advisory_lock import (.*)$", text, flags=re.MULTILINE):
            assert set(re.split(r",\s*", names)) - {"signals"} <= set(django_advisory_lock.__all__)


def tables(page: str) -> Iterator[list[list[str]]]:
    """Return the tables of a page: their rows with the text of the cells, the head first."""
    for table in re.findall(r"(?:^\|.*\|\n)+", prose(page), flags=re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in table.splitlines()]
        assert {len(row) for row in rows} == {len(rows[0])}, table
        yield [[cell.strip().replace("\\|", "|") for cell in row] for row in (rows[0], *rows[2:])]


def first_cells(page: str) -> Iterator[tuple[str, str]]:
    """Return the word in code that each row begins with, and the head of its column."""
    for head, *rows in tables(page):
        for row in rows:
            if word := re.match(r"`(\w+)", row[0]):
                yield head[0], word[1]


def table(page: str, head: str, columns: int = 2) -> list[tuple[str, ...]]:
    """Return the first cells of each row of the table with this head, without the marks of code."""
    rows = next(rows for first, *rows in tables(page) if first[0] == head)
    return [tuple(cell.replace("`", "") for cell in row[:columns]) for row in rows]


def cells(page: str, head: str) -> dict[str, str]:
    """Return the second cell of each row of a table by its first."""
    return {row[0]: row[1] for row in table(page, head)}


KEY_FUNCTIONS, TRIGGER, ALL_LOCKS, ONE_NAME = [
    block.text for block in BLOCKS if (block.page, block.language) == ("docs/keys.md", "sql")
]
NAMES: dict[str, Any] = {
    **{name: getattr(django_advisory_lock, name) for name in django_advisory_lock.__all__},
    "Account": Account,
    "Membership": Membership,
    "Token": Token,
    "UUID": uuid.UUID,
}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(", "))


class TestKeys:
    """What docs/keys.md says."""

    @pytest.fixture
    def server(self, other: OtherSession) -> Iterator[psycopg.Connection[Any]]:
        """A session with the functions of the page, which are gone after the test."""
        with psycopg.connect(**parameters()) as raw:
            raw.execute(KEY_FUNCTIONS)
            yield raw
            raw.rollback()

    def numbers_in_sql(self, server: psycopg.Connection[Any], text: str) -> tuple[int, ...]:
        row = server.execute(f"SELECT {text}").fetchone()
        return row or ()

    @pytest.mark.parametrize(("text", "error"), table("docs/keys.md", "refused"))
    def test_what_is_refused(self, text: str, error: str) -> None:
        parts = eval(text, {**NAMES, "account": Account(pk=1)})
        with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[error]):
            lock_key(*parts) if isinstance(parts, tuple) else lock_key(parts)

    @pytest.mark.parametrize(("text", "golden"), table("docs/keys.md", "key"))
    def test_golden_values(self, text: str, golden: str) -> None:
        assert eval(text, NAMES).args == numbers(golden)

    @pytest.mark.parametrize(("text", "recipe"), table("docs/keys.md", "in Python"))
    def test_python_and_sql_agree(self, text: str, recipe: str, server: psycopg.Connection[Any]) -> None:
        assert self.numbers_in_sql(server, recipe) == eval(text, NAMES).args

    @pytest.mark.parametrize(
        "parts",
        [
            *(["nightly-report"], ["é"], ["e\u0301"], ["鍵", "🔒"], ["a\nb", "%s", "'"], ["x" * 10_000]),
            *(["n", -(2**63)], ["n", -1], ["n", 0, 2**64], ["a", "bc"], ["ab", "c"], [str(uuid.UUID(int=7))]),
        ],
        ids=lambda parts: ascii(parts)[:30],
    )
    def test_the_function_in_sql(self, parts: list[Any], server: psycopg.Connection[Any]) -> None:
        texts = [str(part) for part in parts]
        row = server.execute("SELECT lock_key(VARIADIC %s::text[]), lock_scope(VARIADIC %s::text[])", [texts, texts])
        whole, scope = row.fetchone() or (None, None)
        assert whole == lock_key(*parts).args[0]
        assert scope == whole >> 32

    @pytest.mark.parametrize("parts", [["a", None], ["a", ""], ["a\x1fb"], [None]], ids=ascii)
    def test_the_function_in_sql_refuses(self, parts: list[Any], server: psycopg.Connection[Any]) -> None:
        with pytest.raises(psycopg.errors.RaiseException):
            server.execute("SELECT lock_key(VARIADIC %s::text[])", [parts])

    def test_a_trigger_and_a_block_exclude_each_other(self, server: psycopg.Connection[Any]) -> None:
        server.execute(TRIGGER)
        server.execute("CREATE TEMPORARY TABLE stock (id int)")
        server.execute("CREATE TRIGGER t BEFORE INSERT ON stock FOR EACH ROW EXECUTE FUNCTION keep_stock_together()")
        server.execute("INSERT INTO stock VALUES (42)")
        with try_advisory_lock("stock", 42) as same, try_advisory_lock("stock", 43) as another:
            assert (bool(same), bool(another)) == (False, True)
        server.rollback()
        with try_advisory_lock("stock", 42) as same:
            assert same

    def test_the_list_of_locks_shows_the_keys(self, name: str, server: psycopg.Connection[Any]) -> None:
        """Case 57."""
        singles = {lock_key(name), LockKey((-1,)), LockKey((2**63 - 1,)), LockKey((-(2**63),))}
        keys = singles | {LockKey.pair(-1, 7), LockKey.pair(2**31 - 1, -(2**31))}
        with contextlib.ExitStack() as stack:
            for key in keys:
                stack.enter_context(advisory_lock(key))
            rows = server.execute(ALL_LOCKS).fetchall()
        shown = {row[0]: row[1:4] for row in rows}
        assert shown.keys() == {str(key.args if len(key.args) == 2 else key.args[0]) for key in keys}
        assert set(shown.values()) == {(True, False, backend_pid())}

    def test_who_holds_one_name(self, server: psycopg.Connection[Any]) -> None:
        assert server.execute(ONE_NAME).fetchall() == []
        with advisory_lock("nightly-report"):
            holders = server.execute(ONE_NAME).fetchall()
        assert [holder[0] for holder in holders] == [backend_pid()]

    def test_tenants(self, other: OtherSession) -> None:
        """Case 52."""
        with reader() as page:
            run_section("docs/keys.md", "tenants", page)
            with override_settings(ADVISORY_LOCK_NAMESPACE=page["ADVISORY_LOCK_NAMESPACE"]):
                for_all = lock_key("rotate-logs", namespace="")
                page["rebuild_index"] = try_advisory_lock("rebuild-index", default="busy")(self.job)
                page["rotate_logs"] = try_advisory_lock(for_all, default="busy")(self.job)
                other.take(lock_key("rebuild-index", namespace="a"))
                other.take(lock_key("rotate-logs", namespace=""))
                assert [self.as_tenant(page, tenant) for tenant in "ab"] == [("busy", "busy"), ("ran", "busy")]

    def job(self) -> str:
        return "ran"

    def as_tenant(self, page: dict[str, Any], tenant: str) -> tuple[str, str]:
        token = page["tenant"].set(tenant)
        try:
            return page["rebuild_index"](), page["rotate_logs"]()
        finally:
            page["tenant"].reset(token)


class TestChoosing:
    """What docs/choosing.md says."""

    def test_constraints_bind_everybody(self, other: OtherSession) -> None:
        with reader() as page:
            run_section("docs/choosing.md", "constraints", page)
            during = TimestamptzRange(timezone.now(), None)
            page["Maintenance"].objects.create(during=during)
            page["Subscription"].objects.create(customer=1)
            page["Subscription"].objects.create(customer=1, active=False)
            for model, fields in (("Report", {"month": "2026-09"}), ("Subscription", {"customer": 1})):
                with pytest.raises(IntegrityError):
                    page[model].objects.create(**fields)
            with pytest.raises(IntegrityError):
                page["Maintenance"].objects.create(during=during)

    def test_workers_of_a_queue_do_not_wait_for_each_other(self, other: OtherSession) -> None:
        with reader() as page:
            run_section("docs/choosing.md", "queues", page)
            jobs = [page["Job"].objects.create(payload=f"{number}") for number in range(2)]
            with transaction.atomic():
                page["Job"].objects.select_for_update().get(pk=jobs[0].pk)
                assert Thread(page["work_off_one"]).result()
                assert not Thread(page["work_off_one"]).result()
            assert list(page["Job"].objects.filter(done=True, pk__gte=jobs[0].pk)) == [jobs[1]]

    def test_the_row_alone_lets_one_start_per_interval(self, other: OtherSession) -> None:
        """Case 59, 79."""
        with reader() as page:
            run_section("docs/choosing.md", "once-per-interval", page)
            barrier = threading.Barrier(8, timeout=LIMIT)
            assert sum(self.all_at_once(barrier, lambda: page["is_due"]("digest", page["timedelta"](hours=1)))) == 1
            page["Schedule"].objects.update(started_at=timezone.now() - page["timedelta"](hours=2))
            assert page["is_due"]("digest", page["timedelta"](hours=1))

    def all_at_once(self, barrier: threading.Barrier, function: Callable[[], Any]) -> list[Any]:
        def call() -> Any:
            connection.ensure_connection()
            barrier.wait()
            return function()

        threads = [Thread(call) for _ in range(barrier.parties)]
        return [thread.result() for thread in threads]

    def test_a_conflict_is_tried_again(self, other: OtherSession) -> None:
        with reader() as page:
            run_section("docs/choosing.md", "serializable", page)
            rows, seen = Account.objects.filter(pk=page["account"].pk), list[int]()

            def add_one() -> None:
                with connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
                account = rows.get()
                seen.append(account.balance)
                if len(seen) == 1:
                    other.raw.execute("UPDATE testapp_account SET balance = 10 WHERE id = %s", [account.pk])
                account.balance += 1
                account.save()

            page["serializable"](add_one)
            assert seen == [0, 10]
            assert rows.get().balance == 11

    @pytest.mark.parametrize("locked", [True, False])
    def test_the_lock_saves_the_work_and_the_constraint_the_result(self, locked: bool, other: OtherSession) -> None:
        """Without the lock both compute, and one fails."""
        with reader() as page:
            run_section("docs/choosing.md", "lock-and-constraint-together", page)
            barrier, computed = threading.Barrier(2, timeout=LIMIT), []

            def compute(month: str) -> int:
                computed.append(month)
                if not locked:
                    barrier.wait()
                return 7

            page["compute"] = compute
            if not locked:
                page["advisory_lock"] = lambda *key, timeout: contextlib.nullcontext()
            threads = [Thread(lambda: page["monthly_report"]("2026-10").total) for _ in range(2)]
            results = [thread.result() for thread in self.ended(threads) if thread.error is None]
            assert (len(computed), results) == ((1, [7, 7]) if locked else (2, [7]))
            assert page["Report"].objects.filter(month="2026-10").count() == 1

    def ended(self, threads: list[Thread[Any]]) -> list[Thread[Any]]:
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
            assert thread.error is None or isinstance(thread.error, IntegrityError)
        return threads


class TestTransactions:
    """What docs/transactions.md says."""

    @pytest.mark.parametrize(("scope", "left"), [("auto", 8), ("session", 9)])
    def test_a_lock_freed_before_the_commit_sells_a_piece_twice(
        self, scope: Any, left: int, name: str, other: OtherSession
    ) -> None:
        """Case 13: the steps of the table; `session` is the one that goes wrong."""
        stock = Account.objects.create(balance=10)
        is_block_over, may_commit = threading.Event(), threading.Event()

        def take_one(pause: Callable[[], object]) -> None:
            with transaction.atomic():
                with advisory_lock(name, scope=scope, timeout=LIMIT):
                    balance = Account.objects.get(pk=stock.pk).balance
                    Account.objects.filter(pk=stock.pk).update(balance=balance - 1)
                pause()

        def stop() -> None:
            is_block_over.set()
            assert may_commit.wait(LIMIT)

        try:
            first = Thread(lambda: take_one(stop))
            assert is_block_over.wait(LIMIT)
            second = Thread(lambda: take_one(lambda: None))
            # One waits for the lock, or, where it was free, for the row that is not committed.
            waits = "wait_event_type = 'Lock' AND datname = current_database()"
            wait_until(lambda: other.one(f"SELECT count(*) FROM pg_stat_activity WHERE {waits}") == 1, "it waits")
            may_commit.set()
            first.result()
            second.result()
            assert Account.objects.get(pk=stock.pk).balance == left
        finally:
            may_commit.set()
            stock.delete()

    def test_atomic_requests(self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        """Case 13: until the commit after the view."""
        seen = []

        def view(request: Any) -> HttpResponse:
            with advisory_lock(name) as lock:
                seen.append(lock.scope)
            seen.append("free" if other.is_free(lock_key(name)) else "held")
            return HttpResponse()

        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
        BaseHandler().make_view_atomic(view)(None)
        with reader() as page:
            run_section("docs/transactions.md", "atomic_requests", page)
            assert BaseHandler().make_view_atomic(page["pay"]) is page["pay"]
        assert seen == ["transaction", "held"]
        assert other.is_free(lock_key(name))

    def test_on_commit_callbacks_take_session_locks(self, name: str, other: OtherSession) -> None:
        seen = []

        def callback() -> None:
            with advisory_lock(name) as lock:
                seen.append(lock.scope)

        with transaction.atomic():
            transaction.on_commit(callback)
        assert seen == ["session"]

    @pytest.mark.parametrize("lock_first", [True, False])
    def test_at_repeatable_read_the_lock_comes_before_the_transaction(
        self, lock_first: bool, name: str, other: OtherSession
    ) -> None:
        """The other way round what is read is older than the lock."""
        account = Account.objects.create(balance=1)
        lock = advisory_lock(name, using="serializable", timeout=LIMIT)
        atomic = transaction.atomic(using="serializable")

        def read() -> int:
            warned = contextlib.nullcontext() if lock_first else pytest.warns(RuntimeWarning, match="snapshot")
            blocks: Any = (lock, atomic) if lock_first else (atomic, lock)
            with warned, blocks[0], blocks[1]:
                return int(Account.objects.using("serializable").get(pk=account.pk).balance)

        try:
            other.take(lock_key(name))
            waiting = Thread(read)
            other.wait_for_waiters(lock_key(name))
            Account.objects.filter(pk=account.pk).update(balance=2)
            other.drop(lock_key(name))
            assert waiting.result() == (2 if lock_first else 1)
        finally:
            account.delete()

    def test_a_transaction_goes_on_after_a_wait_in_vain(self, other: OtherSession) -> None:
        """Case 9."""
        other.take(lock_key("stock"))
        with reader() as page:
            run_section("docs/transactions.md", "waiting-inside-a-transaction", page)
            assert Account.objects.get(pk=page["account"].pk).name == "later"

    @pytest.mark.parametrize("asked", [True, False])
    def test_a_transaction_that_idles_for_too_long(self, asked: bool, name: str, other: OtherSession) -> None:
        """Case 31: nothing of it is kept, whether or not somebody asked for the lock meanwhile."""
        account = Account.objects.create(balance=1)
        try:
            with pytest.raises(LockLost if asked else DatabaseError):
                with transaction.atomic(), advisory_lock(name) as lock:
                    Account.objects.filter(pk=account.pk).update(balance=2)
                    value("SELECT set_config('idle_in_transaction_session_timeout', '50ms', true)")
                    other.wait_until_free(lock_key(name))
                    assert not asked or not lock.is_held()
            assert Account.objects.get(pk=account.pk).balance == 1
        finally:
            account.delete()

    def test_all_unlocked_by_hand(self, name: str, other: OtherSession) -> None:
        with pytest.raises(LockLost), advisory_lock(name):
            value("SELECT pg_advisory_unlock_all() IS NULL")


class TestInTestCase(TestCase):
    """What docs/transactions.md says of tests."""

    def test_an_atomic_of_its_own_counts(self) -> None:
        with advisory_lock("stock") as lock:
            assert lock.scope == "session"
        assert not lock.is_held()
        with transaction.atomic():
            with advisory_lock("stock") as lock:
                assert lock.scope == "transaction"
        assert lock.is_held()


class TestCommands:
    """What docs/commands.md says."""

    def command(self, page: dict[str, Any], heading: str) -> Any:
        return run_section("docs/commands.md", heading, page)["Command"]()

    def called(self, command: Any, *arguments: str, **options: Any) -> str:
        out = io.StringIO()
        call_command(command, *arguments, stdout=out, **options)
        return out.getvalue()

    def test_attributes_and_their_defaults(self) -> None:
        rows = cells("docs/commands.md", "attribute")
        assert rows.pop("lock_key") == "the module"
        mixin = django_advisory_lock.AdvisoryLockCommandMixin
        assert {name: getattr(mixin, name) for name in rows} == {
            name: ast.literal_eval(default) for name, default in rows.items()
        }
        assert {name for name in mixin.__annotations__ if not name.startswith("_")} == {*rows, "lock_key"}

    def start(self, *arguments: str) -> Any:
        code = "import sys\nfrom django.core.management import execute_from_command_line as run\nrun(sys.argv)"
        return spawn(code, *arguments)

    def status(self, process: Any, text: str | None = None) -> int:
        process.communicate(text, timeout=LIMIT)
        return int(process.returncode)

    def test_exit_statuses(self, name: str, other: OtherSession) -> None:
        """Case 64."""
        statuses = cells("docs/commands.md", "what happened")
        other.take(lock_key(name))
        assert self.status(self.start("work", "--key", name)) == int(statuses["busy, skipped"])
        assert self.status(self.start("work", "--key", name, "--lock-busy-exit-code", "75")) == 75
        other.drop(lock_key(name))
        assert self.status(self.start("work", "--key", name)) == int(statuses["ran"])
        assert self.status(self.start("work", "--key", name, "--lock-timeout", "soon")) == 2

    @pytest.mark.parametrize(
        ("happened", "number"), [("SIGTERM", signal.SIGTERM), ("SIGKILL, out of memory", signal.SIGKILL)]
    )
    def test_exit_statuses_of_killed_runs(
        self, happened: str, number: signal.Signals, name: str, other: OtherSession
    ) -> None:
        """Case 61: and the lock is free."""
        run = self.start("work", "--key", name, "--wait")
        wait_until(lambda: other.holders(lock_key(name)) == 1, "it works")
        run.send_signal(number)
        assert f"{128 - self.status(run)} in a shell" == cells("docs/commands.md", "what happened")[happened]
        other.wait_until_free(lock_key(name))

    def test_exit_status_of_a_run_that_lost_its_lock(self, name: str, other: OtherSession) -> None:
        run = self.start("work", "--key", name, "--wait")
        wait_until(lambda: other.holders(lock_key(name)) == 1, "it works")
        other.kill(other.holder(lock_key(name)))
        statuses = cells("docs/commands.md", "what happened")
        assert self.status(run, "\n") == int(statuses["the lock was lost while it ran"])

    def test_migrate(self, other: OtherSession) -> None:
        """Case 68."""
        with reader() as page:
            command = self.command(page, "migrate-on-a-rolling-deploy")
            assert "Planned operations" in self.called(command, plan=True)
            other.take(lock_key("migrate"))
            with override_settings(ADVISORY_LOCK_NAMESPACE="tenant"), pytest.raises(CommandError) as caught:
                self.called(command, plan=True, lock_timeout=0)
            assert caught.value.returncode == 75

    def test_tenants(self, other: OtherSession) -> None:
        """Case 74."""
        with reader() as page:
            command = self.command(page, "one-lock-for-each-tenant")
            other.take(lock_key("sync-tenant", "a"))
            assert self.called(command, "a").startswith("Skipped")
            assert self.called(command, "a", database="other") == "synced a\n"
            assert self.called(command, "b", verbosity=2) == "synced b\n"

    def test_a_skipped_run_is_logged(self, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        with reader() as page:
            command = self.command(page, "skipped-runs-that-someone-should-notice")
            command.lock_key = page["name"]
            other.take(lock_key(page["name"]))
            with caplog.at_level(logging.WARNING):
                assert self.called(command).startswith("Skipped")
            assert f"pid {other.pid}" in caplog.text

    def test_a_long_run_that_lost_its_lock_stops(self, name: str, other: OtherSession) -> None:
        """Case 72."""
        batches = []

        def lose_it(count: int) -> Iterator[int]:
            for batch in range(count):
                batches.append(batch)
                yield batch
                other.kill(backend_pid()) if batch == 1 else None

        with reader() as page:
            command = self.command(page, "long-runs")
            command.lock_key = name
            self.called(command)
            self.called(command, no_lock=True)
            page["range"] = lose_it
            with pytest.raises(LockLost):
                self.called(command)
        assert batches == [0, 1, 2]

    def test_what_a_role_may_set_for_its_sessions(self, other: OtherSession) -> None:
        with reader() as page:
            options = run_section("docs/commands.md", "killed-runs", page)["DATABASES"]["default"]["OPTIONS"]
        with extra_alias("watched", options):
            assert value("SHOW client_connection_check_interval", alias="watched") == "1s"

    def test_a_killed_run_is_noticed_while_the_server_works_for_it(self, name: str, other: OtherSession) -> None:
        """Case 35: the query would go on for a minute."""
        code = (
            "from django.db import connection\nfrom django_advisory_lock import advisory_lock\n"
            f"with advisory_lock({name!r}):\n connection.cursor().execute('SELECT pg_sleep(60)')"
        )
        process = spawn(code, PGOPTIONS="-c client_connection_check_interval=1s")
        asleep = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)' AND wait_event = 'PgSleep'"
        wait_until(lambda: other.one(asleep) == 1, "it sleeps")
        process.kill()
        process.communicate(timeout=LIMIT)
        other.wait_until_free(lock_key(name))


def shown(line: str) -> str:
    """Return a line of the shell without the prompt, as far as it is one command."""
    return re.split(r" (?:\|\||&&) ", line.removeprefix("$ "))[0]


class TestOperating:
    """What docs/operating.md says, and others of the same commands."""

    PAGE = "docs/operating.md"
    LINES = sorted(
        {
            match
            for block in BLOCKS
            for match in re.findall(r"advisory_lock (?:list|run|doctor|terminate).*", block.text)
        }
    )

    def parser(self) -> Any:
        return load_command_class("django_advisory_lock", "advisory_lock").create_parser("manage.py", "advisory_lock")

    @pytest.mark.parametrize("line", LINES)
    def test_what_is_typed_is_understood(self, line: str) -> None:
        options = self.parser().parse_args(shlex.split(shown(line), comments=True)[1:])
        if options.subcommand == "run":
            assert options.key
            assert options.command_line[0] in {"pg_dump", "./sync-account", "./backup", "sh"}

    @pytest.mark.parametrize(("typed", "python"), table(PAGE, "on the command line"))
    def test_ways_to_name_a_lock(self, typed: str, python: str) -> None:
        options = self.parser().parse_args(["list", *typed.split()])
        assert read_key(vars(options)) == eval(python, NAMES)

    @pytest.mark.parametrize("subcommand", [List, Run, Terminate])
    def test_exit_statuses(self, subcommand: type[Subcommand]) -> None:
        """They are those of the help, whose numbers the tests of the command have seen."""
        rows = table(self.PAGE, f"status of `{subcommand.name}`")
        assert subcommand.epilog is not None
        told = re.findall(r"^  (\S+)  +(.*)$", subcommand.epilog.partition("exit status:")[2], flags=re.MULTILINE)
        assert [status for status, _ in told] == [status for status, _ in rows]

    def test_options_of_run(self) -> None:
        options = vars(self.parser().parse_args(["run", "x", "--", "true"]))
        defaults = {row[0].split()[0]: row[1] for row in table(self.PAGE, "option of `run`") if row[1]}
        assert defaults == {
            f"--{name.replace('_', '-')}": f"{options[name]:g}" for name in ("timeout", "grace", "busy_exit_code")
        }

    def test_columns_and_names_in_json(self) -> None:
        assert tuple(cells(self.PAGE, "column")) == HEAD
        names = [name for first in cells(self.PAGE, "name in JSON") for name in first.split(", ")]
        lock = KeyLock(LockKey((1,)), 7, False, False, True, "", None, None)
        assert names == list(document(lock))
        example = find_line(self.PAGE, "NAME ")
        assert tuple(re.split("  +", example)) == HEAD

    def test_systemd(self, tmp_path: Path) -> None:
        unit = find_block("docs/commands.md", "commands-that-are-not-djangos", "ini")
        assert re.search(r"^KillMode=mixed$", unit, flags=re.MULTILINE)
        if analyze := shutil.which("systemd-analyze"):
            path = tmp_path / "nightly-backup.service"
            path.write_text(unit.replace("/srv/app/.venv/bin/python", sys.executable).replace("/srv/app", "/"))
            done = subprocess.run([analyze, "verify", path], check=True, capture_output=True, text=True, timeout=LIMIT)
            assert done.stderr == ""


def find_line(page: str, start: str) -> str:
    """Return the one line in the blocks of a page that begins so."""
    (line,) = (
        line for block in BLOCKS if block.page == page for line in block.text.splitlines() if line.startswith(start)
    )
    return line


def find_block(page: str, heading: str, language: str) -> str:
    """Return the one block in a language below a heading."""
    (text,) = (
        block.text for block in BLOCKS if (block.page, block.heading, block.language) == (page, heading, language)
    )
    return text


def fields(yaml: str) -> dict[str, str]:
    """Return the values of a small YAML file by the path of their keys."""
    path: list[tuple[int, str]] = []
    found = {}
    for line in yaml.splitlines():
        indent = len(line) - len(line.lstrip("- "))
        key, _, text = line[indent:].partition(":")
        path = [(depth, name) for depth, name in path if depth < indent] + [(indent, key)]
        found[".".join(name for _, name in path)] = text.strip()
    return found


def time_span(text: str) -> timedelta:
    """Return what a span of systemd, or one in words, means."""
    number, _, unit = text.removesuffix("s").partition(" ")
    return timedelta(**{f"{unit or 'second'}s": int(number)})


class TestPeriodic:
    """What docs/periodic.md says."""

    PAGE = "docs/periodic.md"

    @pytest.fixture(autouse=True)
    def forget(self, other: OtherSession) -> Iterator[None]:
        yield
        PeriodicRun.objects.all().delete()

    def shell(self, script: str, **changes: str) -> str:
        """Run a script of the shell, and return what it printed."""
        return self.told("sh", "-c", script, **changes)

    def told(self, *command: str | Path, **changes: str) -> str:
        done = subprocess.run(
            command, check=False, env=environment(**changes), capture_output=True, text=True, timeout=3 * LIMIT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def crontab(self, command: str) -> str:
        """Return what cron runs, by the line of the page, with another command and this machine's paths."""
        line = find_block(self.PAGE, "cron-on-several-hosts", "text")
        told = line.split(maxsplit=6)[6].strip().replace("/srv/app", shlex.quote(str(PROJECT)))
        return told.replace(".venv/bin/python", shlex.quote(sys.executable)).replace("refresh_reports", command)

    def test_cron_on_several_hosts(self, name: str) -> None:
        """Case 59: 300 ms apart, and the first may be done by then. Without the interval the second runs too."""
        first = self.crontab(f"periodic_work --key {name}")
        assert self.shell(f"({first}) & sleep 0.3; {first}; wait") == "working []\ndone\n"
        for _ in range(2):
            assert call_command("work", key=f"{name}-control", stdout=io.StringIO()) == "done"

    @pytest.mark.parametrize(("tick", "interval"), table("docs/periodic.md", "tick"))
    def test_which_interval(self, tick: str, interval: str) -> None:
        """More than clocks and schedulers are apart, less than a tick."""
        ticks = {"every minute": 60, "every five minutes": 300, "nightly": 24 * 3600}
        assert 0.5 <= time_span(interval).total_seconds() / ticks[tick] <= 0.6

    def test_systemd_timers(self, tmp_path: Path) -> None:
        """The shortest time between two starts is longer than the interval; systemd knows each of the keys."""
        timer = find_block(self.PAGE, "systemd-timers", "ini")
        options = dict(re.findall(r"^(\w+)=(.*)$", timer, flags=re.MULTILINE))
        late = time_span(options["RandomizedDelaySec"]) + time_span(options["AccuracySec"])
        assert timedelta(minutes=3) < timedelta(minutes=5) - late - timedelta(seconds=60)
        if analyze := shutil.which("systemd-analyze"):
            both = find_block("docs/commands.md", "systemd", "ini").replace("/srv/app/.venv/bin/python", sys.executable)
            service = both.partition("# refresh-reports.timer")[0].replace("/srv/app", "/")
            (tmp_path / "refresh-reports.service").write_text(service)
            for number, text in enumerate((timer, both.partition("# refresh-reports.timer")[2])):
                (tmp_path / str(number)).mkdir()
                unit = tmp_path / str(number) / "refresh-reports.timer"
                unit.write_text(text)
                assert self.told(analyze, "verify", unit, tmp_path / "refresh-reports.service") == ""
            assert "*-*-* *:00/5:00" in self.told(analyze, "calendar", options["OnCalendar"])

    def test_kubernetes(self) -> None:
        """`concurrencyPolicy` is of the CronJob, `backoffLimit` of the job, `restartPolicy` of the pod."""
        job = fields(find_block("docs/commands.md", "kubernetes", "yaml"))
        assert (job["kind"], job["apiVersion"]) == ("CronJob", "batch/v1")
        assert job["spec.concurrencyPolicy"] == "Forbid"
        assert job["spec.jobTemplate.spec.backoffLimit"] == "2"
        assert job["spec.jobTemplate.spec.template.spec.restartPolicy"] == "Never"
        assert "refresh_reports" in job["spec.jobTemplate.spec.template.spec.containers.command"]

    def test_two_jobs_of_kubernetes_for_one_slot(self, name: str) -> None:
        """Case 64: the second pod is a success too, whatever the exit status of a busy one is."""
        call_command("periodic_work", key=name, stdout=io.StringIO())
        second = self.crontab(f"periodic_work --key {name} --lock-busy-exit-code 75").replace("--verbosity 0", "")
        assert self.shell(second).startswith("Skipped, too soon: started ")
        assert cells("docs/commands.md", "what happened")["too soon, by lock_min_interval"] == "0"

    def test_two_beats(self) -> None:
        """Case 76: both messages are delivered, one after the other. Without the interval both work."""
        with reader() as page:
            page["__name__"] = "tests.testapp.beats"  # Celery knows tasks by their names
            task = run_section(self.PAGE, "celery-beat", page)["refresh_reports"]
            assert [task.apply().get() for _ in range(2)] == ["refreshed", "skipped"]

            @try_advisory_lock("beats-control")
            def refresh() -> str:
                return "refreshed"

            control = page["shared_task"](name="beats-control")(refresh)
            assert [control.apply().get() for _ in range(2)] == ["refreshed", "refreshed"]

    @pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
    def test_clearsessions(self, is_before: bool, tmp_path: Path) -> None:
        """An app that comes after the one with the command is not asked."""
        commands = tmp_path / "housekeeping" / "management" / "commands"
        commands.mkdir(parents=True)
        (commands / "clearsessions.py").write_text(find_block(self.PAGE, "commands-of-django", "python"))
        apps = ["housekeeping", "django.contrib.sessions"][:: 1 if is_before else -1]
        (tmp_path / "housekeeping_settings.py").write_text(
            "from tests.settings import *\nSESSION_ENGINE = 'django.contrib.sessions.backends.signed_cookies'\n"
            f"INSTALLED_APPS = [*INSTALLED_APPS, *{apps}]\n"
        )
        script = f"{shlex.quote(sys.executable)} {shlex.quote(str(PROJECT / 'manage.py'))} clearsessions"
        settings = {"PYTHONPATH": f"{tmp_path}:{PROJECT}", "DJANGO_SETTINGS_MODULE": "housekeeping_settings"}
        assert self.shell(script, **settings) == ""
        noted = PeriodicRun.objects.values_list("name", "last_outcome")
        expected = ("command:housekeeping.management.commands.clearsessions", "succeeded")
        assert list(noted) == ([expected] if is_before else [])

    def test_there_is_no_expiry(self, other: OtherSession) -> None:
        """Case 60: a run keeps its lock for as long as it takes, and `min_interval` counts from its start."""
        assert cells(self.PAGE, "ShedLock").keys() == {"lockAtLeastFor", "lockAtMostFor"}
        go, begun = threading.Event(), []

        @django_advisory_lock.periodic_lock("long", min_interval=0.001, default="skipped")
        def work() -> str:
            begun.append(1)
            assert go.wait(LIMIT)
            return "ran"

        first = Thread(work)
        wait_until(lambda: begun)
        PeriodicRun.objects.update(last_started_at=timezone.now() - timedelta(days=7))
        assert work() == "skipped"
        go.set()
        assert first.result() == "ran"
        assert (work(), len(begun)) == ("ran", 2)

    def test_commands_and_jobs(self, other: OtherSession) -> None:
        with reader() as page:
            run_section(self.PAGE, "commands-and-jobs", page)
            out = io.StringIO()
            for _ in range(2):
                call_command(page["Command"](), stdout=out)
            assert out.getvalue().startswith("Skipped, too soon")
            page["Refresh"]().run()
            assert PeriodicRun.objects.filter(min_interval=timedelta(minutes=3)).count() == 2


class TestTesting:
    """What docs/testing.md says."""

    PAGE = "docs/testing.md"

    def run(self, namespace: dict[str, Any], count: int) -> list[str]:
        """Run the test cases of an example, and return what failed."""
        things = [thing for thing in namespace.values() if getattr(thing, "__module__", None) == namespace["__name__"]]
        cases = [thing for thing in things if isinstance(thing, type) and issubclass(thing, unittest.TestCase)]
        loader, result = unittest.defaultTestLoader, unittest.TestResult()
        unittest.TestSuite(map(loader.loadTestsFromTestCase, cases)).run(result)
        assert result.testsRun == count
        return [text for _, text in (*result.errors, *result.failures)]

    @pytest.mark.parametrize(
        ("heading", "count"),
        [
            ("a-busy-lock", 2),
            ("the-keys-of-guards", 1),
            ("who-holds-what", 1),
            ("waiting", 1),
            ("losing-a-lock", 1),
            ("asynchronous-tests", 1),
        ],
    )
    def test_its_tests_succeed(self, heading: str, count: int, other: OtherSession) -> None:
        with reader() as page:
            assert self.run(run_section(self.PAGE, heading, page), count) == []

    @pytest.mark.parametrize(
        ("heading", "replaced", "by"),
        [
            ("a-busy-lock", "try_advisory_lock", lambda *key, default: lambda function: function),
            ("the-keys-of-guards", "lock_view", lambda *key, methods: lambda function: function),
            ("who-holds-what", "advisory_lock", lambda *key: contextlib.nullcontext()),
            ("losing-a-lock", "advisory_lock", lambda *key: contextlib.nullcontext(threading.Event())),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_without_the_lock_they_fail(self, heading: str, replaced: str, by: Any, other: OtherSession) -> None:
        """The negative control: an example that cannot fail is none."""
        with reader() as page:
            for block in BLOCKS:
                if (block.page, block.heading, block.language) == (self.PAGE, heading, "python"):
                    page[f"_{replaced}"] = by
                    text = block.text.replace(f"@{replaced}(", f"@_{replaced}(")
                    exec(text.replace(f"with {replaced}(", f"with _{replaced}("), page)
            assert self.run(page, 2 if heading == "a-busy-lock" else 1)

    def test_keys_of_guards(self) -> None:
        account = Account(pk=7)

        class Command(django_advisory_lock.AdvisoryLockCommandMixin, BaseCommand):
            __module__ = "shop.management.commands.refresh_reports"

        class SyncAccount(django_advisory_lock.AdvisoryLockJobMixin):
            __module__, __qualname__ = "shop.jobs", "SyncAccount"

            def run(self) -> None: ...

        names = {"hold_lock": testing.hold_lock, "account": account, "model_key": model_key}
        held = {guard: eval(call.replace("…", ""), names) for guard, call in cells(self.PAGE, "guard").items()}
        keys = [derive(each._source) for each in held.values()]
        assert keys == [
            lock_key("a", 1),
            lock_key(Command().get_lock_key()),
            lock_key(SyncAccount().get_lock_key()),
            lock_key("periodic", "refresh"),
            model_key(account),
            model_key(account, purpose="sync"),
        ]

    def test_assertions(self) -> None:
        rows = [row for row, _ in table(self.PAGE, "assertion")]
        named = {re.sub(r"\(.*", "", row) for row in rows}
        assert named == {name for name in vars(testing) if name.startswith("assert_")}

    def test_nothing_left_behind(self, name: str, other: OtherSession) -> None:
        left = []
        with reader() as page:
            base = run_section(self.PAGE, "nothing-left-behind", page)["ShopTestCase"]

            class Leaves(base):  # type: ignore[misc, valid-type]
                __module__ = page["__name__"]

                def test(self) -> None:
                    left.append(advisory_lock(name).acquire())

            class LeavesNothing(base):  # type: ignore[misc, valid-type]
                __module__ = page["__name__"]

                def test(self) -> None:
                    with transaction.atomic(), advisory_lock(name):
                        pass

            page.update(Leaves=Leaves, LeavesNothing=LeavesNothing)
            (failed,) = self.run(page, 2)
        assert f"{name!r} ({lock_key(name).args[0]}) is held by pid " in failed
        with pytest.raises(LockLost):
            left[0].release()

    @pytest.mark.parametrize("databases", [{"default"}, {"default", "other"}], ids=len)
    def test_an_alias_for_locks(self, databases: set[str], name: str, other: OtherSession) -> None:
        with reader() as page:

            class Uses(run_section(self.PAGE, "an-alias-for-locks", page)["SyncTests"]):  # type: ignore[misc]
                __module__ = page["__name__"]

                def test(self) -> None:
                    with testing.hold_lock(name, using="other"), try_advisory_lock(name, using="other") as lock:
                        assert not lock

            Uses.databases = databases
            page["SyncTests"] = Uses
            failed = self.run(page, 1)
        assert ["to 'other' are not allowed in this test" in text for text in failed] == [True] * (2 - len(databases))

    def test_fixtures(self, pytester: pytest.Pytester, other: OtherSession) -> None:
        tests, conftest = [
            block.text
            for block in BLOCKS
            if (block.page, block.heading, block.language) == (self.PAGE, "pytest", "python")
        ]
        pytester.makepyfile(find_section(self.PAGE, "a-busy-lock") + tests)
        run_nested(pytester).assert_outcomes(passed=4)
        pytester.makeconftest(conftest)
        pytester.makepyfile(
            "from django_advisory_lock import advisory_lock\nlocks = []\n"
            "def test_left(): locks.append(advisory_lock('left').acquire())\n"
            "def test_later(): locks[0].release()"
        )
        run_nested(pytester).assert_outcomes(passed=2, errors=1)

    def test_one_database_for_all_workers(self, monkeypatch: pytest.MonkeyPatch, other: OtherSession) -> None:
        """Case 99."""
        keys = set()
        with reader() as page:
            for worker in ("gw0", "gw1"):
                monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
                namespace = run_section(self.PAGE, "parallel-runs", page)["ADVISORY_LOCK_NAMESPACE"]
                with override_settings(ADVISORY_LOCK_NAMESPACE=namespace), testing.hold_lock("one", "key") as held:
                    keys.add(held.key)
        assert len(keys) == 2


def find_section(page: str, heading: str) -> str:
    """Return the Python below one heading of a page."""
    blocks = [block for block in BLOCKS if (block.page, block.heading, block.language) == (page, heading, "python")]
    return "".join(block.text for block in blocks)


class TestMonitoring:
    """What docs/monitoring.md says."""

    PAGE = "docs/monitoring.md"

    def happen(self, name: str, other: OtherSession) -> None:
        """Acquire and release one lock twice, find it busy once, and lose it once; and a thousand others."""
        for _ in range(2):
            with advisory_lock(name, 42):
                pass
        other.take(lock_key(name, 43))
        assert not try_advisory_lock(name, 43).acquire()
        with pytest.raises(LockLost), advisory_lock(name, 44):
            connection.close()

    def test_signals(self) -> None:
        assert [row for row, _ in table(self.PAGE, "signal")] == list(SIGNALS)

    def test_senders(self) -> None:
        kinds = {word for row, _ in table(self.PAGE, "sender") for word in row.split(", ")}
        made = vars(locks) | vars(semaphores)
        assert kinds == {
            name for name, kind in made.items() if isinstance(kind, type) and issubclass(kind, ConfiguredLock)
        } - {"ConfiguredLock"}

    def test_labels(self) -> None:
        """Never a primary key, and never without end."""
        with reader() as page:
            labels = run_section(self.PAGE, "labels", page)["labels"]
            expected = {
                lock_key("account-sync", 42): "account-sync",
                lock_key("account-sync", 42, namespace="tenant-7"): "account-sync",
                model_key(Account, pk=42): "testapp.account",
                model_key(Account, pk=42, purpose="sync"): "testapp.account[sync]",
                lock_key("command", "shop.management.commands.refresh"): "command:shop.management.commands.refresh",
                lock_key("command"): "command",
                LockKey((4711,)): "number",
                LockKey((-4711,)): "number",
                LockKey.pair(1, 42): "number",
            }
            sender = django_advisory_lock.AdvisoryLock
            assert {key: labels(sender, key)["name"] for key in expected} == expected
            many = {labels(sender, lock_key(f"sync-{number}"))["name"] for number in range(1000)}
            assert len(page["names"]) == page["MOST"] == 100
            assert "other" in many
            assert labels(sender, lock_key("account-sync", 43)) == {"kind": "AdvisoryLock", "name": "account-sync"}

    def test_opentelemetry(self, name: str, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        exported = InMemoryMetricReader()
        provider = MeterProvider(metric_readers=[exported])
        monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
        with reader() as page:
            run_section(self.PAGE, "labels", page)
            run_section(self.PAGE, "opentelemetry", page)
            self.happen(name, other)
            data = exported.get_metrics_data()
        assert data is not None
        found: dict[tuple[str, Any], Any] = {}
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                attributes = dict(point.attributes or {})
                assert attributes.pop("name") == name
                found[metric.name, attributes.pop("kind")] = point
                assert attributes == {}
        numbers = {key: point.value if hasattr(point, "value") else point.count for key, point in found.items()}
        assert numbers == {
            ("advisory_lock.acquired", "AdvisoryLock"): 3,
            ("advisory_lock.busy", "TryAdvisoryLock"): 1,
            ("advisory_lock.lost", "AdvisoryLock"): 1,
            ("advisory_lock.waited", "AdvisoryLock"): 3,
            ("advisory_lock.held", "AdvisoryLock"): 2,
        }
        assert 0 < found["advisory_lock.held", "AdvisoryLock"].sum < LIMIT
        assert found["advisory_lock.held", "AdvisoryLock"].explicit_bounds == page["SECONDS"]
        provider.shutdown()

    def test_prometheus(self, name: str, other: OtherSession) -> None:
        with reader() as page:
            run_section(self.PAGE, "labels", page)
            run_section(self.PAGE, "prometheus", page)
            self.happen(name, other)
            text = generate_latest().decode()
        samples = dict(
            re.findall(
                rf'^advisory_lock_(\w+){{kind="(?:Try)?AdvisoryLock",name="{name}"}} (\S+)$', text, flags=re.MULTILINE
            )
        )
        counted = ("acquired_total", "busy_total", "lost_total", "waited_seconds_count", "held_seconds_count")
        assert {key: float(samples[key]) for key in counted} == dict(zip(counted, (3, 1, 1, 3, 2), strict=True))
        assert 0 < float(samples["held_seconds_sum"]) < LIMIT

    def test_lines_of_a_skipped_run(self, name: str, other: OtherSession, caplog: pytest.LogCaptureFixture) -> None:
        """That of the lock, and that of the guard; of a command only where it has an interval."""

        class Command(django_advisory_lock.AdvisoryLockCommandMixin, BaseCommand):
            lock_key = name

        class Job(django_advisory_lock.AdvisoryLockJobMixin):
            lock_key = name

            def run(self) -> None: ...

        class Periodic(Command):
            lock_min_interval = 60

        guards: dict[str, Callable[[], object]] = {
            "the lock": try_advisory_lock(name)(lambda: None),
            "a command": lambda: call_command(Command(), verbosity=0),
            "a command with an interval": lambda: call_command(Periodic(), verbosity=0),
            "a job": lambda: Job().run(),
            "periodic work": django_advisory_lock.periodic_lock(name, min_interval=60)(lambda: None),
            "a view": lambda: django_advisory_lock.lock_view(name)(lambda request: HttpResponse())(HttpRequest()),
        }
        caplog.set_level(logging.INFO, "django_advisory_lock")
        lines = {}
        with testing.hold_lock(name), testing.hold_lock("periodic", name):
            for what, skip in guards.items():
                caplog.clear()
                skip()
                lines[what] = [record.levelname for record in caplog.records]
        assert {what: len(levels) for what, levels in lines.items()} == dict(
            zip(guards, (1, 1, 2, 2, 2, 2), strict=True)
        )
        assert {level for levels in lines.values() for level in levels} == {"INFO"}

    @pytest.mark.parametrize("section", ["opentelemetry", "prometheus"])
    def test_losses_are_shown_before_there_is_one(
        self, section: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A counter that first appears as 1 is no increase, so the alert would miss the first loss of each name."""
        exported = InMemoryMetricReader()
        provider = MeterProvider(metric_readers=[exported])
        monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
        with reader() as page:
            run_section(self.PAGE, "labels", page)
            run_section(self.PAGE, section, page)
            with advisory_lock(name, 42):
                pass
            if section == "prometheus":
                shown_as = f'advisory_lock_lost_total{{kind="AdvisoryLock",name="{name}"}} 0.0'
                assert shown_as in generate_latest().decode()
            else:
                data = exported.get_metrics_data()
                assert data is not None
                found = {each.name: each for each in data.resource_metrics[0].scope_metrics[0].metrics}
                assert [getattr(point, "value", None) for point in found["advisory_lock.lost"].data.data_points] == [0]
        provider.shutdown()

    def test_the_log(self, name: str, other: OtherSession, tmp_path: Path) -> None:
        """A busy lock is not in it, a long wait and a lost lock are."""
        settings = find_section(self.PAGE, "the-log")
        (tmp_path / "logged_settings.py").write_text(f"from tests.settings import *\n{settings}")
        code = f"""if True:
            from django.conf import settings
            from django.db import connection
            from django_advisory_lock import LockLost, LockTimeout, advisory_lock, try_advisory_lock
            from django.test import override_settings
            assert settings.ADVISORY_LOCK_SLOW_WAIT == 2
            try_advisory_lock({name!r}).acquire()
            with override_settings(ADVISORY_LOCK_SLOW_WAIT=0.01):
                try:
                    advisory_lock({name!r}, timeout=0.05).acquire()
                except LockTimeout:
                    pass
            try:
                with advisory_lock({name!r}, "lost"):
                    connection.close()
            except LockLost:
                print("lost")
        """
        other.take(lock_key(name))
        paths = f"{tmp_path}:{PROJECT}"
        process = spawn(code, PYTHONPATH=paths, DJANGO_SETTINGS_MODULE="logged_settings")
        out, errors = process.communicate(timeout=LIMIT)
        assert (process.returncode, out) == (0, "lost\n"), errors
        levels = re.findall(r"^\S+ \S+ (\w+) django_advisory_lock: ", errors, flags=re.MULTILINE)
        assert levels == ["WARNING", "ERROR"]
