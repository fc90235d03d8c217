"""A real PgBouncer in front of the server of the tests, or another one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from testproject import embedded_postgres
from tests.support import LIMIT, extra_alias, parameters, tool, wait_until

ADDRESS = "127.0.0.1"
CONSOLE = {"dbname": "pgbouncer", "user": "tests"}
ATTEMPTS = 5  # for a free port that stays free until it is used


class Bouncer:
    """One PgBouncer on a loopback port, and the ways to it. The server is the one of the tests if none is named."""

    def __init__(self, server: dict[str, Any] | None = None, **settings: object) -> None:
        self.program = tool("pgbouncer", "pgbouncer")
        self.server = parameters() if server is None else server
        self.settings = settings
        self.port = 0
        self.account = embedded_postgres._server_account()  # PgBouncer refuses root, as PostgreSQL does
        self.directory = self._make_directory()
        self.process: subprocess.Popen[bytes] | None = None
        self.guard: subprocess.Popen[bytes] | None = None

    # The ways to it

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """Connect a client of which Django and the library know nothing."""
        address: dict[str, Any] = {"host": ADDRESS, "hostaddr": ADDRESS, "port": self.port, "sslmode": "prefer"}
        return psycopg.connect(**{**self.server, **address, "autocommit": True, **options})

    @contextlib.contextmanager
    def alias(self, name: str = "bounced", options: dict[str, Any] | None = None, **changes: Any) -> Iterator[str]:
        """Give Django an alias that goes through it, for the length of a block."""
        address = {"hostaddr": ADDRESS, "sslmode": "prefer"}
        with extra_alias(name, {**address, **(options or {})}, HOST=ADDRESS, PORT=str(self.port), **changes) as alias:
            yield alias

    @property
    def environment(self) -> dict[str, str]:
        """What sends the default alias of a process that `spawn()` starts through it."""
        return {"PGHOST": ADDRESS, "PGHOSTADDR": ADDRESS, "PGPORT": str(self.port), "PGSSLMODE": "prefer"}

    def command(self, text: str) -> list[dict[str, Any]]:
        """Run a command of the admin console, as `SHOW POOLS` or `RECONNECT`."""
        with self.connect(**CONSOLE) as console:
            cursor = console.execute(text)
            names = [column.name for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor] if names else []

    @property
    def database(self) -> str:
        """The database of the server, as the console names it."""
        return str(self.server["dbname"])

    # Its life

    def start(self) -> None:
        """Start it, again on the port that it had before, and wait until it answers."""
        for _ in range(ATTEMPTS):
            port = self.port or _free_port()
            self._write_configuration(port)
            self._run()
            wait_until(lambda port=port: self._has_ended or self._answers(port), "PgBouncer answers")  # type: ignore[misc]
            if not self._has_ended:
                self.port = port
                return
            self.kill()
        raise AssertionError(f"PgBouncer does not start:\n{self.log}")

    def kill(self) -> None:
        """End it as a crash does."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End it and its server sessions, and remove what it wrote."""
        try:
            self._end(signal.SIGTERM)
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def _has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def _answers(self, port: int) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            with self.connect(**CONSOLE, port=port, connect_timeout=2) as console:
                return console.execute("SHOW VERSION").fetchone() is not None
        return False

    def _make_directory(self) -> Path:
        for parent in embedded_postgres._temporary_directories():
            if self.account.may_enter(parent):
                directory = Path(tempfile.mkdtemp(prefix="bouncer-", dir=parent))
                self.account.make_directory(directory)
                return directory
        raise AssertionError(f"no temporary directory that user {self.account.uid} can enter: set TMPDIR")

    def _write_configuration(self, port: int) -> None:
        settings: dict[str, object] = {
            "listen_addr": ADDRESS,
            "listen_port": port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "admin_users": CONSOLE["user"],
            "ignore_startup_parameters": "extra_float_digits, options",
            "server_tls_sslmode": "prefer",
            "server_login_retry": 1,
            "query_wait_timeout": int(LIMIT),
            **self.settings,
        }
        lines = [
            "[databases]",
            f"* = {self._address()}",
            "[pgbouncer]",
            *(f"{key} = {settings[key]}" for key in settings),
        ]
        path = self.directory / "pgbouncer.ini"
        path.touch(mode=0o600)
        path.write_text("\n".join(lines) + "\n")
        if os.geteuid() == 0:
            os.chown(path, self.account.uid, self.account.gid)

    def _address(self) -> str:
        """Say where the server is, as a connection that reached it knows."""
        with psycopg.connect(**self.server) as raw:
            info = raw.info
            named = {"host": info.hostaddr or info.host, "port": info.port}
            named |= {"user": info.user, "password": info.password}
        return " ".join(f"{key}={_quoted(str(value))}" for key, value in named.items() if value)

    def _run(self) -> None:
        switch: dict[str, Any] = {}
        if os.geteuid() == 0:
            switch = {"user": self.account.uid, "group": self.account.gid, "extra_groups": []}
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, str(self.directory / "pgbouncer.ini")],
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests
                **switch,
            )
        # It ends with the tests also where they are killed: then this shell reads the end of its input.
        self.guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -KILL "$1"; rm -rf "$2"', "sh", str(self.process.pid), self.directory],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _end(self, number: signal.Signals) -> None:
        process, guard, self.process, self.guard = self.process, self.guard, None, None
        if guard is not None:
            guard.kill()  # first: later the process id may be another's
            guard.communicate()
        if process is not None:
            process.send_signal(number)
            try:
                process.wait(LIMIT)
            finally:
                process.kill()
                process.wait()


@contextlib.contextmanager
def bouncer(pool_mode: str, server: dict[str, Any] | None = None, **settings: object) -> Iterator[Bouncer]:
    """Run a PgBouncer for the length of a block; the settings are its own, as `default_pool_size`."""
    started = Bouncer(server, pool_mode=pool_mode, **settings)
    try:
        started.start()
        yield started
    finally:
        started.close()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind((ADDRESS, 0))
        return int(listening.getsockname()[1])


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
