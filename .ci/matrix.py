"""Run the tests on every supported Python, Django and PostgreSQL that this machine has: `make matrix`.

Each entry gets a copy of the working tree with a virtual environment and a server of its own, below .ci/work. Several
run at a time, for tests mostly wait. What is missing on this machine is named, and fails the run where
TESTS_REQUIRE_TOOLS is set, except for interpreters.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".ci" / "work"
# Every entry brings its own server.
CHOSEN = re.compile("DATABASE_URL|DJANGO_SETTINGS_MODULE|EMBEDDED_POSTGRES_BINDIR|PG[A-Z]+|PYTHON[A-Z]+|VIRTUAL_ENV")
# What the versions make no difference to is left to `make test`, and what each of them matters to is tried once more on
# the oldest or the newest, or on the other server.
LEFT_OUT = ("docs", "embedded_postgres", "packaging", "site", "start")
OF_THE_SERVER = ("contention", "faults", "poolers", "semaphores", "several")
OF_THE_CLIENT = ("advisory_lock_command", "async", "dedicated", "environments", "interrupts", "pytest_plugin")
OF_BOTH = ("doctor", "ending", "inspection", "keys", "locks", "model", "releasing", "sql", "taking")
# Where the versions of Python, Django and psycopg matter least, and processes take long: once beside `make test`.
OF_OTHERS = ("celery", "huey", "schedulers")


@dataclass(frozen=True)
class Entry:
    """One combination of versions; PostgreSQL is the newest, of the package embedded-postgres, or the system's."""

    python: str
    requirements: tuple[str, ...]
    postgres: str = "18"
    also: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join((f"Python {self.python}", *self.requirements, f"PostgreSQL {self.postgres}"))

    @property
    def tests(self) -> tuple[str, ...]:
        if self.postgres == "of the system":
            return ("-m", "not slow", *(f"tests/test_{name}.py" for name in (*OF_THE_SERVER, *OF_BOTH)))
        left_out = {*LEFT_OUT, *OF_THE_SERVER, *OF_THE_CLIENT, *self.without} - {*self.also}
        return ("-m", "not slow", *(f"--ignore-glob=*/test_{name}.py" for name in sorted(left_out)))

    @property
    def directory(self) -> Path:
        return WORK / re.sub("[^A-Za-z0-9.]+", "-", self.name)


MATRIX = (
    # The oldest of everything that Django 5.2 allows.
    Entry(
        "3.10",
        ("Django==5.2", "psycopg[binary,pool]==3.1.12"),
        also=("environments", "interrupts"),
        without=OF_OTHERS,
    ),
    Entry("3.11", ("Django~=5.2.0",), "of the system"),
    Entry("3.12", ("Django~=6.0.0",), without=("doctor",)),
    Entry(
        "3.13",
        ("Django~=6.1.0",),
        also=("advisory_lock_command", "async", "dedicated", "pytest_plugin"),
        without=(*OF_OTHERS, "view_servers"),
    ),
)


class Missing(Exception):
    """What an entry needs is not on this machine."""

    def __init__(self, message: str, *, is_tool: bool = False) -> None:
        super().__init__(message)
        self.is_failure = is_tool and bool(os.environ.get("TESTS_REQUIRE_TOOLS"))


def find_python(version: str) -> str:
    """Return an interpreter that can make virtual environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    newest_first = sorted(pyenv.glob(f"{version}.*"), key=lambda path: int(path.name.split(".")[2]), reverse=True)
    for python in (*(path / "bin" / "python" for path in newest_first), shutil.which(f"python{version}")):
        if python and _can_make_environments(python):
            return str(python)
    raise Missing(f"there is no Python {version} on this machine")


def _can_make_environments(python: str | Path) -> bool:
    probe = subprocess.run([python, "-c", "import ensurepip, venv"], check=False, capture_output=True)
    return probe.returncode == 0


def find_system_postgres() -> Path:
    """Return the programs of the oldest PostgreSQL that Debian installed."""
    found = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "initdb").exists()]
    if not found:
        raise Missing("there is no PostgreSQL of the system (Debian's package postgresql)", is_tool=True)
    return min(found, key=lambda path: int(path.parent.name))


def tracked_files() -> Iterator[Path]:
    """Yield what a clone of the present state would hold."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return (Path(name) for name in names if name and (ROOT / name).exists())


def copy_to(directory: Path) -> None:
    """Copy the working tree."""
    for file in tracked_files():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, directory / file)


def run(entry: Entry) -> int:
    """Run the tests of one entry, into a log of its own, and return the exit status."""
    base = find_python(entry.python)
    environment = {name: value for name, value in os.environ.items() if not CHOSEN.fullmatch(name)}
    extra = ["embedded-postgres"]
    if entry.postgres == "of the system":
        environment["EMBEDDED_POSTGRES_BINDIR"], extra = str(find_system_postgres()), []
    copy_to(entry.directory)
    python = str(entry.directory / ".venv" / "bin" / "python")
    with (entry.directory / "log").open("wb") as log:

        def call(*command: str) -> int:
            return subprocess.run(
                command,
                check=False,
                cwd=entry.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            ).returncode

        install = (python, "-m", "pip", "install", "-qq", "--editable", ".[test]", *extra, *entry.requirements)
        try:
            return call(base, "-m", "venv", ".venv") or call(*install) or call(python, "-m", "pytest", *entry.tests)
        finally:
            call(python, "-m", "testproject.embedded_postgres", "wipe")


def report(entry: Entry) -> bool:
    """Run one entry and say how it went; tell whether nothing failed."""
    started = time.monotonic()
    try:
        status = run(entry)
    except Missing as missing:
        print(f"NOT RUN  {entry.name}: {missing}.", flush=True)
        return not missing.is_failure
    lines = (entry.directory / "log").read_text(errors="replace").splitlines()
    # The last line of pytest says what passed; what failed, and what was skipped, is shown whole.
    shown = lines[-200:] if status else [line for line in lines if line.startswith("SKIPPED")]
    verdict = "FAILED " if status else "passed "
    last = next((line.strip("= ") for line in reversed(lines) if re.match(r"=+ .* in [0-9.]+s", line)), "no tests ran")
    summary = f"{verdict}  {entry.name}: {last} ({time.monotonic() - started:.0f} s with the installation)"
    versions = [line for line in lines if line.startswith("versions: ")]
    print("\n".join((*(f"    {line}" for line in shown), summary, *(f"    {line}" for line in versions))), flush=True)
    return status == 0


def main() -> int:
    """Run the entries that are asked for, all by default."""
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("pythons", nargs="*", metavar="3.x", help="only the entries of these Pythons")
    parser.add_argument(
        "--jobs", type=int, default=2 * (os.cpu_count() or 1), metavar="N", help="how many run at a time (%(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the copies and their environments")
    options = parser.parse_args()
    entries = [entry for entry in MATRIX if not options.pythons or entry.python in options.pythons]
    for entry in entries:
        shutil.rmtree(entry.directory, ignore_errors=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        passed = list(pool.map(report, entries))
    if not options.keep:
        for entry in entries:
            shutil.rmtree(entry.directory, ignore_errors=True)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
