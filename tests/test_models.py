"""The table of periodic work: its columns and migration, and what of it is silent."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections
from django.db.migrations.loader import MigrationLoader

from django_advisory_lock import periodic_lock
from django_advisory_lock.checks import check_periodic_runs
from django_advisory_lock.models import START, PeriodicRun
from tests.support import OtherSession, extra_alias

TABLE = PeriodicRun._meta.db_table
migration = importlib.import_module("django_advisory_lock.migrations.0001_initial")


def write(name: str, other: OtherSession, **columns: str) -> None:
    """Write a row; the columns are SQL."""
    values = {
        "key": "gen_random_uuid()::text",
        "name": f"'{name}'",
        "last_outcome": "''",
        "last_error": "''",
        "last_host": "''",
        "min_interval": "interval '1 minute'",
        "run_count": "1",
        **columns,
    }
    other.raw.execute(f"INSERT INTO {TABLE} ({', '.join(values)}) VALUES ({', '.join(values.values())})")


def ago(seconds: float) -> str:
    return f"now() - interval '{seconds} seconds'"


@pytest.mark.parametrize(
    ("columns", "is_silent"),
    [
        ({"last_started_at": ago(10)}, False),  # just the first run
        ({"last_started_at": ago(170)}, False),
        ({"last_started_at": ago(181)}, True),  # the first one never came to its end
        ({"last_started_at": ago(10), "run_count": "3"}, False),
        ({"last_started_at": ago(10), "run_count": "4"}, True),  # one after the other fails
        ({}, False),  # allowed by hand before it ever ended
        ({"run_count": "4"}, True),
        ({"last_started_at": ago(170), "last_succeeded_at": ago(170)}, False),
        ({"last_started_at": ago(10), "last_succeeded_at": ago(170)}, False),
        ({"last_started_at": ago(10), "last_succeeded_at": ago(181)}, True),  # it comes, and fails
        ({"last_started_at": ago(181), "last_succeeded_at": ago(181)}, True),  # nobody comes
        ({"last_succeeded_at": ago(181)}, True),  # allowed by hand, and nobody comes
        ({"last_started_at": ago(181), "last_succeeded_at": ago(181), "min_interval": "interval '1 hour'"}, False),
        ({"last_started_at": ago(9000), "last_succeeded_at": ago(9000), "min_interval": "interval '1 hour'"}, False),
        ({"last_started_at": ago(9), "last_succeeded_at": ago(9), "min_interval": "interval '2 seconds'"}, True),
        ({"last_succeeded_at": ago(3 * 86400 - 60), "min_interval": "interval '1 day'"}, False),
        ({"last_succeeded_at": ago(3 * 86400 + 60), "min_interval": "interval '1 day'"}, True),
        ({"last_started_at": ago(-170), "last_succeeded_at": ago(-170)}, False),  # the clock was set back a little
        ({"last_started_at": ago(-1000), "last_succeeded_at": ago(-1000)}, True),  # and much: nothing starts until then
        ({"last_started_at": ago(-1000)}, True),
    ],
)
def test_silent(columns: dict[str, str], is_silent: bool, name: str, other: OtherSession) -> None:
    write(name, other, **columns)
    assert PeriodicRun.objects.silent().filter(name=name).exists() is is_silent


def test_silence_of_another_database(name: str, other: OtherSession) -> None:
    write(name, other, last_succeeded_at=ago(1000))
    assert not PeriodicRun.objects.using("other").silent().filter(name=name).exists()


def test_age_by_the_clock_of_the_database(name: str, other: OtherSession) -> None:
    write(name, other, last_started_at=ago(100))
    run: Any = PeriodicRun.objects.with_age().get(name=name)
    assert isinstance(run.age, float)
    assert run.age >= 100
    write(f"{name}-never", other)
    assert PeriodicRun.objects.with_age().filter(name=f"{name}-never").values_list("age").get() == (None,)


def test_ordered_by_name(name: str, other: OtherSession) -> None:
    for end in "bca":
        write(name + end, other)
    names = PeriodicRun.objects.filter(name__startswith=name).values_list("name", flat=True)
    assert list(names) == [name + end for end in "abc"]


class TestMigrations:
    def test_none_is_missing(self, other: OtherSession) -> None:
        call_command("makemigrations", "django_advisory_lock", check_changes=True, dry_run=True, verbosity=0)

    def test_the_statement_names_the_columns_of_the_table(self) -> None:
        """START is written by hand: all of the model's columns but those that only an end fills, or the database."""
        columns = {field.column for field in PeriodicRun._meta.fields}
        named = re.search(r"INSERT INTO (\w+) AS run\s+\(([\w, \n]+)\)", START)
        assert named is not None
        assert named[1] == TABLE
        assert set(re.split(r",\s*", named[2])) == columns - {"id", "last_finished_at", "last_succeeded_at"}
        updated = set(re.findall(r"(\w+) = ", START.partition("SET")[2].partition("WHERE")[0]))
        assert updated == columns - {"id", "key", "last_finished_at", "last_succeeded_at"}
        state = MigrationLoader(None).project_state(("django_advisory_lock", "0001_initial"))
        migrated = state.apps.get_model("django_advisory_lock", "PeriodicRun")
        assert {field.column for field in migrated._meta.fields} == columns

    @pytest.fixture
    def scratch(self, name: str, other: OtherSession) -> Iterator[str]:
        schema = name.replace("-", "_")
        other.raw.execute(f"CREATE SCHEMA {schema}")
        try:
            with extra_alias("scratch", {"options": f"-c search_path={schema}"}) as alias:
                yield alias
        finally:
            other.raw.execute(f"DROP SCHEMA {schema} CASCADE")

    def test_there_and_back(self, scratch: str, name: str) -> None:
        def tables() -> set[str]:
            with connections[scratch].cursor() as cursor:
                return set(connections[scratch].introspection.table_names(cursor))

        assert check_periodic_runs(databases=[scratch]) == []  # before the first migration
        call_command("migrate", database=scratch, verbosity=0)
        assert TABLE in tables()
        work = periodic_lock(name, min_interval=60, using=scratch)(lambda: "ran")
        assert [work(), work()] == ["ran", None]
        call_command("migrate", "django_advisory_lock", "zero", database=scratch, verbosity=0)
        assert TABLE not in tables()
        assert check_periodic_runs(databases=[scratch]) == []
        call_command("migrate", "django_advisory_lock", database=scratch, verbosity=0)
        assert work() == "ran"
