"""The demo: what it draws and decides, and the whole of it, on a database of its own."""

import contextlib
import io
import math
import os
import signal

import psycopg
import pytest
from django.core.management.base import BaseCommand
from psycopg.conninfo import conninfo_to_dict

from django_advisory_lock import lock_key
from testproject.demo import claims
from testproject.demo.claims import Claim
from testproject.demo.processes import database_url
from testproject.demo.server import ADVISORY_LOCKS, DOUBLED_ACCOUNTS
from testproject.demo.stage import Stage
from testproject.demo.timeline import Row, axis, cells, render

from .test_shop import SECONDS, new_shop, until

pytestmark = pytest.mark.slow

APART = [(0.0, 1.0), (1.0, 2.0), (5.0, 6.0)]
TOGETHER = [(0.0, 3.0), (1.0, 4.0), (2.0, 5.0)]


class TestTimeline:
    def test_chart(self):
        rows = [
            Row("copy 1", 4.0, [(1.0, 3.0)], "worked"),
            Row("copy 10", 2.0, note="skipped", mark="○"),
        ]
        assert render(rows, width=40) == [
            "           0 s       2 s",
            "  copy 1   ·····██████████·····  worked",
            "  copy 10  ··········○           skipped",
        ]

    @pytest.mark.parametrize(
        ("bar", "text"),
        [
            ((2.0, 3.0), "··█·"),
            ((2.0, 2.7), "··▓·"),
            ((2.2, 2.6), "··▒·"),
            ((2.5, 2.6), "··░·"),
            ((2.5, 2.501), "··░·"),
            ((1.5, 4.0), "·▒██"),
            ((2.0, 2.0), "····"),
        ],
    )
    def test_shade_is_how_long(self, bar, text):
        assert cells(Row("", 4.0, [bar]), 4.0, 4) == text

    def test_many_short_bars_add_up(self):
        assert cells(Row("", 2.0, [(0.0, 0.5), (0.5, 1.0), (1.9, 2.0)]), 2.0, 2) == "█░"

    @pytest.mark.parametrize("until", [0.0, 0.01, 3.99, 4.0])
    def test_mark_stays_in_the_row(self, until):
        text = cells(Row("", until, mark="†"), 4.0, 4)
        assert len(text) == 4
        assert text.index("†") == min(int(until), 3)

    def test_nothing_happened(self):
        assert render([Row("a", 0.0)], width=30)[1].strip() == "a"

    @pytest.mark.parametrize("span", [0.03, 0.5, 1.0, 7.3, 59.0, 600.0, 10_000.0])
    @pytest.mark.parametrize("columns", [20, 44, 60])
    def test_axis_fits(self, span, columns):
        text = axis(span, columns)
        assert len(text) == columns
        assert text.startswith("0 s")

    def test_lines_are_no_wider_than_asked_for(self):
        rows = [Row(f"worker {number}", 10.0, [(2.0, 9.0)], "100 accounts", "○") for number in range(20)]
        assert max(map(len, render(rows, width=80))) == 80


class TestOverlaps:
    @pytest.mark.parametrize(
        ("intervals", "pairs", "peak"),
        [
            ([], 0, 0),
            ([(0.0, 1.0)], 0, 1),
            (APART, 0, 1),
            (TOGETHER, 3, 3),
            ([(0.0, 10.0), (1.0, 2.0), (3.0, 4.0)], 2, 2),
            ([(1.0, 2.0), (1.0, 2.0)], 1, 2),
            ([(3.0, math.inf), (4.0, 5.0)], 1, 2),
            ([(4.0, 5.0), (0.0, 4.5)], 1, 2),
        ],
    )
    def test_count(self, intervals, pairs, peak):
        assert claims.overlapping_pairs(intervals) == pairs
        assert claims.peak(intervals) == peak


class TestClaims:
    """Each claim once as it should be, and as it must be seen to fail."""

    @pytest.mark.parametrize(
        ("holds", "claim"),
        [
            (True, claims.one_worked(1, 9, 10)),
            (False, claims.one_worked(2, 8, 10)),
            (False, claims.one_worked(0, 10, 10)),
            (False, claims.one_worked(1, 8, 10)),
            (True, claims.gave_up_meanwhile(1, 9)),
            (False, claims.gave_up_meanwhile(2, 8)),
            (False, claims.gave_up_meanwhile(0, 10)),
            (True, claims.one_answered([302, 409, 409], command_skipped=True)),
            (False, claims.one_answered([302, 409, 409], command_skipped=False)),
            (False, claims.one_answered([302, 302, 409], command_skipped=True)),
            (False, claims.one_answered([409, 409, 409], command_skipped=True)),
            (False, claims.one_answered([302, 409, 500], command_skipped=True)),
            (True, claims.never_two(APART)),
            (False, claims.never_two(TOGETHER)),
            (False, claims.never_two([*APART, (5.9, 7.0)])),
            (False, claims.never_two([])),
            (True, claims.all_collided(TOGETHER, 3)),
            (False, claims.all_collided(TOGETHER, 4)),
            (False, claims.all_collided(APART, 3)),
            (True, claims.each_once(200, 200, 200)),
            (False, claims.each_once(201, 200, 200)),
            (False, claims.each_once(199, 199, 200)),
            (True, claims.no_account_twice(0)),
            (False, claims.no_account_twice(1)),
            (True, claims.shared_out([1, 7])),
            (False, claims.shared_out([0, 8])),
            (True, claims.accounts_collided(1, 20, 21)),
            (False, claims.accounts_collided(0, 20, 20)),
            (True, claims.taken_over(0.1, 5.0)),
            (False, claims.taken_over(5.1, 5.0)),
            (False, claims.taken_over(-0.1, 5.0)),
            (False, claims.taken_over(None, 5.0)),
            (True, claims.once_in_its_interval(1, 0, 1)),
            (False, claims.once_in_its_interval(1, 1, 1)),
            (False, claims.once_in_its_interval(1, 0, 0)),
            (False, claims.once_in_its_interval(0, 2, 1)),
            (True, claims.nothing_left(0)),
            (False, claims.nothing_left(1)),
        ],
    )
    def test_claim(self, holds, claim):
        assert claim.holds is holds
        assert claim.text


class TestStage:
    def stage(self, encoding="utf-8", **options):
        raw = io.BytesIO()
        command = BaseCommand(stdout=io.TextIOWrapper(raw, encoding, write_through=True), no_color=True)
        return Stage(command, **{"quiet": False} | options), raw

    def test_writes(self):
        stage, raw = self.stage()
        stage.step("A step", "A paragraph. " * 10)
        stage.chart([Row("a", 2.0, [(0.0, 1.0)], mark="†")])
        stage.claim(Claim(True, "this holds"))
        stage.claim(Claim(False, "this does not"))
        lines = raw.getvalue().decode().splitlines()
        assert "1. A step" in lines
        assert "   ✓ this holds" in lines
        assert "   ✗ this does not" in lines
        assert max(map(len, lines)) <= 80
        assert stage.failed == [Claim(False, "this does not")]

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
    def test_terminal_without_the_characters(self, encoding):
        stage, raw = self.stage(encoding)
        stage.chart([Row("a", 2.0, [(0.0, 1.0)], mark="○")])
        stage.claim(Claim(False, "text"))
        assert b"##" in raw.getvalue()
        assert b"! text" in raw.getvalue()

    def test_quiet(self):
        stage, raw = self.stage(quiet=True)
        stage.step("A step", "A paragraph")
        stage.chart([Row("a", 1.0)])
        stage.claim(Claim(False, "text"))
        stage.end("end")
        assert raw.getvalue() == b""
        assert stage.failed


@pytest.mark.parametrize(
    "parameters",
    [
        {"dbname": "shop", "host": "/var/run/postgresql", "port": "5432", "user": "me"},
        {"dbname": "a b/c?d&e=f#g%20é", "user": "x@y:z", "password": "p+w%;'\\ \"", "sslmode": "require"},
        {"service": "mine", "options": "-c statement_timeout=5s"},
    ],
)
def test_database_url(parameters):
    also = {"cursor_factory": object, "context": object(), "prepare_threshold": None, "user": ""}
    assert conninfo_to_dict(database_url(also | parameters)) == parameters


@pytest.fixture(scope="module")
def shop():
    with new_shop(accounts=1, orders=1) as shop:
        yield shop


DEMO_KEY = lock_key("shop", "demo", namespace="")
DEMO = ("demo", "--copies=3", "--accounts=6")
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s"


@contextlib.contextmanager
def demo_at_work(shop):
    """Start a demo, and wait until some of its processes are there."""
    with shop.start(*DEMO) as demo:
        try:
            until(lambda: shop.ask(SESSIONS, "shop-demo copy %")[0] >= 2)
            yield demo
        finally:
            demo.kill()


class TestDemo:
    @pytest.mark.timeout(300)  # the whole demo, which takes a minute where nothing else runs
    def test_all_claims_hold_right_after_a_killed_demo(self, shop):
        with demo_at_work(shop) as demo:
            demo.kill()
        output = shop.run(*DEMO)
        assert "✗" not in output
        assert output.count("✓") == 22
        assert "All 22 claims hold." in output
        assert max(map(len, output.splitlines())) <= 80
        assert shop.ask("SELECT count(*) FROM shop_account") == [6]
        assert shop.ask(SESSIONS, "shop-demo %") == [0]

    def test_locks_that_do_not_exclude_are_noticed(self, shop, tmp_path):
        """The negative control of the demo as a whole: a namespace for each process, so that no locks meet."""
        (tmp_path / "broken_settings.py").write_text(
            "import os\nfrom testproject.settings import *\nADVISORY_LOCK_NAMESPACE = f'process {os.getpid()}'\n"
        )
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        broken = {"DJANGO_SETTINGS_MODULE": "broken_settings", "PYTHONPATH": path}
        output = shop.run(*DEMO, "--verbosity=0", status=1, **broken)
        assert output.startswith("CommandError: The demo failed:\n")  # and stdout is empty
        assert "- 3 of 3 copies worked, 0 skipped" in output
        assert "- never two at work at the same time (3 overlaps in the log)" in output
        assert "- no account was in two hands at a time" in output
        assert "- 1 of 5 requests worked, 4 were answered 409; the command worked" in output
        assert " before the kill" in output
        assert "- the first ran once, the second once" in output

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
    def test_interrupt_ends_all_processes(self, shop, number):
        with demo_at_work(shop) as demo:
            demo.send_signal(number)
            _, errors = demo.communicate(timeout=SECONDS)
        assert demo.returncode == 130, errors
        # An interrupt in the middle of a query ends the session, and the library says first that the lock is lost.
        assert errors.splitlines()[-1].startswith("CommandError: Interrupted;")
        until(lambda: shop.ask(SESSIONS, "shop-demo %") == [0])

    def test_only_one_at_a_time(self, shop):
        with shop.held(DEMO_KEY):
            assert "'shop:demo'" in shop.run(*DEMO, status=1)

    @pytest.mark.parametrize("option", ["--copies=1", "--accounts=3"])
    def test_too_small(self, shop, option):
        assert "at least 2 copies and 4 accounts" in shop.run("demo", option, status=1)


class TestServer:
    @pytest.mark.parametrize(
        ("runs", "doubled"),
        [
            ("('1', 0, 5), ('1', 5, 9), ('2', 3, 7)", 0),
            ("('1', 0, 5), ('1', 4, 9), ('2', 3, 7)", 1),
            ("('1', 0, 5), ('1', 4, 9), ('1', 3, 7), ('2', 0, 9), ('2', 1, 2)", 2),
            ("('1', 0, NULL), ('1', 4, 9)", 1),
        ],
    )
    def test_doubled_accounts(self, shop, runs, doubled):
        shop.reset()
        shop.connection.execute(
            "INSERT INTO shop_run (task, pid, host, subject, started_at, finished_at)"
            " SELECT 'sync_accounts', 1, '', subject, now() + a * interval '1 s', now() + b * interval '1 s'"
            f" FROM (VALUES {runs}) AS runs (subject, a, b)"
        )
        assert shop.ask(DOUBLED_ACCOUNTS, 0) == [doubled]
        assert shop.ask(DOUBLED_ACCOUNTS, shop.ask("SELECT max(id) FROM shop_run")[0]) == [0]

    def test_advisory_locks_of_others(self, shop):
        with psycopg.connect(shop.url) as other:
            other.execute("SELECT pg_advisory_lock(1), pg_advisory_lock_shared(2, 3)")
            assert shop.ask(ADVISORY_LOCKS) == [2]
            other.rollback()
            other.execute("SELECT pg_advisory_unlock_all()")
            with shop.held(DEMO_KEY):
                assert shop.ask(ADVISORY_LOCKS) == [0]
