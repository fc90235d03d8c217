"""System checks: ids for good, and only where they are asked for."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.db import Error, connections
from django.test import override_settings

from django_advisory_lock import checks as own_checks
from django_advisory_lock import doctor
from django_advisory_lock.checks import check_database, check_periodic_runs, check_settings
from django_advisory_lock.models import PeriodicRun
from tests.bouncer import bouncer
from tests.support import OtherSession, extra_alias, output, spawn
from tests.test_models import ago, write


def warnings_of(name: str, *databases: str) -> list[Any]:
    return [warning for warning in check_periodic_runs(databases=databases) if name in warning.msg]


class TestSilentWork:
    @pytest.fixture(autouse=True)
    def no_runs(self, other: OtherSession) -> Iterator[None]:
        yield
        other.raw.execute("DELETE FROM django_advisory_lock_periodicrun")

    def test_registered_for_databases_that_are_named(self, name: str, other: OtherSession) -> None:
        registered: dict[Any, Any] = {check: check.tags for check in checks.registry.registry.get_checks()}
        assert registered[check_periodic_runs] == (checks.Tags.database,)
        write(name, other, last_succeeded_at=ago(1000))
        assert not [warning for warning in checks.run_checks() if name in warning.msg]
        assert [warning.id for warning in checks.run_checks(databases=["default"]) if name in warning.msg] == [
            "django_advisory_lock.W001"
        ]

    def test_what_it_says(self, name: str, other: OtherSession) -> None:
        write(name, other, last_succeeded_at="'2024-05-06 07:08:09+00'", last_outcome="'failed'")
        (warning,) = warnings_of(name, "default")
        assert warning.msg == (
            f"The periodic work '{name}' on 'default' has not succeeded for three of its intervals (0:01:00). Last"
            f" success: 2024-05-06 07:08:09+00:00; outcome of the last run: failed."
        )
        assert warning.hint.endswith(" See docs/checks.md#w001.")
        assert warning.level == checks.WARNING
        assert warning.id == "django_advisory_lock.W001"
        assert warning.obj == PeriodicRun.objects.get(name=name)

    def test_never(self, name: str, other: OtherSession) -> None:
        write(name, other, last_started_at=ago(1000), last_outcome="'started'")
        (warning,) = warnings_of(name, "default")
        assert "Last success: never; outcome of the last run: started." in warning.msg

    def test_nothing_to_say(self, name: str, other: OtherSession) -> None:
        write(name, other, last_succeeded_at=ago(10))
        assert warnings_of(name, "default") == []

    def test_databases(self, name: str, other: OtherSession) -> None:
        write(name, other, last_succeeded_at=ago(1000))
        assert len(warnings_of(name, "default", "sqlite", "other")) == 1
        assert warnings_of(name, "other") == []
        assert check_periodic_runs() == []
        assert check_periodic_runs(databases=None) == []
        assert check_periodic_runs(databases=["sqlite"]) == []

    def test_before_a_migration(self, name: str, other: OtherSession) -> None:
        """`migrate` checks first: no table, and a table of before, are no reason to fail."""
        other.raw.execute("CREATE SCHEMA before CREATE TABLE django_advisory_lock_periodicrun (id int)")
        try:
            for schema in ("pg_catalog", "before"):
                with extra_alias("bare", {"options": f"-c search_path={schema}"}) as alias:
                    assert check_periodic_runs(databases=[alias]) == []
        finally:
            other.raw.execute("DROP SCHEMA before CASCADE")

    def test_where_nothing_can_be_seen(self, name: str, other: OtherSession) -> None:
        """Whoever asks for silence is not to hear silence."""
        role = name.replace("-", "_")
        with extra_alias("down", {"connect_timeout": 2}, NAME=f"{role}-no-such") as alias, pytest.raises(Error):
            check_periodic_runs(databases=[alias])
        other.raw.execute(f"CREATE ROLE {role}")
        try:
            with extra_alias("stranger", {"options": f"-c role={role}"}) as alias:
                with pytest.raises(Error, match="permission denied"):
                    check_periodic_runs(databases=[alias])
        finally:
            other.raw.execute(f"DROP ROLE {role}")

    def test_with_migrate(self, name: str, other: OtherSession) -> None:
        write(name, other, last_succeeded_at=ago(1000))
        errors = io.StringIO()
        call_command("migrate", "django_advisory_lock", verbosity=0, stderr=errors, skip_checks=False)
        assert name in errors.getvalue()

    def test_the_command(self, name: str, other: OtherSession) -> None:
        """In a process of its own: heard with the database alone, and a reason to fail where a level is given."""
        write(name, other, last_succeeded_at=ago(1000))
        out = output(spawn(CHECK))
        assert out.splitlines() == ["no False", "yes True", "failed True"]


def ids(messages: list[Any]) -> list[str]:
    """Return the numbers of messages, each of which has to be complete."""
    for message in messages:
        number = message.id.rpartition(".")[2]
        assert message.id == f"django_advisory_lock.{number}"
        assert message.level == (checks.ERROR if number.startswith("E") else checks.WARNING)
        assert message.hint.endswith(f" See docs/checks.md#{number.lower()}.")
    return [message.id.rpartition(".")[2] for message in messages]


def namespace_of_request() -> str:
    raise LookupError("there is no request")


class TestSettings:
    def test_registered_for_every_run(self) -> None:
        registered: dict[Any, Any] = {check: check.tags for check in checks.registry.registry.get_checks()}
        assert registered[check_settings] == ()
        with override_settings(ADVISORY_LOCK_SLOW_WAIT=-1):
            assert ids([message for message in checks.run_checks() if "ADVISORY_LOCK" in message.msg]) == ["E006"]

    def test_nothing_to_say(self) -> None:
        assert check_settings() == []

    @pytest.mark.parametrize(
        ("settings", "number", "text"),
        [
            ({"ADVISORY_LOCK_DATABASE": None}, "E001", "must be the alias"),
            ({"ADVISORY_LOCK_DATABASE": "nowhere"}, "E001", "'nowhere', which DATABASES does not have"),
            ({"ADVISORY_LOCK_DATABASE": "sqlite"}, "E002", "is SQLite"),
            ({"ADVISORY_LOCK_NAMESPACE": 3}, "E004", "must be or return text"),
            ({"ADVISORY_LOCK_NAMESPACE": "a\x1fb"}, "E004", "must not contain"),
            ({"ADVISORY_LOCK_NAMESPACE": "shop.no.such"}, "E004", "cannot be imported"),
            ({"ADVISORY_LOCK_SESSION_POOLER": "default"}, "E005", "must be a list"),
            ({"ADVISORY_LOCK_SESSION_POOLER": ["default", "nowhere"]}, "W003", "names 'nowhere'"),
            ({"ADVISORY_LOCK_SLOW_WAIT": "5"}, "E006", "must be seconds"),
            ({"ADVISORY_LOCK_DATABSE": "locks"}, "W005", "ADVISORY_LOCK_DATABSE is no setting"),
        ],
        ids=str,
    )
    def test_what_is_wrong(self, settings: dict[str, Any], number: str, text: str) -> None:
        with override_settings(**settings):
            found = check_settings()
        assert ids(found) == [number]
        assert text in found[0].msg

    @pytest.mark.parametrize(
        "settings",
        [
            {"ADVISORY_LOCK_DATABASE": "other"},
            {"ADVISORY_LOCK_NAMESPACE": "shop"},
            {"ADVISORY_LOCK_NAMESPACE": "tests.test_checks.namespace_of_request"},  # not called
            {"ADVISORY_LOCK_NAMESPACE": namespace_of_request},
            {"ADVISORY_LOCK_SESSION_POOLER": ["default", "other"]},
            {"ADVISORY_LOCK_SLOW_WAIT": None},
            {"ADVISORY_LOCK_ID": 42},  # somebody's own
        ],
        ids=lambda settings: str(next(iter(settings))),
    )
    def test_what_is_right(self, settings: dict[str, Any]) -> None:
        with override_settings(**settings):
            assert check_settings() == []

    def test_a_database_that_nobody_chose(self) -> None:
        """A project may name its alias in each `using`, and have SQLite as its default."""
        postgresql = connections.settings["default"]
        held, connections["default"] = connections["default"], connections["sqlite"]
        try:
            assert ids(check_settings()) == ["W002"]
            with override_settings(ADVISORY_LOCK_DATABASE="default"):
                assert ids(check_settings()) == ["E002"]
        finally:
            connections["default"] = held
        assert connections.settings["default"] is postgresql

    def test_another_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with extra_alias("old"), override_settings(ADVISORY_LOCK_DATABASE="old"):
            monkeypatch.setattr(connections["old"], "Database", io)
            assert ids(check_settings()) == ["E003"]

    def test_atomic_requests_elsewhere(self) -> None:
        with extra_alias("requests", ATOMIC_REQUESTS=True):
            (found,) = check_settings()
            assert ids([found]) == ["W004"]
            assert "'requests'" in found.msg
            with override_settings(ADVISORY_LOCK_DATABASE="requests"):
                assert check_settings() == []
            with extra_alias("locks", ATOMIC_REQUESTS=True), override_settings(ADVISORY_LOCK_DATABASE="locks"):
                assert check_settings() == []

    def test_several_at_once(self) -> None:
        with override_settings(ADVISORY_LOCK_DATABASE=1, ADVISORY_LOCK_SESSION_POOLER=2, ADVISORY_LOCK_SLOW_WAIT=-3):
            assert ids(check_settings()) == ["E001", "E005", "E006"]


class TestDatabase:
    """The part that the doctor sees at a glance; all that it finds is tried in test_doctor.py."""

    def test_registered_for_databases_that_are_named(self) -> None:
        registered: dict[Any, Any] = {check: check.tags for check in checks.registry.registry.get_checks()}
        assert registered[check_database] == (checks.Tags.database,)

    def test_only_where_locks_live(self, other: OtherSession) -> None:
        with extra_alias("slow", {"options": "-c idle_session_timeout=1h"}) as alias:
            assert check_database(databases=[alias]) == []
            with override_settings(ADVISORY_LOCK_DATABASE=alias):
                (found,) = check_database(databases=["default", alias])
                assert ids([found]) == ["W012"]
                assert found.msg.startswith("Advisory locks on 'slow': idle_session_timeout is 1h (set by the client).")
                for databases in (None, [], ["default"]):
                    assert check_database(databases=databases) == []

    def test_what_it_calls_each_finding(self) -> None:
        assert set(own_checks.FINDINGS) < set(doctor.FindingId.__args__)  # type: ignore[attr-defined]
        assert len(set(own_checks.FINDINGS.values())) == len(own_checks.FINDINGS)

    def test_it_warns_even_of_errors(self, other: OtherSession) -> None:
        with bouncer("transaction") as running, running.alias() as alias:
            both = {"ADVISORY_LOCK_DATABASE": alias, "ADVISORY_LOCK_SESSION_POOLER": [alias]}
            with override_settings(**both):
                (found,) = check_database(databases=[alias])
        assert ids([found]) == ["W008"]

    @pytest.mark.parametrize(
        "settings",
        [
            {"ADVISORY_LOCK_DATABASE": "sqlite"},
            {"ADVISORY_LOCK_DATABASE": "nowhere"},
            {"ADVISORY_LOCK_DATABASE": 3},
            {"ADVISORY_LOCK_SESSION_POOLER": 3},
        ],
        ids=lambda settings: str(next(iter(settings))),
    )
    def test_what_others_say(self, settings: dict[str, Any]) -> None:
        with override_settings(**settings):
            assert check_database(databases=["default", "sqlite", "nowhere"]) == []

    def test_a_database_that_is_down(self) -> None:
        with extra_alias("down", {"connect_timeout": 2}, NAME="no-such-database") as alias:
            with override_settings(ADVISORY_LOCK_DATABASE=alias):
                assert check_database(databases=[alias]) == []

    def test_with_migrate(self, other: OtherSession) -> None:
        with extra_alias("slow", {"options": "-c idle_session_timeout=1h"}) as alias:
            with override_settings(ADVISORY_LOCK_DATABASE=alias):
                errors = io.StringIO()
                call_command("migrate", "contenttypes", database=alias, verbosity=0, stderr=errors, skip_checks=False)
        assert "W012" in errors.getvalue()


class TestIds:
    def test_each_has_its_place_in_the_documentation(self) -> None:
        """And the other way round: what is written there stays for good."""
        source = Path(own_checks.__file__).read_text(encoding="utf-8")
        page = (Path(__file__).parent.parent / "docs/checks.md").read_text(encoding="utf-8")
        in_code = set(re.findall(r'"([EW]\d{3})"', source))
        in_docs = re.findall(r"^### ([EW]\d{3})$", page, flags=re.MULTILINE)
        assert sorted(in_code) == sorted(in_docs)


CHECK = """
import contextlib, io
from django.core.management import CommandError, call_command

def errors_of(*arguments):
    errors = io.StringIO()
    call_command("check", *arguments, stdout=io.StringIO(), stderr=errors)
    return errors.getvalue()

print("no", "W001" in errors_of())
print("yes", "W001" in errors_of("--database", "default"))
try:
    errors_of("--database", "default", "--fail-level", "WARNING")
except CommandError as error:
    print("failed", "W001" in str(error))
"""
