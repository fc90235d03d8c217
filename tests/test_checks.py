"""System checks: ids for good, and only where they are asked for."""

from __future__ import annotations

import io
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.db import Error

from django_advisory_lock.checks import check_periodic_runs
from django_advisory_lock.models import PeriodicRun
from tests.support import OtherSession, extra_alias, output, spawn
from tests.test_models import ago, write


def warnings_of(name: str, *databases: str) -> list[Any]:
    return [warning for warning in check_periodic_runs(databases=databases) if name in warning.msg]


class TestSilentWork:
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
        assert warning.hint
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
