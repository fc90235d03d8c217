"""The shop of the test project, on a database of its own: its commands, pages, API and jobs."""

import contextlib
import csv
import io
import os
import re
import secrets
import subprocess
import sys
import time
from datetime import datetime, timezone
from decimal import Decimal
from hashlib import sha256
from pathlib import Path

import django
import psycopg
import pytest
from django.contrib.contenttypes.models import ContentType
from django.core.management import execute_from_command_line
from django.db import connection, connections, transaction
from django.test import Client, override_settings
from django.test.html import parse_html
from psycopg import sql

from django_advisory_lock import LockKey, lock_key
from testproject.demo.processes import database_url
from testproject.shop.months import month_bounds
from tests.support import Thread

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
        """Run a command in a process of its own, check its exit status, and return all that it wrote."""
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

    @contextlib.contextmanager
    def table_held(self, table):
        """Let nobody write to a table until the block ends; yield what waits until so many sessions want to."""
        with self.connection.transaction():
            self.connection.execute(sql.SQL("LOCK TABLE {} IN EXCLUSIVE MODE").format(sql.Identifier(table)))
            yield lambda count=1: until(lambda: self.ask(WAITING, "relation") == [count])

    def reset(self):
        self.connection.execute("TRUNCATE shop_run, shop_monthlyreport, django_advisory_lock_periodicrun")
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
                seed = f"call_command('seed', accounts={accounts}, orders={orders}, verbosity=0)"
                code = f"from django.core.management import call_command; call_command('migrate', verbosity=0); {seed}"
                shop.run("shell", "--verbosity=0", f"--command={code}")
                yield shop
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


class LocalShop:
    """The same shop with this process as one more of its processes: what is run here needs none to be started."""

    def __init__(self, apart):
        self.apart = apart  # whose run() is a process of its own

    def __getattr__(self, name):
        return getattr(self.apart, name)

    def run(self, *arguments, status=0):
        """Do what manage.py does with a command line, check the exit status, and return all that was written."""
        output, errors = io.StringIO(), io.StringIO()
        found: object = 0
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                execute_from_command_line(["manage.py", *arguments])
            except SystemExit as end:
                found = end.code
        written = output.getvalue() + errors.getvalue()
        assert found == status, written
        return written


@contextlib.contextmanager
def moved_in(shop):
    """Make the settings of the shop those of this process, and its database the default one."""
    from testproject import settings as project

    names = [name for name in dir(project) if name.isupper() and name not in ("DATABASES", "ALLOWED_HOSTS")]
    changed = {
        "DEBUG": False,
        "ADVISORY_LOCK_NAMESPACE": "",
        "CELERY_TASK_ALWAYS_EAGER": True,
        "PASSWORD_HASHERS": ["django.contrib.auth.hashers.MD5PasswordHasher"],  # which is quick
    }
    default = connections.settings["default"]
    name = default["NAME"]
    connections["default"].close()
    default["NAME"] = connections["default"].settings_dict["NAME"] = shop.connection.info.dbname
    try:
        with override_settings(**{name: getattr(project, name) for name in names} | changed):
            ContentType.objects.clear_cache()  # another database numbers them in another way
            yield LocalShop(shop)
    finally:
        ContentType.objects.clear_cache()
        connections["default"].close()
        default["NAME"] = connections["default"].settings_dict["NAME"] = name


@pytest.fixture(scope="module")
def module_shop(django_db_setup):
    with new_shop(accounts=5, orders=300) as shop, moved_in(shop) as local:
        yield local


ADVISORY = """
    SELECT pid, mode FROM pg_locks WHERE locktype = 'advisory'
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""


@pytest.fixture
def shop(module_shop):
    """Nothing is done yet; after the test no advisory lock may be left, though the connection is still open."""
    module_shop.reset()
    yield module_shop
    left = module_shop.ask(ADVISORY)
    connections.close_all()
    assert left == []


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
PRUNE = lock_key("command", "testproject.shop.management.commands.prune_runs", namespace="")
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
        """In a process of its own, where warnings are errors from the first import on."""
        assert "no issues" in shop.apart.run("check", "--database=default")

    def test_migrations_are_complete(self, shop):
        assert "No changes" in shop.run("makemigrations", "--check", "--dry-run")

    def test_sessions_have_a_telling_name(self, shop):
        code = "from testproject.demo.server import ask; print(ask('SHOW application_name'))"
        assert shop.apart.run("shell", "--verbosity=0", f"--command={code}") == "manage.py shell\n"

    def test_help(self, shop):
        names = ["seed", "refresh_reports", "generate_monthly_report", "sync_accounts", "prune_runs", "demo"]
        assert [f"usage: manage.py {name} " in shop.run(name, "--help") for name in names] == [True] * len(names)


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
        before, seed = shop.contents(), ("seed", "--accounts=5", "--orders=300", "--verbosity=0")
        with contextlib.ExitStack() as stack:
            with shop.held(lock_key("shop", "seed", namespace="")):
                seeds = [stack.enter_context(shop.start(*seed)) for _ in range(2)]
                until(lambda: shop.ask(WAITING, "advisory") == [2])
            errors = [seed.communicate(timeout=SECONDS)[1] for seed in seeds]
        assert errors == ["", ""]
        assert shop.contents() == before

    def test_keys_go_on_after_the_last(self, shop):
        assert shop.ask("SELECT nextval(pg_get_serial_sequence('shop_order', 'id'))") == [301]

    def test_orders_of_a_year(self, shop):
        months = shop.ask("SELECT DISTINCT to_char(placed_at AT TIME ZONE 'UTC', 'YYYY-MM') FROM shop_order ORDER BY 1")
        assert (len(months), months[0], months[-1]) == (12, "2025-10", "2026-09")

    def test_defaults(self, shop):
        shop.run("seed", "--verbosity=0")
        contents = shop.contents()
        shop.run("seed", "--accounts=5", "--orders=300", "--verbosity=0")
        assert (contents["shop_account"][0], contents["shop_order"][0]) == (200, 20_000)

    def test_makes_a_user_for_the_admin(self, shop):
        """At verbosity 0, which would not show the password, it makes none; and it leaves alone one that is there."""
        users = "SELECT username, is_superuser FROM auth_user"
        seed = ("seed", "--accounts=5", "--orders=300")
        shop.connection.execute("DELETE FROM auth_user")
        shop.run(*seed, "--verbosity=0")
        assert shop.ask(users) == []
        written = shop.run(*seed)
        assert "Log in at /admin/ as 'shop', with the password '" in written
        password = written.split("'")[-2]
        assert shop.ask(users) == [("shop", True)]
        assert Client().login(username="shop", password=password)
        assert "keeps the password" in shop.run(*seed)
        assert Client().login(username="shop", password=password)

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
        with shop.start("sync_accounts", "--delay=0") as one, shop.start("sync_accounts", "--delay=0") as two:
            with shop.table_held("shop_account") as wait_for:
                wait_for(2)
                shop.connection.execute("UPDATE shop_account SET synced_at = now() WHERE id > 2")
            outputs = [process.communicate(timeout=SECONDS)[0] for process in (one, two)]
        # Each got one of the first two accounts, and found the other one busy or done.
        assert all(output.startswith("Accounts synced: 1; ") for output in outputs)
        assert sorted(shop.ask("SELECT subject FROM shop_run")) == ["1", "2"]

    def test_options(self, shop):
        assert "Accounts synced: 1; " in shop.run("sync_accounts", "--delay=0", "--limit=1")
        assert "Accounts synced: 5; " in shop.run("sync_accounts", "--delay=0", "--older-than=0")
        assert "at least 0" in shop.run("sync_accounts", "--delay=nan", status=2)


class TestPruneRuns:
    def test_once_in_its_interval(self, shop):
        shop.connection.execute(
            "INSERT INTO shop_run (task, subject, pid, host, started_at)"
            " VALUES ('x', 'old', 1, '', now() - interval '31 days'), ('x', 'young', 1, '', now() - interval '29 days')"
        )
        assert shop.run("prune_runs") == "Deleted 1 runs.\n"
        assert shop.run("prune_runs").startswith("Skipped, too soon")
        assert shop.ask("SELECT subject FROM shop_run ORDER BY id") == ["young", "all"]
        assert shop.run("prune_runs", "--lock-ignore-interval") == "Deleted 0 runs.\n"

    def test_one_at_a_time(self, shop):
        with shop.held(PRUNE):
            assert shop.run("prune_runs", "--lock-ignore-interval").startswith("Skipped.")
        assert shop.contents()["shop_run"][0] == 0


@pytest.mark.parametrize(
    "command",
    [
        ("seed", "--accounts=5", "--orders=300"),
        ("refresh_reports",),
        ("generate_monthly_report", "2026-09"),
        ("sync_accounts",),
        ("prune_runs",),
    ],
    ids=lambda command: command[0],
)
def test_quiet_at_verbosity_0(shop, command):
    assert shop.run(*command, "--verbosity=0") == ""


def test_a_busy_command_is_quiet_at_verbosity_0(shop):
    with shop.held(REFRESH):
        assert shop.run("refresh_reports", "--verbosity=0") == ""


def post(path, **data):
    return Client().post(path, data)


def post_elsewhere(path):
    """Post in another thread, so over another session; return the status."""
    return Thread(lambda: post(path).status_code).result()


MONTH = "/reports/2026-09/"
CSV = "/reports/2026-09/orders.csv"
SYNC = "/accounts/2/sync/"
GENERATE = "/api/reports/2026-09/generate/"


class TestPages:
    @pytest.mark.parametrize(
        ("path", "status"), [("/", 200), (MONTH, 200), ("/accounts/", 200), ("/reports/2031-01/", 404), ("/x", 404)]
    )
    def test_is_whole(self, shop, path, status):
        response = Client().get(path)
        assert response.status_code == status
        text = response.content.decode()
        parse_html(text)  # refuses what is not closed
        assert [text.count(tag) for tag in ("<h1>", "<main", "<title>", "<html lang=")] == [1] * 4
        assert "<script" not in text

    def test_style_comes_from_here(self, shop):
        response = Client().get("/static/shop/shop.css")
        assert response.status_code == 200
        style = b"".join(response).decode()
        assert "prefers-color-scheme: dark" in style
        assert "url(" not in style
        assert "@import" not in style

    def test_overview(self, shop):
        assert Client().get("/").content.decode().count("Not computed yet") == 12
        shop.run("generate_monthly_report", "2026-09", "--verbosity=0")
        ((count, host, pid),) = shop.ask(
            "SELECT order_count, computed_by_host, computed_by_pid FROM shop_monthlyreport"
        )
        text = Client().get("/").content.decode()
        assert text.count("Not computed yet") == 11
        assert f'<td class="number">{count}</td>' in text
        assert f"{host}, process {pid}" in text
        assert text.index("2026-09") < text.index("2025-10")

    def test_empty_shop_says_what_to_do(self, shop):
        from testproject.shop.models import Account

        with transaction.atomic():
            Account.objects.all().delete()  # and their orders
            for path in ("/", "/accounts/"):
                assert "manage.py seed" in Client().get(path).content.decode()
            transaction.set_rollback(True)

    def test_generate(self, shop):
        response = Client().post(MONTH, follow=True)
        assert response.redirect_chain == [(MONTH, 302)]
        assert "The report of 2026-09 is ready" in response.content.decode()
        assert shop.ask(TestRefreshReports.REPORTS) == shop.ask(TestRefreshReports.TRUTH)[-1:]
        assert shop.ask("SELECT subject, pid FROM shop_run WHERE finished_at > started_at") == [
            ("2026-09", os.getpid())
        ]

    def test_generate_needs_the_token(self, shop):
        client = Client(enforce_csrf_checks=True)
        assert client.post(MONTH).status_code == 403
        token = client.get(MONTH).cookies["csrftoken"].value
        assert client.post(MONTH, {"csrfmiddlewaretoken": token}).status_code == 302

    def test_busy_month_says_so_and_can_be_read(self, shop):
        with shop.held(SEPTEMBER):
            response = post(MONTH)
            assert (response.status_code, response["Retry-After"]) == (409, "2")
            assert "Nothing was done." in response.content.decode()
            assert "Try again" in response.content.decode()
            parse_html(response.content.decode())
            assert Client().get(MONTH).status_code == 200
            assert shop.contents()["shop_run"][0] == 0
            assert post("/reports/2026-08/").status_code == 302
        assert post(MONTH).status_code == 302

    @pytest.mark.parametrize("month", ["2031-01", "2026-13", "2026-9"])
    def test_no_such_month(self, shop, month):
        assert Client().get(f"/reports/{month}/").status_code == 404
        assert post(f"/reports/{month}/").status_code == 404
        assert Client().get(f"/reports/{month}/orders.csv").status_code == 404

    def test_sync(self, shop):
        response = Client().post(SYNC, {"page": "1"}, follow=True)
        assert response.redirect_chain == [("/accounts/?page=1#account-2", 302)]
        assert "Account 2 is synced." in response.content.decode()
        assert shop.ask(TestSyncAccounts.SYNCED) == [2]

    def test_busy_account(self, shop):
        with shop.held(sync_key(2)):
            response = post(SYNC)
            assert (response.status_code, response["Retry-After"]) == (409, "1")
            assert "409.html" in [template.name for template in response.templates]
            parse_html(response.content.decode())
            assert post("/accounts/3/sync/").status_code == 302
        assert shop.ask(TestSyncAccounts.SYNCED) == [3]

    @pytest.mark.parametrize("pk", ["0", "999", str(2**63 - 1), str(2**63), "9" * 40])
    def test_no_such_account(self, shop, pk):
        assert post(f"/accounts/{pk}/sync/").status_code == 404

    def test_sync_is_for_post(self, shop):
        assert Client().get(SYNC).status_code == 405

    def test_pages_of_accounts(self, shop):
        assert Client().get("/accounts/?page=2").status_code == 404
        assert Client().get("/accounts/?page=1").content.decode().count(">Sync</button>") == 5


class TestExport:
    TRUTH = """
        SELECT o.id, o.amount, a.name FROM shop_order o JOIN shop_account a ON a.id = account_id
        WHERE to_char(placed_at AT TIME ZONE 'UTC', 'YYYY-MM') = '2026-09' ORDER BY placed_at, o.id"""

    def test_orders(self, shop):
        response = Client().get(CSV)
        head, *rows = csv.reader(b"".join(response).decode().splitlines())
        assert response["Content-Type"] == "text/csv; charset=utf-8"
        assert response["Content-Disposition"] == 'attachment; filename="orders-2026-09.csv"'
        assert head == ["order", "placed_at", "account", "amount"]
        assert [(int(row[0]), Decimal(row[3]), row[2]) for row in rows] == shop.ask(self.TRUTH)

    def test_no_new_report_while_it_streams(self, shop):
        response = Client().get(CSV)
        lines = iter(response)
        assert next(lines).startswith(b"order,")
        assert [mode for _, mode in shop.ask(ADVISORY)] == ["ShareLock"]
        assert post_elsewhere(MONTH) == 409
        assert post_elsewhere("/reports/2026-08/") == 302
        assert shop.apart.run("generate_monthly_report", "2026-09").startswith("Skipped.")
        assert len(list(lines)) == len(shop.ask(self.TRUTH))
        assert shop.ask(ADVISORY) == []
        assert post_elsewhere(MONTH) == 302

    def test_nor_in_the_thread_that_began_to_stream(self, shop):
        """Its session has the lock, which is the response's now: the thread's next request is not let in by it."""
        response = Client().get(CSV)
        assert post(MONTH).status_code == 409
        response.close()
        assert post(MONTH).status_code == 302

    def test_several_at_once(self, shop):
        def read():
            return b"".join(Client().get(CSV))

        response = Client().get(CSV)
        assert Thread(read).result() == read() == b"".join(response)

    def test_client_that_goes_away_half_way(self, shop):
        response = Client().get(CSV)
        next(iter(response))
        response.close()
        assert shop.ask(ADVISORY) == []

    def test_head(self, shop):
        response = Client().head(CSV)
        assert response.status_code == 200
        response.close()
        assert shop.ask(ADVISORY) == []

    def test_not_while_the_report_is_computed(self, shop):
        with shop.held(SEPTEMBER):
            response = Client().get(CSV)
        assert response.status_code == 409
        assert "Nothing was done." in response.content.decode()


class TestApi:
    @pytest.fixture
    def client(self, shop):
        from django.contrib.auth.models import User

        client = Client()
        client.force_login(User.objects.get_or_create(username="somebody")[0])
        return client

    def test_generate(self, shop, client):
        response = client.post(GENERATE)
        assert response.status_code == 200
        report = response.json()
        assert (report["month"], report["order_count"], Decimal(report["total"])) == shop.ask(
            TestRefreshReports.REPORTS
        )[0]
        assert report == client.get("/api/reports/2026-09/").json()
        assert client.get("/api/reports/").json() == [report]

    @pytest.mark.parametrize("accept", ["*/*", "application/json", "text/csv"])
    def test_busy(self, shop, client, accept):
        with shop.held(SEPTEMBER):
            response = client.post(GENERATE, headers={"accept": accept})
            if accept != "text/csv":  # which is refused before anything else
                assert (response.status_code, response["Retry-After"]) == (409, "1")
            assert response["Content-Type"] == "application/json"
            assert list(response.json()) == ["detail"]
            assert client.get("/api/reports/").status_code == 200
            assert client.post("/api/reports/2026-08/generate/").status_code == 200
        assert shop.ask("SELECT subject FROM shop_run") == ["2026-08"]

    def test_stranger_is_refused_before_the_lock_is_tried(self, shop):
        with shop.held(SEPTEMBER):
            assert post(GENERATE).status_code == 401
        assert post(GENERATE).status_code == 401
        assert Client().get("/api/reports/").status_code == 401
        assert shop.contents()["shop_run"][0] == 0

    def test_no_such_month(self, shop, client):
        response = client.post("/api/reports/2031-01/generate/")
        assert (response.status_code, response.json()) == (
            404,
            {"detail": "There are no orders in 2031-01, so there is nothing to report."},
        )
        assert client.post("/api/reports/2026-13/generate/").status_code == 404
        assert client.get("/api/reports/2026-09/").status_code == 404  # not computed yet

    def test_missing_framework_is_named(self, shop, tmp_path):
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['rest_framework'] = None\n")
        written = shop.apart.run("check", status=1, PYTHONPATH=str(tmp_path))
        assert written.startswith("The shop needs Django REST framework.")
        assert "Traceback" not in written


TYPED = {"name": "Anna & Co", "email": "anna@example.com", "balance": "12.50", "synced_at_0": "", "synced_at_1": ""}


class TestAdmin:
    ACCOUNTS = "/admin/shop/account/"
    CHANGE = "/admin/shop/account/2/change/"
    DELETE = "/admin/shop/account/2/delete/"
    PERIODIC = "/admin/django_advisory_lock/periodicrun/"
    NAMES = "SELECT name FROM shop_account ORDER BY id"
    SKIPPED = re.compile(r"Account 2 \(held by .*\) was skipped, because somebody else is working on it right now\.")

    @pytest.fixture(autouse=True)
    def account_2(self, shop):
        yield
        shop.connection.execute(
            "UPDATE shop_account SET name = 'Account 2', email = 'account2@example.com' WHERE id = 2"
        )

    @pytest.fixture
    def client(self, shop):
        return self.logged_in()

    def logged_in(self):
        from django.contrib.auth.models import User

        client = Client()
        client.force_login(User.objects.get_or_create(username="boss", is_superuser=True, is_staff=True)[0])
        return client

    @pytest.fixture
    def impatient(self, monkeypatch):
        from testproject.shop.admin import AccountAdmin

        monkeypatch.setattr(AccountAdmin, "lock_timeout", 0)

    def act(self, client, action, *pks, page=ACCOUNTS):
        """Run an action of a list, and return what the page says afterwards."""
        response = client.post(page, {"action": action, "_selected_action": pks}, follow=True)
        assert response.status_code == 200
        return [str(message) for message in response.context["messages"]]

    def test_sync_goes_around_busy_accounts(self, shop, client):
        with shop.held(sync_key(2)):
            said = self.act(client, "sync_now", 1, 2, 3)
        skipped, synced = said
        assert self.SKIPPED.fullmatch(skipped)
        assert synced == "2 accounts are synced."
        assert shop.ask(TestSyncAccounts.SYNCED) == [1, 3]

    def test_sync_of_one(self, shop, client):
        with shop.held(sync_key(2)):
            (said,) = self.act(client, "sync_now", 2)
            assert self.SKIPPED.fullmatch(said)
        assert self.act(client, "sync_now", 2) == ["Account 2 is synced."]
        assert shop.ask("SELECT subject FROM shop_run") == ["2"]

    def test_save_while_it_is_synced(self, shop, client, impatient):
        with shop.held(sync_key(2)):
            response = client.post(self.CHANGE, TYPED)
            text = response.content.decode()
            assert response.status_code == 409
            assert "Nothing was saved" in text
            assert 'value="Anna &amp; Co"' in text
            assert 'value="anna@example.com"' in text
            assert client.post(self.CHANGE.replace("2", "3"), {"name": ""}).status_code == 200  # not busy, not valid
        assert "Anna & Co" not in shop.ask(self.NAMES)
        assert client.post(self.CHANGE, TYPED).status_code == 302
        assert "Anna & Co" in shop.ask(self.NAMES)

    def test_delete_while_it_is_synced(self, shop, client, impatient):
        with shop.held(sync_key(2)):
            response = client.post(self.DELETE, {"post": "yes"}, follow=True)
        assert response.redirect_chain == [(self.CHANGE, 302)]
        assert "Nothing was" in response.content.decode()
        assert shop.ask(self.NAMES) == [f"Account {number}" for number in range(1, 6)]

    def test_sync_while_it_is_saved(self, shop, client):
        """The page keeps the lock until the commit, so the job, the other page and the action find it busy."""
        from testproject.shop.jobs import sync

        other = self.logged_in()
        with shop.table_held("shop_account") as wait_for:
            save = Thread(lambda: client.post(self.CHANGE, TYPED).status_code)
            wait_for()
            assert sync.delay(2).get() == "busy"
            assert post(SYNC).status_code == 409
            (said,) = self.act(other, "sync_now", 2)
            assert self.SKIPPED.fullmatch(said)
            assert shop.contents()["shop_run"][0] == 0
        assert save.result() == 302
        assert self.act(other, "sync_now", 2) == ["Anna & Co is synced."]

    def test_periodic_runs(self, shop, client):
        shop.run("prune_runs", "--verbosity=0")
        text = client.get(self.PERIODIC).content.decode()
        assert "prune_runs" in text
        assert "succeeded" in text
        (pk,) = shop.ask("SELECT id FROM django_advisory_lock_periodicrun")
        assert shop.run("prune_runs").startswith("Skipped, too soon")
        (said,) = self.act(client, "allow_next_run", pk, page=self.PERIODIC)
        assert said == f"The next run of “{PRUNE.name}” may start now, whenever it comes."
        assert shop.run("prune_runs").startswith("Deleted")


class TestJobs:
    @pytest.fixture
    def jobs(self, shop):
        from testproject.shop import jobs

        return jobs

    def test_generate(self, shop, jobs):
        truth = shop.ask(TestRefreshReports.TRUTH)[-1:]
        assert jobs.generate.delay("2026-09").get() == truth[0][1]
        assert shop.ask(TestRefreshReports.REPORTS) == truth

    def test_generate_busy(self, shop, jobs):
        with shop.held(SEPTEMBER):
            assert jobs.generate.delay("2026-09").get() == "busy"
            assert jobs.generate.delay("2026-08").get() > 0
        assert shop.ask("SELECT subject FROM shop_run") == ["2026-08"]

    def test_sync(self, shop, jobs):
        with shop.held(sync_key(2)):
            assert [jobs.sync.delay(pk).get() for pk in (1, 2, 3)] == ["synced", "busy", "synced"]
        assert shop.ask(TestSyncAccounts.SYNCED) == [1, 3]

    def test_celery_finds_them(self, jobs):
        jobs.app.loader.import_default_modules()
        assert {"shop.generate", "shop.sync"} <= set(jobs.app.tasks)

    @pytest.mark.skipif(django.VERSION < (6, 0), reason="Django has tasks of its own from 6.0 on")
    def test_task_of_django(self, shop, jobs):
        with shop.held(SEPTEMBER):
            busy = jobs.generate_by_django.enqueue("2026-09")
        assert (busy.status.name, busy.return_value) == ("SUCCESSFUL", None)
        done = jobs.generate_by_django.enqueue("2026-09")
        assert (done.status.name, done.return_value) == ("SUCCESSFUL", shop.ask(TestRefreshReports.TRUTH)[-1][1])


class TestTogether:
    """Whoever computes the report of a month keeps all others out, whatever they are."""

    AT_WORK = "SELECT count(*) FROM shop_run WHERE finished_at IS NULL"

    def others(self):
        from django.contrib.auth.models import User

        from testproject.shop.jobs import generate

        client = Client()
        client.force_login(User.objects.get_or_create(username="somebody")[0])
        return post(MONTH).status_code, client.post(GENERATE).status_code, generate.delay("2026-09").get()

    def test_command_at_work(self, shop):
        with shop.start("generate_monthly_report", "2026-09") as command:
            with shop.table_held("shop_monthlyreport") as wait_for:
                wait_for()
                assert self.others() == (409, 409, "busy")
            assert command.communicate(timeout=SECONDS)[0].startswith("2026-09: ")
        assert shop.ask("SELECT pid FROM shop_run") == [command.pid]

    def test_page_at_work(self, shop):
        with shop.table_held("shop_monthlyreport") as wait_for:
            page = Thread(lambda: post(MONTH).status_code)
            wait_for()
            assert shop.run("generate_monthly_report", "2026-09").startswith("Skipped.")
            assert self.others() == (409, 409, "busy")
            assert shop.ask(self.AT_WORK) == [1]
            # What keeps them out is the lock: without it the second one is let in.
            command = Thread(lambda: shop.run("generate_monthly_report", "2026-09", "--no-lock", "--verbosity=0"))
            wait_for(2)
            assert shop.ask(self.AT_WORK) == [2]
        assert (page.result(), command.result()) == (302, "")
