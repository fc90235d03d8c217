"""What a run needs: a server that may crash, the ways to it, and processes at work."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from django.core.management import call_command

from tests.bouncer import ADDRESS, Bouncer, bouncer
from tests.proxy import Proxy
from tests.server import Server, new_server
from tests.soak import plan as plans
from tests.soak.plan import Plan
from tests.soak.witness import CREATE
from tests.support import environment, parameters, wait_until

SETTINGS = {
    "max_connections": "120",
    "max_locks_per_transaction": "10",  # so few that a session can fill the table in a moment
    "max_worker_processes": "1",
    "max_wal_senders": "0",
    "wal_level": "minimal",
    "autovacuum": "off",
    "synchronous_commit": "on",  # or the last starts of periodic work would be forgotten in a crash
    "log_min_messages": "fatal",
}
NAME = "soak"  # of the application, in every session of a worker


class Site:
    """The places of a run. Workers are started, killed and waited for here."""

    def __init__(self, plan: Plan, server: Server, proxy: Proxy, bouncers: dict[str, Bouncer]) -> None:
        self.plan = plan
        self.server = server
        self.proxy = proxy
        self.bouncers = bouncers
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.started = 0

    @property
    def directory(self) -> Path:
        return Path(self.plan.directory)

    # Workers

    def start_worker(self) -> None:
        self.started += 1
        name = f"worker-{self.started}"
        variables = {"DJANGO_SETTINGS_MODULE": "tests.soak.settings", plans.VARIABLE: str(self.plan.path)}
        with (self.directory / f"{name}.log").open("wb") as log:
            self.workers[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.worker", name],
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill_worker(self, name: str) -> None:
        """Kill one, and let the witness forget that it is in."""
        process = self.workers.pop(name)
        process.kill()
        process.wait()
        with psycopg.connect(**self.plan.witness, autocommit=True) as raw:
            raw.execute(f"DELETE FROM {self.plan.table} WHERE worker = %s", [name])

    def wait_for_workers(self) -> dict[str, int]:
        """Return the exit codes of those that are left. Who does not end by itself is made to say where it is."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: all(process.poll() is not None for process in self.workers.values()))
        for process in self.workers.values():
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)  # it prints where its threads are
                process.wait()
        return {name: process.returncode for name, process in self.workers.items()}

    def begin(self, seconds: float) -> float:
        """Set all to work at the same time, for so long, and return when that is over."""
        wait_until(lambda: all(b"begin" in path.read_bytes() for path in self._journals()), "all are ready")
        end = time.monotonic() + seconds
        self.plan.set_end(end)
        return end

    def _journals(self) -> list[Path]:
        journals = [self.directory / f"{name}.jsonl" for name in self.workers]
        return journals if all(path.exists() for path in journals) else [Path(os.devnull)]

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    # The server

    def ask(self, statement: str, *params: object) -> list[Any]:
        with self.server.connect(application_name="faults") as raw:
            return raw.execute(statement, params).fetchall()

    def locks(self) -> list[Any]:
        return self.ask(
            "SELECT pid, mode, granted, application_name, state, query FROM pg_locks JOIN pg_stat_activity USING (pid)"
            " WHERE locktype = 'advisory'"
        )

    def sessions(self) -> list[Any]:
        return self.ask("SELECT pid, state, query FROM pg_stat_activity WHERE application_name = %s", NAME)


def _databases(server: Server, proxy: Proxy, bouncers: dict[str, Bouncer]) -> dict[str, Any]:
    options = {"application_name": NAME, "sslmode": "disable", "gssencmode": "disable", "connect_timeout": 10}
    address = {"HOST": "host", "PORT": "port", "USER": "user", "NAME": "dbname"}
    direct = {"ENGINE": "django.db.backends.postgresql", "OPTIONS": options}
    direct |= {key: str(server.parameters[name]) for key, name in address.items()}
    kept = {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}
    short = {**options, "options": f"-c idle_session_timeout={1000 * plans.IDLE_TIMEOUT:g}"}
    pool = {**options, "pool": {"min_size": 1, "max_size": 5, "timeout": 5}}
    bounced = {
        name: {**direct, **kept, "HOST": ADDRESS, "PORT": str(running.port)} for name, running in bouncers.items()
    }
    return {
        plans.DIRECT: direct,
        plans.KEPT: {**direct, **kept},
        plans.PROXIED: {**direct, **kept, **proxy.settings},
        plans.POOLED: {**direct, "OPTIONS": pool, "CONN_HEALTH_CHECKS": True},
        plans.SHORT: {**direct, **kept, "OPTIONS": short},
        **bounced,
    }


@contextlib.contextmanager
def new_site(seed: int, workers: int, control: str = "") -> Iterator[Site]:
    """Build all of it for the length of a block, with workers that stand ready."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(new_server(**SETTINGS))
        proxy = stack.enter_context(Proxy(server.socket))
        sizes = {plans.BY_SESSION: ("session", 60), plans.BY_TRANSACTION: ("transaction", 6)}
        bouncers = {
            name: stack.enter_context(bouncer(mode, server.parameters, default_pool_size=size, max_client_conn=200))
            for name, (mode, size) in sizes.items()
        }
        stack.enter_context(server.alias("soak"))
        call_command("migrate", "django_advisory_lock", database="soak", verbosity=0)
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-"))
        table = stack.enter_context(_witness_table())
        databases = _databases(server, proxy, bouncers)
        plan = Plan(directory, databases, parameters(), table, seed, control=control)
        plan.write()
        site = Site(plan, server, proxy, bouncers)
        stack.callback(_end_workers, site)
        for _ in range(workers):
            site.start_worker()
        yield site


def _end_workers(site: Site) -> None:
    for process in site.workers.values():
        process.kill()
        process.wait()


@contextlib.contextmanager
def _witness_table() -> Iterator[str]:
    """Make a table on the server of the tests, which no fault hits."""
    table = f"soak_{os.getpid()}_{random.randrange(1 << 30)}"
    with psycopg.connect(**parameters(), autocommit=True) as raw:
        raw.execute(CREATE.format(table=table))
        try:
            yield table
        finally:
            raw.execute(f"DROP TABLE {table}")
