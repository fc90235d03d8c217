"""What the tests of concurrency stand on: other sessions, threads and processes, all with time limits."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import psycopg
import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_advisory_lock import LockKey

T = TypeVar("T")
LIMIT = 40.0  # seconds, far beyond what anything here takes

_KEY = """locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
 AND (classid::bigint, objid::bigint, objsubid) = (%s, %s, %s)"""


def wait_until(condition: Callable[[], object], what: str | Callable[[], str] = "condition") -> None:
    """Ask again and again until a condition holds; fail where it does not in time, and say what was missed."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"not in time: {what() if callable(what) else what}"
        time.sleep(0.005)


def tool(program: str, package: str) -> str:
    """Return the path of a program; without it skip, or fail where every tool is required, as in `.ci/run`."""
    path = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if path is None:
        message = f"NOT TESTED: there is no {program} on this machine (Debian's package {package})."
        if os.environ.get("TESTS_REQUIRE_TOOLS"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def parameters(alias: str = "default") -> dict[str, Any]:
    """Return what psycopg needs to reach the database of an alias."""
    settings = connections[alias].settings_dict
    names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "NAME": "dbname"}
    return {name: settings[key] for key, name in names.items() if settings[key]}


@contextlib.contextmanager
def extra_alias(alias: str, options: dict[str, Any] | None = None, **changes: Any) -> Iterator[str]:
    """Give Django one more alias of the default database for the length of a block, in every thread."""
    default = connections["default"].settings_dict
    connections.settings[alias] = {**default, **changes, "OPTIONS": {**default["OPTIONS"], **(options or {})}}
    try:
        yield alias
    finally:
        connection = connections[alias]
        connection.close()
        if getattr(connection, "pool", None):
            connection.close_pool()  # type: ignore[attr-defined]
        del connections[alias], connections.settings[alias]


class OtherSession:
    """A session of its own, which Django and the library know nothing about."""

    def __init__(self, alias: str = "default") -> None:
        self.raw = psycopg.connect(**parameters(alias), autocommit=True, application_name="other-session")

    @property
    def pid(self) -> int:
        return self.raw.info.backend_pid

    def one(self, statement: str, params: Any = None) -> Any:
        row = self.raw.execute(statement, params).fetchone()
        return row[0] if row else None

    def _call(self, function: str, key: LockKey, shared: bool) -> Any:
        cast = "bigint" if len(key.args) == 1 else "int"
        arguments = ", ".join(f"CAST(%s AS {cast})" for _ in key.args)
        return self.one(f"SELECT {function}{'_shared' if shared else ''}({arguments})", key.args)

    def take(self, key: LockKey, shared: bool = False) -> bool:
        return bool(self._call("pg_try_advisory_lock", key, shared))

    def wait(self, key: LockKey, shared: bool = False) -> None:
        self._call("pg_advisory_lock", key, shared)

    def drop(self, key: LockKey, shared: bool = False) -> bool:
        return bool(self._call("pg_advisory_unlock", key, shared))

    def is_free(self, key: LockKey) -> bool:
        return self.take(key) and self.drop(key)

    def waiters(self, key: LockKey) -> int:
        return int(self.one(f"SELECT count(*) FROM pg_locks WHERE NOT granted AND {_KEY}", key.pg_locks))

    def holders(self, key: LockKey) -> int:
        return int(self.one(f"SELECT count(*) FROM pg_locks WHERE granted AND {_KEY}", key.pg_locks))

    def holder(self, key: LockKey) -> int:
        return int(self.one(f"SELECT pid FROM pg_locks WHERE granted AND {_KEY}", key.pg_locks))

    def wait_for_waiters(self, key: LockKey, count: int = 1) -> None:
        wait_until(lambda: self.waiters(key) == count, f"{count} waiting")

    def wait_until_free(self, key: LockKey) -> None:
        wait_until(lambda: self.holders(key) == 0, "free")

    def kill(self, pid: int) -> None:
        self.one("SELECT pg_terminate_backend(%s, 5000)", [pid])

    def cancel(self, pid: int) -> None:
        self.one("SELECT pg_cancel_backend(%s)", [pid])

    def close(self) -> None:
        """End the session, and come back once the server has ended it too, and freed what it held."""
        if self.raw.closed:
            return
        with socket.fromfd(self.raw.fileno(), socket.AF_INET, socket.SOCK_STREAM) as link:
            self.raw.close()
            link.settimeout(LIMIT)
            with contextlib.suppress(ConnectionError):
                while link.recv(4096):
                    pass


class Thread(threading.Thread, Generic[T]):
    """A thread that hands back its result or its error, and closes its connections."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.value: T | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:
            self.error = error
        finally:
            connections.close_all()

    def result(self) -> T:
        self.join(LIMIT)
        assert not self.is_alive(), "the thread still runs"
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def backend_pid(alias: str = "default") -> int:
    """Return the pid of the server session of an alias in this thread."""
    return int(value("SELECT pg_backend_pid()", alias=alias))


def value(statement: str, params: Any = None, alias: str = "default") -> Any:
    """Return the one value of a statement over Django's connection."""
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, params)
        row = cursor.fetchone()
        return row[0] if row else None


@contextlib.contextmanager
def statements(count: int, alias: str = "default") -> Iterator[None]:
    """Require a number of statements in a block."""
    connections[alias].ensure_connection()
    with CaptureQueriesContext(connections[alias]) as captured:
        yield
    sent = [query["sql"] for query in captured.captured_queries]
    assert len(sent) == count, sent


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a process with Django on the database of the tests."""
    named = {"dbname": "PGDATABASE", "host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD"}
    server = {named[name]: str(value) for name, value in parameters().items()}
    inherited = {name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "PGSERVICE"}}
    return {**inherited, **server, "DJANGO_SETTINGS_MODULE": "tests.settings", **changes}


def spawn(code: str, *arguments: str, **changes: str) -> subprocess.Popen[str]:
    """Run Python code in a process of its own, with Django set up on the database of the tests."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import django; django.setup()\n{code}", *arguments],
        env=environment(**changes),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fork() -> int:
    """Fork. The child dies for certain: at the latest by the alarm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork with threads
        pid = os.fork()
    if pid == 0:  # pragma: no cover - a child is not measured
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LIMIT))
    return pid


def in_child(function: Callable[[], object]) -> str:
    """Return the repr of a function's result in a forked child, which ends without any clean-up."""
    read, write = os.pipe()
    pid = fork()
    if pid == 0:  # pragma: no cover - measured in the parent only
        try:
            answer = repr(function())
        except BaseException as error:
            answer = f"raised {error!r}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()  # to the end of the child
    os.waitpid(pid, 0)
    return answer


def output(process: subprocess.Popen[str]) -> str:
    """Wait for a process, which has to succeed, and return what it printed."""
    try:
        out, errors = process.communicate(timeout=3 * LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return out


def run_nested(pytester: pytest.Pytester) -> pytest.RunResult:
    """Run the tests of a directory in this process, on the databases that it has, without pytest-django."""
    plugins = ("django", "xdist", "cacheprovider", "timeout", "hypothesispytest")
    return pytester.runpytest_inprocess(*(word for name in plugins for word in ("-p", f"no:{name}")))
