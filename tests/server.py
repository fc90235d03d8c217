"""A PostgreSQL server of a test's own, which may be stopped, killed and frozen without hurting any other test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import pytest

from testproject import embedded_postgres
from testproject.embedded_postgres import EmbeddedPostgresError, _Account, _Server
from tests.support import OtherSession, extra_alias, wait_until

TIMEOUTS = ("statement_timeout", "lock_timeout", "idle_session_timeout", "idle_in_transaction_session_timeout")
FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT


class Server:
    """A server in a temporary directory, listening on a unix socket there. Settings are those of postgresql.conf."""

    def __init__(self, account: _Account, home: Path, bindir: Path, **settings: str) -> None:
        self.settings = settings
        self._bindir = bindir
        self._account = account
        self._server = _Server(home / "server", account)
        embedded_postgres._make_own_directory(self._server.directory, account)

    @property
    def parameters(self) -> dict[str, str]:
        return self._server.parameters

    @property
    def socket(self) -> str:
        """The path of the socket it listens on."""
        return f"{self.parameters['host']}/.s.PGSQL.{self.parameters['port']}"

    @property
    def postmaster(self) -> int:
        return int((self._server.directory / "pid").read_text())

    def start(self) -> None:
        """Start it, or attach to it where it runs."""
        with patch.dict(embedded_postgres.SERVER_SETTINGS, self.settings):
            self._server.ensure_running(self._bindir)

    def stop(self, mode: signal.Signals = FAST) -> None:
        """End it by its own means: FAST rolls all transactions back, IMMEDIATE crashes."""
        os.kill(self.postmaster, mode)
        self._wait_for_the_end()

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        """End all of its processes at once, as the kernel does where memory is short."""
        pids = [self.postmaster, *self.children()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._wait_for_the_end()

    def kill_backend(self, pid: int) -> None:
        """Kill one session's process: the server ends all sessions and recovers from its log."""
        with self.connect() as witness:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: _is_gone(witness), "crash of all sessions")
        self.wait_until_it_answers()

    def wait_until_it_answers(self) -> None:
        wait_until(self._server.answers, "an answer")

    def children(self) -> list[int]:
        with self.connect() as raw:
            return [pid for (pid,) in raw.execute("SELECT pid FROM pg_stat_activity")]

    @contextlib.contextmanager
    def frozen(self, pids: list[int]) -> Iterator[None]:
        """Stop some of its processes for the length of a block, as a machine that swaps does."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def connect(self, **parameters: Any) -> psycopg.Connection:
        return psycopg.connect(**{**self.parameters, **parameters}, autocommit=True)

    @contextlib.contextmanager
    def alias(self, name: str, options: dict[str, Any] | None = None, **changes: Any) -> Iterator[str]:
        """Give Django an alias of this server for the length of a block, in every thread."""
        server = {"HOST": "host", "PORT": "port", "USER": "user", "NAME": "dbname"}
        settings = {key: self.parameters[parameter] for key, parameter in server.items()}
        # Whatever the server of the other tests is told about encryption is not for this one.
        plain = {"sslmode": "disable", "gssencmode": "disable"}
        with extra_alias(name, {**plain, **(options or {})}, **{**settings, "PASSWORD": "", **changes}):
            yield name

    def copy(self, home: Path, **settings: str) -> Server:
        """Return one on a copy of the data of this one, which is stopped."""
        assert not self._server.lives()
        embedded_postgres._make_own_directory(home, self._account)
        other = Server(self._account, home, self._bindir, **{**self.settings, **settings})
        data = other._server.data
        shutil.copytree(self._server.data, data)
        for path in (data, *data.rglob("*")):
            os.chown(path, self._account.uid, self._account.gid, follow_symlinks=False)
        return other

    def mark_as_standby(self) -> None:
        (self._server.data / "standby.signal").touch()

    def wipe(self) -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(self.postmaster, signal.SIGCONT)
        self._server.stop()
        shutil.rmtree(self._server.directory)

    def _wait_for_the_end(self) -> None:
        wait_until(lambda: not self._server.lives(), "end of the server")


def _is_gone(raw: psycopg.Connection) -> bool:
    try:
        raw.execute("SELECT")
    except psycopg.OperationalError:
        return True
    return False


@contextlib.contextmanager
def new_home() -> Iterator[tuple[_Account, Path, Path]]:
    """Make a directory for servers; yield their account, the directory, and binaries that the account can run."""
    try:
        account = embedded_postgres._server_account()
        bindir = embedded_postgres._find_binaries()
    except EmbeddedPostgresError as error:
        if os.environ.get("TESTS_REQUIRE_TOOLS"):
            raise
        pytest.skip(f"NOT TESTED: {error}")
    parent = next(path for path in embedded_postgres._temporary_directories() if account.may_enter(path))
    home = Path(tempfile.mkdtemp(prefix="lock-tests-", dir=parent))
    try:
        embedded_postgres._make_own_directory(home, account)
        bindir, _ = embedded_postgres._runnable(bindir, home, account)
        yield account, home, bindir
    finally:
        shutil.rmtree(home)


@contextlib.contextmanager
def new_server(**settings: str) -> Iterator[Server]:
    """Make a server for the length of a block, started."""
    with new_home() as (account, home, bindir):
        server = Server(account, home, bindir, **settings)
        try:
            server.start()
            yield server
        finally:
            server.wipe()


class Watcher(OtherSession):
    """A session that Django and the library know nothing about, straight on a server of a test's own."""

    def __init__(self, server: Server) -> None:
        # Whatever limits a test gives to the role.
        options = " ".join(f"-c {setting}=0" for setting in TIMEOUTS)
        self.raw = server.connect(application_name="watcher", options=options)

    def advisory_locks(self) -> list[Any]:
        """Return all that is held or waited for in this server."""
        return self.raw.execute("SELECT pid, mode, granted FROM pg_locks WHERE locktype = 'advisory'").fetchall()
