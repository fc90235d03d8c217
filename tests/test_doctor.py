"""The doctor: each ailment is made for real, found under its name, and nothing is left behind."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import socket
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.db.backends.postgresql.features import DatabaseFeatures
from django.db.backends.signals import connection_created
from django.test import modify_settings, override_settings
from django.utils.connection import ConnectionDoesNotExist
from psycopg.pq import TransactionStatus

from django_advisory_lock import advisory_lock
from django_advisory_lock.doctor import (
    Finding,
    FindingId,
    Severity,
    diagnose,
    diagnose_quickly,
    examining,
    project,
    timeouts,
    visits,
    worst,
)
from django_advisory_lock.doctor import server as doctor_server
from django_advisory_lock.management.subcommands.base import Status
from tests.bouncer import Bouncer, bouncer
from tests.proxy import Proxy
from tests.server import Server, Watcher, new_home, new_server
from tests.support import OtherSession, extra_alias, wait_until
from tests.test_faults import SMALL, Crowd
from tests.test_models import ago, write

ALIAS = "examined"
# Of its own for each run, so that the port, which is always the same, is free there.
ADDRESS = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}.{random.randint(2, 254)}"
IDS: tuple[FindingId, ...] = typing.get_args(FindingId)


Part = Callable[[str], Iterable[Finding]]


def ask_server(alias: str) -> list[Finding]:
    """Return that part of the examination, which needs one session and a few milliseconds."""
    with visits.first_session(alias) as session:
        return list(examining._ask_server(session, is_pooled=False))


def severities(findings: list[Finding]) -> dict[str, Severity]:
    assert len({finding.id for finding in findings}) == len(findings)
    return {finding.id: finding.severity for finding in findings}


def finding(name: FindingId, severity: Severity, alias: str = ALIAS, *, part: Part = diagnose) -> Finding:
    """Return the finding of a name, which has to be there with this severity, and to be complete."""
    (found,) = [found for found in part(alias) if found.id == name]
    assert found.severity == severity, found
    if severity != "ok":
        assert found.meaning
    if severity in ("warning", "error"):
        assert found.advice
    return found


def of_server(name: FindingId, severity: Severity) -> Finding:
    return finding(name, severity, part=ask_server)


def of_project(name: FindingId, severity: Severity, alias: str = ALIAS) -> Finding:
    return finding(name, severity, alias, part=project.probe_project)


def quick(alias: str = ALIAS) -> dict[str, Severity]:
    return severities(diagnose_quickly(alias))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with new_server(**SMALL, listen_addresses=ADDRESS) as server:
        yield server


@pytest.fixture
def watcher(server: Server, django_db_setup: None) -> Iterator[Watcher]:
    """A session that sees whether the doctor leaves locks or sessions behind."""
    watcher = Watcher(server)
    wait_until_alone(watcher)
    yield watcher
    wait_until(lambda: watcher.advisory_locks() == [], "no lock is left")
    wait_until_alone(watcher)
    watcher.close()


def wait_until_alone(watcher: Watcher) -> None:
    """A session that was closed still counts for a moment."""
    others = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    wait_until(lambda: watcher.one(others) == 0, "no session is left")


@pytest.fixture
def examined(server: Server, watcher: Watcher) -> Iterator[str]:
    with server.alias(ALIAS) as alias:
        yield alias


@contextlib.contextmanager
def when_connected(*alias: str, call: Callable[[], object]) -> Iterator[None]:
    """Call something each time that a session of an alias was opened."""

    def receive(connection: Any, **kwargs: Any) -> None:
        if connection.alias in alias:
            call()

    connection_created.connect(receive)
    try:
        yield
    finally:
        connection_created.disconnect(receive)


def at_each_statement(monkeypatch: pytest.MonkeyPatch, call: Callable[[visits.Session, str], object]) -> None:
    """Call something before each statement of the doctor."""
    rows = visits.Session.rows

    def call_and_ask(session: visits.Session, statement: str, *params: Any) -> list[Any]:
        call(session, statement)
        return rows(session, statement, *params)

    monkeypatch.setattr(visits.Session, "rows", call_and_ask)


@pytest.fixture
def newest(watcher: Watcher) -> bool:
    """Whether the server has `transaction_timeout`: PostgreSQL 17."""
    return bool(watcher.one("SELECT count(*) FROM pg_settings WHERE name = 'transaction_timeout'"))


class TestHealthy:
    def test_every_question_has_an_answer(self, examined: str, newest: bool) -> None:
        answers = severities(diagnose(examined))
        assert set(IDS) - set(answers) == (set() if newest else {"transaction_timeout"})
        unwell = {name: severity for name, severity in answers.items() if severity != "ok"}
        assert unwell == {"application_name": "note", "periodic": "note"}
        assert quick() == {}

    def test_a_setting_that_an_older_server_does_not_have(self, examined: str) -> None:
        with visits.first_session(examined) as session:
            answers = doctor_server.Server(session)
            del answers.settings["lock_timeout"]
            assert {found.id for found in timeouts.probe_timeouts(answers)} >= {
                "idle_session_timeout",
                "statement_timeout",
            }
            assert "lock_timeout" not in {found.id for found in timeouts.probe_timeouts(answers)}
            assert answers.number("lock_timeout") == 0

    def test_the_worst_comes_first(self, examined: str) -> None:
        with override_settings(ADVISORY_LOCK_SESSION_POOLER=[examined]):
            found = [finding.severity for finding in diagnose(examined)]
        assert found == sorted(found, key=["error", "warning", "note", "ok"].index)

    def test_the_database_of_locks_is_examined(self, examined: str) -> None:
        with override_settings(ADVISORY_LOCK_DATABASE="sqlite"):
            assert severities(diagnose()) == {"engine": "error"}

    def test_the_connection_of_the_thread_is_left_alone(self, examined: str) -> None:
        diagnose(examined)
        diagnose_quickly(examined)
        assert connections[examined].connection is None

    def test_inside_a_lock_and_a_transaction(self, name: str, examined: str) -> None:
        with advisory_lock(name, using=examined) as lock:
            finding("exclusion", "ok")
            assert quick() == {}
            assert lock.is_held()

    def test_a_few_statements_at_a_glance(self, examined: str, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[str] = []
        at_each_statement(monkeypatch, lambda session, statement: sent.append(statement))
        diagnose_quickly(examined)
        assert len(sent) == 6


class TestWrongNames:
    def test_an_unknown_alias(self) -> None:
        with pytest.raises(ConnectionDoesNotExist, match="nowhere"):
            diagnose("nowhere")

    def test_another_engine(self) -> None:
        (found,) = diagnose("sqlite")
        assert (found.id, found.severity) == ("engine", "error")
        assert "SQLite" in found.found
        assert diagnose_quickly("sqlite") == []


class TestUnreachable:
    def test_nobody_listens(self, examined: str, server: Server) -> None:
        with server.alias("down", PORT="1") as alias:
            assert "connection" in finding("connection", "error", alias).found
            assert diagnose_quickly(alias) == []

    def test_settings_that_do_not_connect(self, examined: str, server: Server) -> None:
        with server.alias("nameless", NAME="") as alias:
            assert "NAME" in finding("connection", "error", alias).found

    def test_a_server_that_django_does_not_use(
        self, server: Server, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DatabaseFeatures, "minimum_database_version", (99,))
        with server.alias("ancient") as alias:  # Django looks once for each alias
            assert "PostgreSQL 99 or later" in finding("server", "error", alias).found
            assert quick(alias) == {}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "LIMIT", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
class TestLimitedTime:
    """Whatever stands still, an answer comes."""

    @pytest.fixture
    def proxy(self, server: Server) -> Iterator[Proxy]:
        with Proxy(server.socket) as proxy:
            yield proxy

    def test_a_link_that_stalls(
        self, watcher: Watcher, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(visits, "LIMIT", 1)
        with server.alias(ALIAS, **proxy.settings), when_connected(ALIAS, call=proxy.pause):
            assert finding("connection", "error").found == "The database cannot be asked: no answer within 1 seconds"
            proxy.cut()

    def test_a_link_that_stalls_before_it_is_there(self, watcher: Watcher, server: Server, proxy: Proxy) -> None:
        proxy.pause()
        with server.alias(ALIAS, **proxy.settings):
            finding("connection", "error")
            proxy.cut()

    def test_a_dead_host_before_the_one_that_lives(
        self, watcher: Watcher, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(visits, "LIMIT", 5)
        with socket.create_server((ADDRESS, 0)) as silent:  # the kernel accepts, and nobody answers
            hosts: dict[str, Any] = {
                "HOST": f"{ADDRESS},{ADDRESS}",
                "PORT": f"{silent.getsockname()[1]},{server.parameters['port']}",
            }
            with server.alias(ALIAS, **hosts) as alias, visits.first_session(alias) as session:
                assert session.one("SELECT 1") == 1

    def test_a_session_that_is_over_before_it_begins(self, examined: str) -> None:
        session = visits.first_session(examined)
        session._cut()
        with pytest.raises(visits.TimedOut), session:
            session.one("SELECT 1")

    def test_the_second_one_of_a_pooler_that_has_one(self, other: OtherSession) -> None:
        with bouncer("session", default_pool_size=1) as running, running.alias() as alias:
            found = diagnose(alias)
        assert severities(found)["second_session"] == severities(found)["pooler"] == "warning"
        assert "No second session could be opened: no answer within 1 seconds" in [each.found for each in found]

    def test_an_interrupt(self, examined: str) -> None:
        """The session is closed, as the fixture sees."""

        def interrupt() -> None:
            raise KeyboardInterrupt

        with when_connected(examined, call=interrupt), pytest.raises(KeyboardInterrupt):
            diagnose(examined)


STUBS = {
    "takes nothing": ("pg_try_advisory_lock(bigint) RETURNS bool", "RETURN true", "is not in pg_locks"),
    "never takes": ("pg_try_advisory_lock(bigint) RETURNS bool", "RETURN false", "nobody holds was not given"),
    "takes shared": (
        "pg_try_advisory_lock(bigint) RETURNS bool",
        "PERFORM pg_advisory_lock_shared($1); RETURN true",
        "was given to a second one",
    ),
    "takes nothing shared": ("pg_try_advisory_lock_shared(bigint) RETURNS bool", "RETURN true", "given to a second"),
    "takes no pair": ("pg_try_advisory_lock(int, int) RETURNS bool", "RETURN true", "is not in pg_locks"),
    "takes nothing in a transaction": (
        "pg_try_advisory_xact_lock(bigint) RETURNS bool",
        "RETURN true",
        "is not in pg_locks (exclusive transaction lock",
    ),
    "does not wait": ("pg_advisory_lock(bigint) RETURNS void", "NULL", "had to wait"),
    "does not wait in a transaction": ("pg_advisory_xact_lock(bigint) RETURNS void", "NULL", "had to wait"),
    "frees nothing": ("pg_advisory_unlock(bigint) RETURNS bool", "RETURN true", "still in pg_locks"),
    "frees, and says no": ("pg_advisory_unlock(bigint) RETURNS bool", "RETURN false", "freed nothing"),
    "frees nothing shared": ("pg_advisory_unlock_shared(bigint) RETURNS bool", "RETURN NULL", "answer None"),
}
AT_A_GLANCE = {"takes shared", "never takes", "takes nothing", "frees, and says no"}


class TestExclusion:
    """Case 41: functions that are there, and do nothing, as some that speak PostgreSQL's protocol have."""

    @pytest.fixture
    def stub(self, server: Server, watcher: Watcher) -> Iterator[str]:
        watcher.raw.execute("CREATE DATABASE stub")
        with server.connect(dbname="stub") as raw:
            raw.execute("CREATE SCHEMA stub")
            raw.execute("ALTER DATABASE stub SET search_path = stub, pg_catalog, public")
        with server.alias(ALIAS, NAME="stub") as alias:
            yield alias
        watcher.raw.execute("DROP DATABASE stub WITH (FORCE)")

    def define(self, server: Server, signature: str, body: str) -> None:
        with server.connect(dbname="stub") as raw:
            raw.execute(f"CREATE FUNCTION {signature} LANGUAGE plpgsql AS 'BEGIN {body}; END'")

    @pytest.mark.parametrize("kind", STUBS)
    def test_stubs(self, kind: str, server: Server, stub: str) -> None:
        signature, body, text = STUBS[kind]
        self.define(server, signature, body)
        found = finding("exclusion", "error")
        assert text in found.found
        assert quick() == ({"exclusion": "error"} if kind in AT_A_GLANCE else {})

    def test_a_session_lock_that_ends_with_the_transaction(self, server: Server, stub: str) -> None:
        """As through something that is no pooler, and yet changes the session at each COMMIT."""
        self.define(
            server,
            "pg_try_advisory_lock(bigint) RETURNS bool",
            "IF now() = statement_timestamp() THEN RETURN pg_catalog.pg_try_advisory_lock($1); END IF;"
            " RETURN pg_try_advisory_xact_lock($1)",
        )
        assert "given to a second one" in finding("exclusion", "error").found

    def test_a_holder_that_is_killed(self, examined: str, watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
        """That a second session got the key then is no fault of the server."""

        def kill(session: visits.Session, statement: str) -> None:
            if "pg_try" in statement:
                for pid, _, _ in watcher.advisory_locks():
                    watcher.kill(pid)

        at_each_statement(monkeypatch, kill)
        assert finding("exclusion", "warning").found.startswith("This could not be found out")

    def test_functions_that_are_not_there(self, server: Server, stub: str) -> None:
        self.define(server, "pg_try_advisory_lock(bigint) RETURNS bool", "RAISE EXCEPTION $$not supported$$")
        found = finding("exclusion", "warning")
        assert found.found == "This could not be found out: not supported"
        assert quick() == {}

    def test_another_product(self, server: Server, stub: str) -> None:
        self.define(server, "version() RETURNS text", "RETURN $$CockroachDB CCL v24$$")
        assert "CockroachDB" in finding("server", "warning").found
        assert quick() == {"server": "warning"}

    def test_a_server_that_does_not_tell(self, server: Server, stub: str) -> None:
        self.define(server, "version() RETURNS text", "RAISE EXCEPTION $$unknown function$$")
        assert finding("server", "warning").found.endswith("unknown function")
        assert severities(diagnose(stub))["exclusion"] == "ok"
        assert quick() == {}


class TestFewConnections:
    @pytest.fixture
    def role(self, watcher: Watcher) -> Iterator[str]:
        watcher.raw.execute("CREATE ROLE clerk LOGIN")
        yield "clerk"
        watcher.raw.execute("DROP ROLE clerk")

    def test_one_that_is_allowed_one(self, role: str, server: Server, watcher: Watcher) -> None:
        watcher.raw.execute(f"ALTER ROLE {role} CONNECTION LIMIT 1")
        with server.alias(ALIAS, USER=role) as alias:
            assert "too many connections" in finding("second_session", "warning").found
            wait_until_alone(watcher)
            found = severities(diagnose(alias))
            assert (found["connection"], found["pooler"], found["connections"]) == ("ok", "ok", "warning")
            assert "exclusion" not in found
            wait_until_alone(watcher)
            assert quick() == {"connections": "warning"}
            watcher.raw.execute(f"ALTER ROLE {role} CONNECTION LIMIT 0")
            assert severities(diagnose(alias))["connection"] == "error"

    def test_whose_limit_it_is(self, role: str, server: Server, watcher: Watcher) -> None:
        with server.alias(ALIAS, USER=role):
            assert of_server("connections", "ok").found == "15 of the 17 connections of the server are free."
            watcher.raw.execute(f"ALTER ROLE {role} CONNECTION LIMIT 4")
            wait_until_alone(watcher)
            found = of_server("connections", "warning")
            assert found.found == "3 of the 4 connections of the role are free."
            assert "CONNECTION LIMIT of the role" in found.advice
            database = server.parameters["dbname"]
            watcher.raw.execute(f"ALTER DATABASE {database} CONNECTION LIMIT 5")
            try:
                watcher.raw.execute(f"ALTER ROLE {role} CONNECTION LIMIT 7")
                wait_until_alone(watcher)
                found = of_server("connections", "warning")
                assert found.found == "3 of the 5 connections of the database are free."
            finally:
                watcher.raw.execute(f"ALTER DATABASE {database} CONNECTION LIMIT -1")

    def test_a_server_that_is_almost_full(self, examined: str, server: Server) -> None:
        """A superuser may take those that nobody else may."""
        with contextlib.ExitStack() as stack:
            for _ in range(15):
                stack.enter_context(server.connect())
            found = of_server("connections", "warning")
            assert found.found == "0 of the 17 connections of the server are free."
            assert "superusers" in found.meaning
            assert "max_connections" in found.advice
            assert quick() == {"connections": "warning"}

    def test_what_a_role_sees(self, role: str, server: Server, watcher: Watcher) -> None:
        with server.alias(ALIAS, USER=role):
            assert "'clerk'" in of_server("role", "note").found
            watcher.raw.execute(f"GRANT pg_read_all_stats TO {role}")
            of_server("role", "ok")


class TestLockTable:
    @pytest.fixture
    def crowd(self, server: Server, watcher: Watcher) -> Iterator[Crowd]:
        with contextlib.closing(Crowd(server)) as crowd:
            yield crowd

    def test_half_full(self, examined: str, crowd: Crowd) -> None:
        finding("lock_table", "ok")
        crowd.raw.execute("SELECT pg_advisory_lock(n) FROM generate_series(1, 110) n")
        assert "200 are sure to fit" in finding("lock_table", "warning").found
        assert quick() == {"lock_table": "warning"}

    def test_full(self, examined: str, crowd: Crowd) -> None:
        crowd.fill()
        assert "shared memory" in finding("connection", "error").found
        assert quick() == {}

    def test_full_at_the_second_question(self, examined: str, crowd: Crowd) -> None:
        with when_connected(examined, call=crowd.fill):
            found = diagnose(examined)
        assert severities(found)["lock_table"] == "error"
        assert severities(found)["second_session"] == "warning"


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "severity"),
        [
            ("idle_session_timeout", "warning"),
            ("idle_in_transaction_session_timeout", "note"),
            ("transaction_timeout", "note"),
            ("statement_timeout", "note"),
            ("lock_timeout", "note"),
        ],
    )
    def test_timeouts(self, name: FindingId, severity: Severity, examined: str, watcher: Watcher, newest: bool) -> None:
        if name == "transaction_timeout" and not newest:
            assert name not in severities(diagnose(examined))
            return
        watcher.raw.execute(f"ALTER ROLE CURRENT_USER SET {name} = '5min'")
        try:
            assert of_server(name, severity).found == f"{name} is 5min (set for the role)."
            assert quick() == ({name: severity} if severity == "warning" else {})
        finally:
            watcher.raw.execute(f"ALTER ROLE CURRENT_USER RESET {name}")
        of_server(name, "ok")

    def test_where_they_are_set(self, server: Server, watcher: Watcher) -> None:
        with server.alias(ALIAS, {"options": "-c lock_timeout=2s"}):
            assert of_server("lock_timeout", "note").found == "lock_timeout is 2s (set by the client)."

    def test_isolation(self, server: Server, watcher: Watcher) -> None:
        with server.alias(ALIAS, {"isolation_level": psycopg.IsolationLevel.SERIALIZABLE}):
            found = of_server("isolation", "warning").found
            assert found == "Transactions are SERIALIZABLE (isolation_level in OPTIONS)."
            finding("exclusion", "ok")
        with server.alias(ALIAS, {"options": r"-c default_transaction_isolation=repeatable\ read"}):
            assert of_server("isolation", "warning").found.startswith("Transactions are REPEATABLE READ (default_trans")
        with server.alias(ALIAS, {"isolation_level": psycopg.IsolationLevel.READ_COMMITTED}):
            of_server("isolation", "ok")

    def test_links(self, server: Server, watcher: Watcher) -> None:
        assert "unix socket" in self.keepalives(server, {})
        address = {"hostaddr": ADDRESS}
        options = "-c tcp_keepalives_idle={} -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"
        with server.alias(ALIAS, {**address, "options": options.format(7200)}, HOST="localhost"):
            assert of_server("keepalives", "note").found == "The server notices a cut link after 7,230 s."
        with server.alias(ALIAS, {**address, "options": options.format(60)}, HOST="localhost"):
            assert of_server("keepalives", "ok").found == "The server notices a cut link after 90 s."

    def keepalives(self, server: Server, options: dict[str, str]) -> str:
        with server.alias(ALIAS, options):
            return of_server("keepalives", "ok").found

    def test_connection_check(self, server: Server, watcher: Watcher) -> None:
        name: FindingId = "client_connection_check_interval"
        with server.alias(ALIAS, {"options": f"-c {name}=0"}):
            of_server(name, "note")
        with server.alias(ALIAS, {"options": f"-c {name}=1s"}):
            assert of_server(name, "ok").found == f"{name} is 1s (set by the client)."

    def test_application_name(self, server: Server, watcher: Watcher) -> None:
        with server.alias(ALIAS, {"application_name": "shop-web"}):
            assert "'shop-web'" in of_server("application_name", "ok").found


class TestProject:
    @pytest.mark.parametrize(
        ("pool", "size"), [(True, 4), ({"min_size": 2}, 2), ({"min_size": 2, "max_size": 9}, 9), ({"timeout": 3}, 4)]
    )
    def test_the_pool_of_django(self, pool: Any, size: int, server: Server, watcher: Watcher) -> None:
        with server.alias(ALIAS, {"pool": pool}) as alias:
            assert f" {size} connections" in of_project("pool", "note").found
            assert not connections[alias]._connection_pools.get(alias), "the pool was opened"  # type: ignore[attr-defined]

    def test_a_pool_that_django_refuses(self, server: Server, watcher: Watcher) -> None:
        with server.alias(ALIAS, {"pool": True}, CONN_MAX_AGE=60) as alias:
            of_project("pool", "error")
            connections.settings[alias]["CONN_MAX_AGE"] = connections[alias].settings_dict["CONN_MAX_AGE"] = 0

    @pytest.mark.parametrize(
        ("settings", "severity", "text"),
        [
            ({"CONN_MAX_AGE": 0}, "ok", "ends with its request"),
            ({"CONN_MAX_AGE": 60, "CONN_HEALTH_CHECKS": True}, "ok", "for 60 seconds"),
            ({"CONN_MAX_AGE": None}, "note", "without an end"),
        ],
        ids=str,
    )
    def test_connections_that_stay(
        self, settings: dict[str, Any], severity: Severity, text: str, server: Server, watcher: Watcher
    ) -> None:
        with server.alias(ALIAS, **settings):
            assert text in of_project("conn_max_age", severity).found

    def test_autocommit(self, server: Server, watcher: Watcher) -> None:
        with server.alias(ALIAS, AUTOCOMMIT=False):
            of_project("autocommit", "warning")
            finding("exclusion", "ok")

    def test_atomic_requests(self, server: Server, watcher: Watcher) -> None:
        with server.alias(ALIAS, ATOMIC_REQUESTS=True):
            of_project("atomic_requests", "note")
            with server.alias("beside") as beside:
                assert repr(ALIAS) in of_project("atomic_requests", "warning", beside).found

    def test_hosts(self, server: Server, watcher: Watcher) -> None:
        host = server.parameters["host"]
        hosts: dict[str, Any] = {"HOST": f"{host},{host}", "PORT": server.parameters["port"]}
        with server.alias(ALIAS, **hosts):
            assert "several hosts" in of_project("hosts", "warning").found
        with server.alias(ALIAS, {"target_session_attrs": "read-write"}, **hosts):
            of_project("hosts", "ok")


class TestPeriodicWork:
    @pytest.fixture(autouse=True)
    def no_runs(self, other: OtherSession) -> Iterator[None]:
        """Whatever other tests have left."""
        other.raw.execute("DELETE FROM django_advisory_lock_periodicrun")
        yield
        other.raw.execute("DELETE FROM django_advisory_lock_periodicrun")

    def test_none(self, other: OtherSession) -> None:
        finding("periodic", "ok", "default")

    def test_silent(self, name: str, other: OtherSession) -> None:
        write(name, other, last_succeeded_at=ago(1000))
        assert finding("periodic", "warning", "default").found.endswith(f"intervals: '{name}'.")
        for number in range(12):
            write(f"{name}-{number}", other, last_succeeded_at=ago(1000))
        assert finding("periodic", "warning", "default").found.endswith(" and 3 more.")

    @pytest.mark.parametrize("alias", ["same", "binding"])
    def test_beside_another_engine(self, alias: str, name: str, other: OtherSession) -> None:
        """The alias "default" may be SQLite, and says nothing of how to ask this database."""
        write(name, other, last_succeeded_at=ago(1000))
        held, connections["default"] = connections["default"], connections["sqlite"]
        try:
            assert repr(name) in finding("periodic", "warning", alias).found
        finally:
            connections["default"] = held

    def test_no_table(self, examined: str) -> None:
        assert "migrate" in finding("periodic", "note").advice

    def test_no_permission(self, name: str, other: OtherSession) -> None:
        role = name.replace("-", "_")
        other.raw.execute(f"CREATE ROLE {role}")
        try:
            with extra_alias(ALIAS, {"options": f"-c role={role}"}):
                assert "permission denied" in finding("periodic", "warning").found
        finally:
            other.raw.execute(f"DROP ROLE {role}")

    def test_without_the_app(self, examined: str) -> None:
        with modify_settings(INSTALLED_APPS={"remove": ["django_advisory_lock"]}):
            assert "periodic" not in severities(diagnose(examined))


@pytest.fixture(scope="module")
def in_transaction_mode(django_db_setup: None) -> Iterator[Bouncer]:
    with bouncer("transaction") as running:
        yield running


class TestPoolers:
    def judge(self, alias: str, severity: Severity, *, exclusion: Severity | None = "ok") -> Finding:
        found = severities(diagnose(alias))
        assert found.get("exclusion") == exclusion
        assert "keepalives" not in found
        assert quick(alias) == ({"pooler": severity} if severity in ("warning", "error") else {})
        return finding("pooler", severity, alias)

    def test_transaction_mode(self, in_transaction_mode: Bouncer, other: OtherSession) -> None:
        with in_transaction_mode.alias() as alias:
            assert "in transaction mode" in self.judge(alias, "warning").found
            with override_settings(ADVISORY_LOCK_SESSION_POOLER=[alias]):
                assert "without a guard" in self.judge(alias, "error").meaning

    def test_transaction_mode_at_work(
        self, in_transaction_mode: Bouncer, other: OtherSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others keep the sessions of the pool busy: told by the change alone."""
        with in_transaction_mode.alias() as alias, in_transaction_mode.connect() as client:

            def occupy(session: visits.Session, statement: str) -> None:
                """Take away the session that the first one had."""
                if statement == "BEGIN" and client.info.transaction_status == TransactionStatus.IDLE:
                    client.execute("BEGIN")

            at_each_statement(monkeypatch, occupy)
            assert "in transaction mode" in finding("pooler", "warning", alias).found

    def test_session_mode(self, other: OtherSession) -> None:
        with bouncer("session") as running, running.alias() as alias:
            found = self.judge(alias, "warning")
            assert "ADVISORY_LOCK_SESSION_POOLER" in found.advice
            with override_settings(ADVISORY_LOCK_SESSION_POOLER=[alias]):
                self.judge(alias, "note")
                (exclusion,) = [found for found in diagnose(alias) if found.id == "exclusion"]
                assert "session and transaction locks" in exclusion.found

    def test_statement_mode(self, other: OtherSession) -> None:
        with bouncer("statement") as running, running.alias() as alias:
            found = finding("pooler", "error", alias)
            assert "statement mode" in found.found
            assert "exclusion" not in severities(diagnose(alias))
            assert quick(alias) == {"pooler": "warning"}
            with override_settings(ADVISORY_LOCK_SESSION_POOLER=[alias]):
                assert quick(alias) == {"pooler": "error"}

    @pytest.mark.slow
    def test_a_pool_of_one(self, other: OtherSession, impatient: None) -> None:
        """Two transactions do not fit, so nobody can say whether they exclude each other."""
        with bouncer("transaction", default_pool_size=1) as running, running.alias() as alias:
            found = severities(diagnose(alias))
        assert (found["pooler"], found["exclusion"]) == ("warning", "warning")

    @pytest.mark.slow
    def test_a_pool_that_is_busy(self, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        """PgBouncer hangs up, and not because of its mode."""
        with bouncer("transaction", default_pool_size=1, query_wait_timeout=1) as running, running.alias() as alias:
            with running.connect() as client:
                begin = lambda session, statement: client.execute("BEGIN") if statement == "BEGIN" else None  # noqa: E731
                at_each_statement(monkeypatch, begin)
                found = finding("pooler", "warning", alias)
        assert found.found.startswith("This could not be found out: ")
        assert found.found.endswith("query_wait_timeout")

    def test_none_where_one_is_named(self, examined: str) -> None:
        with override_settings(ADVISORY_LOCK_SESSION_POOLER=[examined]):
            assert "no connection pooler" in finding("pooler", "note").found
            finding("exclusion", "ok")
            assert quick() == {}

    def test_it_dies_meanwhile(self, other: OtherSession, monkeypatch: pytest.MonkeyPatch) -> None:
        with bouncer("transaction") as running, running.alias() as alias:
            at_each_statement(monkeypatch, lambda session, statement: running.kill() if statement == "BEGIN" else None)
            found = finding("pooler", "warning", alias)
            assert found.found.startswith("This could not be found out")


class TestStandby:
    """Case 36."""

    @pytest.mark.slow
    def test_it(self, django_db_setup: None) -> None:
        with new_home() as (account, home, bindir), contextlib.ExitStack() as stack:
            (home / "copy").mkdir()
            primary = Server(account, home, bindir, max_connections="20")
            stack.callback(primary.wipe)
            primary.start()
            primary.stop()
            standby = primary.copy(home / "copy")
            stack.callback(standby.wipe)
            standby.mark_as_standby()
            standby.start()
            with standby.alias(ALIAS):
                assert "primary" in finding("standby", "error").meaning
                finding("exclusion", "ok")
                assert quick() == {"standby": "error"}


def run(*arguments: str, **options: Any) -> tuple[int, str]:
    """Run the subcommand, and return its exit status and what it writes."""
    out, status = io.StringIO(), 0
    try:
        call_command("advisory_lock", "doctor", *arguments, stdout=out, **options)
    except Status as error:
        status = error.returncode
    return status, out.getvalue()


class TestDocumentation:
    def test_every_question_has_its_place(self) -> None:
        page = (Path(__file__).parent.parent / "docs/doctor.md").read_text(encoding="utf-8")
        assert sorted(re.findall("^### (.*)$", page, flags=re.MULTILINE)) == sorted(IDS)


class TestCommand:
    def test_what_it_prints(self, examined: str) -> None:
        with override_settings(ADVISORY_LOCK_SESSION_POOLER=[examined]):
            status, out = run("--database", examined)
        lines = out.splitlines()
        assert status == 0
        assert lines[-1].startswith(f"Advisory locks on '{examined}': ")
        assert " notes, " in lines[-1]
        assert lines[-1].endswith(" ok.")
        start = next(number for number, line in enumerate(lines) if line.endswith("[pooler]"))
        assert lines[start].startswith("note    ADVISORY_LOCK_SESSION_POOLER names")
        assert all(line.startswith(8 * " ") for line in lines[start + 1 : start + 3])

    def test_errors(self) -> None:
        status, out = run(database="sqlite", verbosity=0)
        assert status == 2
        assert out.startswith("error ")
        assert out.endswith("Advisory locks on 'sqlite': 1 error.\n")

    def test_warnings(self, server: Server, watcher: Watcher) -> None:
        with server.alias(ALIAS, {"options": "-c idle_session_timeout=1min"}):
            status, out = run(database=ALIAS, verbosity=0)
        assert status == 1
        assert "[idle_session_timeout]" in out
        assert "[application_name]" not in out

    def test_silence(self, examined: str) -> None:
        assert run(database=examined, verbosity=0) == (0, "")

    def test_json(self, examined: str) -> None:
        status, out = run("--database", examined, "--json")
        told = json.loads(out)
        assert status == 0
        assert (told["database"], told["worst"]) == (examined, "note")
        assert {row["id"] for row in told["findings"]} == set(severities(diagnose(examined)))
        assert set(told["findings"][0]) == {"id", "severity", "found", "meaning", "advice"}

    @override_settings(ADVISORY_LOCK_DATABASE="sqlite")
    def test_the_database_of_locks(self) -> None:
        assert "'sqlite'" in run()[1]

    @pytest.mark.parametrize("setting", [{"ADVISORY_LOCK_DATABASE": 3}, {"ADVISORY_LOCK_SESSION_POOLER": "default"}])
    def test_wrong_settings(self, setting: dict[str, Any]) -> None:
        with override_settings(**setting), pytest.raises(CommandError, match=next(iter(setting))) as caught:
            run()
        assert caught.value.returncode == 69

    def test_an_alias_that_is_not_there(self) -> None:
        with override_settings(ADVISORY_LOCK_DATABASE="nowhere"), pytest.raises(CommandError, match="nowhere"):
            run()
        with pytest.raises(CommandError, match="invalid choice"):
            run("--database", "nowhere")


def test_the_worst_of_nothing() -> None:
    assert worst([]) == "ok"
