"""The shop of the test project, each command as a process of its own, on a database of its own."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

import psycopg
import pytest
from django.db import connection
from psycopg import sql

from django_advisory_lock import LockKey, lock_key
from testproject.demo.processes import database_url
from testproject.shop.months import month_bounds

PROJECT = Path(__file__).resolve().parent.parent
SECONDS = 100
IGNORED = ("PGAPPNAME", "SHOP_LOCK_NAMESPACE")  # which change what is tested


class Shop:
    """A database of its own, and the project's commands on it."""

    def __init__(self, url):
        self.url = url
        settings = {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "testproject.settings"}
        self.environment = {name: value for name, value in os.environ.items() if name not in IGNORED} | settings
        self.connection = psycopg.connect(url, autocommit=True)

    def start(self, *arguments, **environment):
        return subprocess.Popen(
            [sys.executable, "-W", "error", str(PROJECT / "manage.py"), *arguments],
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def run(self, *arguments, status=0, **environment):
        """Run a command, check its exit status, and return what it wrote: stdout, and stderr behind it."""
        with self.start(*arguments, **environment) as process:
            try:
                output, errors = process.communicate(timeout=SECONDS)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == status, output + errors
        return output + errors

    def ask(self, statement, *params):
        return [row[0] if len(row) == 1 else row for row in self.connection.execute(statement, params).fetchall()]

    @contextlib.contextmanager
    def held(self, key):
        """Hold a key in another session."""
        arguments = ", ".join(["%s::bigint"] if len(key.args) == 1 else ["%s::int"] * 2)
        self.connection.execute(f"SELECT pg_advisory_lock({arguments})", key.args)
        try:
            yield
        finally:
            assert self.ask(f"SELECT pg_advisory_unlock({arguments})", *key.args) == [True]

    def reset(self):
        self.connection.execute("TRUNCATE shop_run, shop_monthlyreport")
        self.connection.execute("UPDATE shop_account SET balance = 0, synced_at = NULL")

    def contents(self):
        """Return the number of rows and a digest of each table, keys included."""
        tables = ("shop_account", "shop_order", "shop_monthlyreport", "shop_run")
        digest = "SELECT count(*), md5(string_agg(CAST(t AS text), '|' ORDER BY id)) FROM {} AS t"
        return {table: self.ask(sql.SQL(digest).format(sql.Identifier(table)))[0] for table in tables}


@contextlib.contextmanager
def new_shop(*, accounts, orders):
    """Make a database for a shop, with tables and data, and remove it at the end."""
    parameters = connection.get_connection_params()
    name = f"shop_test_{secrets.token_hex(6)}"
    with psycopg.connect(database_url(parameters | {"dbname": "postgres"}), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            shop = Shop(database_url(parameters | {"dbname": name}))
            with shop.connection:
                shop.run("migrate", "--verbosity=0")
                shop.run("seed", f"--accounts={accounts}", f"--orders={orders}", "--verbosity=0")
                yield shop
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="module")
def module_shop():
    with new_shop(accounts=5, orders=300) as shop:
        yield shop


@pytest.fixture
def shop(module_shop):
    module_shop.reset()
    return module_shop


WAITING = """
    SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted AND locktype = %s
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""


def until(condition):
    """Wait for something that will happen; the pause decides nothing but how often it is asked for."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


REFRESH = lock_key("command", "testproject.shop.management.commands.refresh_reports", namespace="")
SEPTEMBER = lock_key("monthly-report", "2026-09", namespace="")


def sync_key(pk):
    scope = sha256(b"shop.account\x1fsync").digest()
    return LockKey.pair(int.from_bytes(scope[:4], "big", signed=True), pk)


@pytest.mark.parametrize(
    ("month", "start", "end"),
    [
        ("2026-09", datetime(2026, 9, 1), datetime(2026, 10, 1)),
        ("2025-12", datetime(2025, 12, 1), datetime(2026, 1, 1)),
        ("2024-02", datetime(2024, 2, 1), datetime(2024, 3, 1)),
    ],
)
def test_month_bounds(month, start, end):
    assert month_bounds(month) == (start.replace(tzinfo=timezone.utc), end.replace(tzinfo=timezone.utc))


class TestProject:
    def test_checks(self, shop):
        assert "no issues" in shop.run("check", "--database=default")

    def test_migrations_are_complete(self, shop):
        assert "No changes" in shop.run("makemigrations", "--check", "--dry-run")

    def test_sessions_have_a_telling_name(self, shop):
        code = "from testproject.demo.server import ask; print(ask('SHOW application_name'))"
        assert shop.run("shell", "--verbosity=0", f"--command={code}") == "manage.py shell\n"

    def test_help(self, shop):
        names = ["seed", "refresh_reports", "generate_monthly_report", "sync_accounts", "demo"]
        code = (
            "from django.core.management import load_command_class\n"
            f"for name in {names}: load_command_class('testproject.shop', name).print_help('manage.py', name)"
        )
        output = shop.run("shell", "--verbosity=0", f"--command={code}")
        assert [f"usage: manage.py {name} " in output for name in names] == [True] * len(names)


class TestSeed:
    def test_replaces_whatever_was_there(self, shop):
        before = shop.contents()
        shop.run("refresh_reports", "--verbosity=0")
        shop.connection.execute("UPDATE shop_account SET name = 'x', synced_at = now()")
        shop.connection.execute("DELETE FROM shop_order WHERE id % 2 = 0")
        shop.connection.execute("INSERT INTO shop_account (name, email, balance) VALUES ('y', 'y@example.com', 0)")
        assert shop.contents() != before
        assert "5 accounts and 300 orders" in shop.run("seed", "--accounts=5", "--orders=300")
        assert shop.contents() == before

    def test_one_at_a_time(self, shop):
        before = shop.contents()
        with contextlib.ExitStack() as stack:
            with shop.held(lock_key("shop", "seed", namespace="")):
                seeds = [stack.enter_context(shop.start("seed", "--accounts=5", "--orders=300")) for _ in range(2)]
                until(lambda: shop.ask(WAITING, "advisory") == [2])
            errors = [seed.communicate(timeout=SECONDS)[1] for seed in seeds]
        assert errors == ["", ""]
        assert shop.contents() == before

    def test_keys_go_on_after_the_last(self, shop):
        assert shop.ask("SELECT nextval(pg_get_serial_sequence('shop_order', 'id'))") == [301]

    def test_orders_of_a_year(self, shop):
        months = shop.ask("SELECT DISTINCT to_char(placed_at AT TIME ZONE 'UTC', 'YYYY-MM') FROM shop_order ORDER BY 1")
        assert (len(months), months[0], months[-1]) == (12, "2025-10", "2026-09")

    def test_defaults(self):
        with new_shop(accounts=1, orders=1) as shop:
            shop.run("seed", "--verbosity=0")
            contents = shop.contents()
        assert (contents["shop_account"][0], contents["shop_order"][0]) == (200, 20_000)

    def test_refuses_nothing(self, shop):
        assert "at least 1" in shop.run("seed", "--orders=0", status=2)


class TestRefreshReports:
    TRUTH = """
        SELECT to_char(placed_at AT TIME ZONE 'UTC', 'YYYY-MM'), count(*), sum(amount)
        FROM shop_order GROUP BY 1 ORDER BY 1"""
    REPORTS = "SELECT month, order_count, total FROM shop_monthlyreport ORDER BY 1"

    def test_reports_are_those_of_the_orders(self, shop):
        shop.connection.execute(
            "INSERT INTO shop_monthlyreport (month, order_count, total, computed_by_pid, computed_by_host)"
            " VALUES ('2026-01', 1, 1, 1, ''), ('1999-01', 1, 1, 1, '')"
        )
        assert shop.run("refresh_reports") == "Refreshed 12 reports.\n"
        assert shop.ask(self.REPORTS) == shop.ask(self.TRUTH)
        runs = shop.ask("SELECT task, subject, finished_at > started_at FROM shop_run")
        assert runs == [("refresh_reports", "all", True)]
        assert shop.ask("SELECT DISTINCT computed_by_pid FROM shop_monthlyreport") == shop.ask(
            "SELECT pid FROM shop_run"
        )

    def test_skips_where_another_copy_is_at_it(self, shop):
        with shop.held(REFRESH):
            assert shop.run("refresh_reports").startswith("Skipped.")
            assert "CommandError" in shop.run("refresh_reports", "--lock-busy-exit-code=75", status=75)
            assert shop.contents()["shop_run"][0] == 0
            shop.run("refresh_reports", "--no-lock")
        assert shop.contents()["shop_run"][0] == 1


class TestGenerateMonthlyReport:
    def test_report_of_a_month(self, shop):
        assert shop.run("generate_monthly_report", "2026-09").startswith("2026-09: ")
        assert shop.ask(TestRefreshReports.REPORTS) == shop.ask(TestRefreshReports.TRUTH)[-1:]

    def test_one_lock_for_each_month(self, shop):
        with shop.held(SEPTEMBER):
            assert shop.run("generate_monthly_report", "2026-09").startswith("Skipped.")
            assert shop.run("generate_monthly_report", "2026-08").startswith("2026-08: ")
        assert shop.ask("SELECT subject FROM shop_run") == ["2026-08"]

    @pytest.mark.parametrize("month", ["2026-13", "2026-9", "9999-12"])
    def test_no_month(self, shop, month):
        assert "write it as YYYY-MM" in shop.run("generate_monthly_report", month, status=2)

    def test_month_without_orders(self, shop):
        assert "There are no orders in 2031-01" in shop.run("generate_monthly_report", "2031-01", status=1)
        assert shop.contents()["shop_monthlyreport"][0] == 0


class TestSyncAccounts:
    SYNCED = "SELECT id FROM shop_account WHERE synced_at IS NOT NULL AND balance > 0 ORDER BY id"

    def test_goes_around_busy_accounts(self, shop):
        with shop.held(sync_key(2)), shop.held(sync_key(4)):
            output = shop.run("sync_accounts", "--delay=0")
            assert output == ("Accounts synced: 3; skipped because another worker was at them: 2; no longer due: 0.\n")
            assert shop.ask(self.SYNCED) == [1, 3, 5]
        assert "Accounts synced: 2; " in shop.run("sync_accounts", "--delay=0")
        assert shop.ask(self.SYNCED) == [1, 2, 3, 4, 5]
        assert sorted(shop.ask("SELECT subject FROM shop_run WHERE finished_at > started_at")) == list("12345")

    def test_looks_again_under_the_lock(self, shop):
        """Both read the list before either syncs, so whatever is done meanwhile is found out under the lock."""
        shop.connection.execute("BEGIN")
        shop.connection.execute("LOCK TABLE shop_account IN EXCLUSIVE MODE")
        with shop.start("sync_accounts", "--delay=0") as one, shop.start("sync_accounts", "--delay=0") as two:
            until(lambda: shop.ask(WAITING, "relation") == [2])
            shop.connection.execute("UPDATE shop_account SET synced_at = now() WHERE id > 2")
            shop.connection.execute("COMMIT")
            outputs = [process.communicate(timeout=SECONDS)[0] for process in (one, two)]
        # Each got one of the first two accounts, and found the other one busy or done.
        assert all(output.startswith("Accounts synced: 1; ") for output in outputs)
        assert sorted(shop.ask("SELECT subject FROM shop_run")) == ["1", "2"]

    def test_options(self, shop):
        assert "Accounts synced: 1; " in shop.run("sync_accounts", "--delay=0", "--limit=1")
        assert "Accounts synced: 5; " in shop.run("sync_accounts", "--delay=0", "--older-than=0")
        assert "at least 0" in shop.run("sync_accounts", "--delay=nan", status=2)


@pytest.mark.parametrize(
    "command",
    [
        ("seed", "--accounts=5", "--orders=300"),
        ("refresh_reports",),
        ("generate_monthly_report", "2026-09"),
        ("sync_accounts",),
    ],
    ids=lambda command: command[0],
)
def test_quiet_at_verbosity_0(shop, command):
    assert shop.run(*command, "--verbosity=0") == ""


def test_a_busy_command_is_quiet_at_verbosity_0(shop):
    with shop.held(REFRESH):
        assert shop.run("refresh_reports", "--verbosity=0") == ""
