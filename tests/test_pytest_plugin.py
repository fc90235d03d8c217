"""The fixtures for pytest: in small projects of their own, and in this process, where they are measured."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from django.db import connections

from django_advisory_lock import lock_key
from tests.support import OtherSession, environment, run_nested

pytest_plugins = ["pytester"]

PROJECT = Path(__file__).resolve().parent.parent
# A project with a database of its own beside those of these tests, and one that none of its tests may use.
SETTINGS = """
import os
from testproject.embedded_postgres import database_settings

SECRET_KEY = "plugin"
INSTALLED_APPS = []
USE_TZ = True
DATABASES = {
    name: {**database_settings(), "TEST": {"NAME": f"{os.environ['PLUGIN_DATABASE']}_{name}"}}
    for name in ("default", "other", "unused")
}
DATABASES["same"] = {**database_settings(), "TEST": {"MIRROR": "default"}}
DATABASES["sqlite"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, other: OtherSession) -> pytest.Pytester:
    """A Django project with pytest-django, which runs in a process of its own; this one looks after every test."""
    changes = {"PYTHONPATH": f"{pytester.path}:{PROJECT}", "DJANGO_SETTINGS_MODULE": "plugin_settings"}
    for name, value in environment(PLUGIN_DATABASE=f"test_plugin_{uuid.uuid4().hex}", **changes).items():
        monkeypatch.setenv(name, value)
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(plugin_settings=SETTINGS)
    pytester.makeconftest("""
        import pytest

        @pytest.fixture(autouse=True)
        def _no_leaks(no_advisory_lock_leaks):
            pass
    """)
    return pytester


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    left_out = [word for name in ("cacheprovider", "hypothesispytest", "timeout") for word in ("-p", f"no:{name}")]
    return pytester.runpytest_subprocess("-vv", *left_out, *arguments, timeout=100)


def said(result: pytest.RunResult) -> str:
    """Return what was printed, and require that the databases could be dropped at the end: Case 98."""
    text = result.stdout.str()
    assert "trying to teardown test databases" not in text
    return text


def errors(text: str) -> dict[str, str]:
    """Return what was said of each test that failed at its end."""
    parts = text.partition("= ERRORS =")[2].partition("= short test summary")[0].split("ERROR at teardown of ")[1:]
    return {part.split(" ")[0]: part for part in parts}


def test_it_is_there_once_the_package_is_installed() -> None:
    (entry,) = entry_points(group="pytest11", name="django_advisory_lock")
    assert entry.value == "django_advisory_lock.pytest_plugin"


@pytest.mark.parametrize("arguments", [(), ("-p", "no:django")], ids=["", "no:django"])
def test_a_project_without_django(
    arguments: tuple[str, ...], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is to be seen of it, also where warnings are errors."""
    for name in ("DJANGO_SETTINGS_MODULE", "PYTEST_XDIST_WORKER", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile("""
        def test(request):
            assert request.config.pluginmanager.hasplugin("django_advisory_lock")
            assert callable(request.getfixturevalue("hold_lock"))
    """)
    run(pytester, "-W", "error", *arguments).assert_outcomes(passed=1)


HELD = """
    import asyncio
    import pytest
    from asgiref.sync import sync_to_async
    from django.db import connections
    from django_advisory_lock import LockTimeout, advisory_lock, lock_key, try_advisory_lock
    from django_advisory_lock.testing import assert_lock_free, assert_lock_held, assert_no_locks

    @pytest.mark.parametrize("how", ["db", "transactional_db"])
    def test_it_is_held(how, hold_lock, request):
        request.getfixturevalue(how)
        held = hold_lock("nightly-report")
        assert not try_advisory_lock("nightly-report").acquire()
        with pytest.raises(LockTimeout, match=f"held by pid {held.pid}"):
            advisory_lock("nightly-report", timeout=0).acquire()
        hold_lock("nightly-report", "shared", shared=True)
        assert_lock_held("nightly-report", "shared", shared=True)
        held.release()
        assert_lock_free("nightly-report")

    @pytest.mark.django_db
    def test_it_is_free_again(hold_lock):
        assert_no_locks()

    @pytest.mark.django_db
    def test_a_task(hold_lock):
        async def main():
            hold_lock("nightly-report")
            with pytest.raises(LockTimeout):
                await advisory_lock("nightly-report", timeout=0).aacquire()
            await sync_to_async(connections.close_all)()
        asyncio.run(main())

    @pytest.mark.django_db(databases=["default", "other"])
    def test_another_database(hold_lock):
        hold_lock("nightly-report", using="other")
        hold_lock("nightly-report")

    def test_without_the_database(hold_lock):
        with pytest.raises(RuntimeError, match="Database access not allowed"):
            hold_lock("nightly-report")

    @pytest.mark.django_db
    def test_a_database_it_may_not_use(hold_lock):
        with pytest.raises(AssertionError, match="not allowed in this test"):
            hold_lock("nightly-report", using="other")
"""


def test_hold_lock(project: pytest.Pytester) -> None:
    project.makepyfile(HELD)
    result = run(project, "-W", "error")
    result.assert_outcomes(passed=7)
    said(result)


LEAKS = """
    import pytest
    from django.db import connection, connections, transaction
    from django.test import SimpleTestCase, TestCase
    from django_advisory_lock import advisory_lock

    kept = []

    def leave(*key, **options):
        kept.append(advisory_lock(*key, **options).acquire())

    @pytest.fixture(scope="session", autouse=True)
    def _end_dedicated_sessions(django_db_setup):
        yield
        for lock in kept:
            if lock._own_connection:
                lock._own_connection.close()

    @pytest.fixture
    def released_by_a_fixture():
        lock = advisory_lock("of-a-fixture").acquire()
        yield
        lock.release()

    class Cases:
        def test_clean(self):
            with advisory_lock("clean"), transaction.atomic(), advisory_lock("in-a-transaction"):
                pass

        def test_a_fixture_that_releases(self, released_by_a_fixture):
            pass

        def test_held_by_the_helper(self, hold_lock):
            hold_lock("by-the-helper")

        def test_kept(self):
            leave("kept", self.end)

        def test_kept_and_another_one_is_not_blamed(self):
            pass

        def test_dropped(self):
            advisory_lock("dropped", self.end).acquire()

        def test_closed(self):
            leave("closed", self.end)
            raw, connection.connection = connection.connection, None
            raw.close()

        def test_dedicated(self):
            leave("dedicated", self.end, dedicated=True)

    @pytest.mark.django_db
    class TestRolledBack(Cases):
        end = "rolled-back"

    @pytest.mark.django_db(transaction=True)
    class TestCommitted(Cases):
        end = "committed"

        def test_bare(self):
            connection.cursor().execute("SELECT pg_advisory_lock(7, 7)")

    @pytest.mark.django_db(transaction=True, databases=["other"])
    def test_another_database():
        leave("another-database", using="other")

    def test_ahead_of_the_database(no_advisory_lock_leaks, transactional_db):
        leave("ahead")

    def test_without_the_database():
        pass

    class TestOfDjango(TestCase):
        def test_kept_by_a_method(self):
            with transaction.atomic(), advisory_lock("in-a-transaction"):
                pass
            leave("of-django")

    class TestWithoutTheDatabase(SimpleTestCase):
        def test(self):
            pass
"""


def test_leaks(project: pytest.Pytester) -> None:
    """Each is named, and in the test that it is of."""
    project.makepyfile(LEAKS)
    text = said(run(project, "-W", "error", "-W", "ignore::ResourceWarning"))
    told = errors(text)
    assert list(told) == [
        *(f"TestRolledBack.test_{case}" for case in ("kept", "dropped", "closed", "dedicated")),
        "TestOfDjango.test_kept_by_a_method",
        *(f"TestCommitted.test_{case}" for case in ("kept", "dropped", "closed", "dedicated", "bare")),
        "test_another_database",
        "test_ahead_of_the_database",
    ]
    assert f"{len(told) + 10} passed, {len(told)} errors" in text.splitlines()[-1]
    for kind, end in (("TestRolledBack", "rolled-back"), ("TestCommitted", "committed")):
        for case in ("kept", "closed", "dedicated"):
            assert (
                f"<LockHandle '{case}:{end}' on 'default': acquired> was never released" in told[f"{kind}.test_{case}"]
            )
        for case in ("kept", "dropped", "dedicated"):
            key = f"{case}:{end}"
            held = f"'{key}' ({lock_key(case, end).args[0]}) on 'default' is held by pid "
            assert held in told[f"{kind}.test_{case}"]
            assert ", a session lock of this process" in told[f"{kind}.test_{case}"]
    assert "'(7, 7)' (7, 7) on 'default' is held by pid " in told["TestCommitted.test_bare"]
    assert "on 'other' is held by pid " in told["test_another_database"]


WORKERS = """
    import time
    from pathlib import Path
    import pytest
    from django.db import connection

    @pytest.mark.django_db
    def test_workers(hold_lock, worker_id):
        held, here = hold_lock("hard-coded"), Path(__file__).parent
        with connection.cursor() as cursor:
            cursor.execute("SELECT datname FROM pg_stat_activity WHERE pid = %s", [held.pid])
            (here / worker_id).write_text(cursor.fetchone()[0])
        end = time.monotonic() + 60
        while len(list(here.glob("gw*"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
"""


@pytest.mark.slow
def test_workers_of_xdist(project: pytest.Pytester) -> None:
    """Case 99: each has databases of its own, so two hold the same key at the same time."""
    project.makepyfile(WORKERS)
    run(project, "-W", "error", "--dist", "each", "--tx", "2*popen").assert_outcomes(passed=2)
    assert len({path.read_text() for path in project.path.glob("gw*")}) == 2


# In this process, without pytest-django, on the databases of these tests.


@pytest.fixture
def nested(pytester: pytest.Pytester, other: OtherSession) -> Iterator[pytest.Pytester]:
    """Run tests inside this one: what they leave behind ends here."""
    yield pytester
    connections.close_all()
    gc.collect()


def test_in_this_process(nested: pytest.Pytester, name: str, other: OtherSession) -> None:
    other.take(lock_key(name, "before"))
    nested.makepyfile(f"""
        import pytest
        from django.db import connection
        from django_advisory_lock import advisory_lock, try_advisory_lock

        def test_held(hold_lock, no_advisory_lock_leaks):
            held = hold_lock({name!r})
            assert not try_advisory_lock({name!r}).acquire()
            held.release()
            hold_lock({name!r}, "other", using="other", shared=True)

        def test_released(no_advisory_lock_leaks):
            with advisory_lock({name!r}), advisory_lock({name!r}, using="other"):
                pass

        def test_left(no_advisory_lock_leaks):
            global left
            left = advisory_lock({name!r}, using="other").acquire()

        def test_left_by_another_alias_of_one_database(no_advisory_lock_leaks):
            global other
            other = advisory_lock({name!r}, using="same").acquire()
            left.release()

        def test_forgotten(no_advisory_lock_leaks):
            global other
            connection.cursor().execute("SELECT pg_advisory_lock(7, 7)")
            other.release()

        @pytest.fixture
        def db():
            yield
            third.release()

        def test_ends_before_the_database(no_advisory_lock_leaks, db):
            global third
            third = advisory_lock({name!r}).acquire()
    """)
    result = run_nested(nested)
    result.assert_outcomes(passed=6, errors=4)
    told = errors(said(result))
    handle = f"<LockHandle {name!r} on '%s': acquired> was never released"
    row = f"{name!r} ({lock_key(name).args[0]}) on '%s' is held by pid "
    assert list(told) == [
        "test_left",
        "test_left_by_another_alias_of_one_database",
        "test_forgotten",
        "test_ends_before_the_database",
    ]
    assert all(text % "other" in told["test_left"] for text in (handle, row))
    # Its handle tells the alias, and the row the database, by the alias that comes first.
    assert handle % "same" in told["test_left_by_another_alias_of_one_database"]
    assert row % "default" in told["test_left_by_another_alias_of_one_database"]
    assert "'(7, 7)' (7, 7) on 'default' is held by pid " in told["test_forgotten"]
    assert other.drop(lock_key(name, "before"))


def test_a_database_that_is_gone_when_the_test_ends(nested: pytest.Pytester, other: OtherSession) -> None:
    """What cannot be reached any more holds no lock of this test."""
    database = f"test_gone_{uuid.uuid4().hex}"
    other.raw.execute(f"CREATE DATABASE {database}")
    nested.makepyfile(f"""
        import pytest
        from django.db import connection
        from tests.support import extra_alias

        @pytest.fixture
        def gone():
            with extra_alias("gone", NAME={database!r}):
                yield

        def test_dropped(gone, no_advisory_lock_leaks):
            connection.cursor().execute("DROP DATABASE {database}")
    """)
    run_nested(nested).assert_outcomes(passed=1)
