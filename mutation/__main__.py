"""Break the package in one place after another, and show that the tests notice.

    python -m mutation [--only TEXT…] [--jobs N] [--write]

Each breakage is applied to a copy of the working tree, whose tests run until the first that fails. One that none of
them notices is a gap in the tests, and makes the exit status 1. Before that the tests pass on an unbroken copy, and
whoever noticed a breakage has to pass there once more: a test that fails now and then notices nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "proof.md"
BEGIN, END = "<!-- mutation: written by python -m mutation --write -->", "<!-- end of mutation -->"
LIMIT = 300  # seconds for a file of tests: a breakage that makes them hang is noticed too
TIME = "a limit of time"
# Every copy brings its own server.
CHOSEN = re.compile("DATABASE_URL|DJANGO_SETTINGS_MODULE|PG[A-Z]+|COVERAGE[A-Z_]*")
# The statuses of pytest: https://docs.pytest.org/en/stable/reference/exit-codes.html
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Result:
    """What became of the tests of a broken copy."""

    mutant: Mutant
    noticed_by: str | None
    output: str
    is_sound: bool = True  # not, where that test fails on the unbroken package too

    @property
    def is_noticed(self) -> bool:
        return self.noticed_by is not None and self.is_sound

    @property
    def verdict(self) -> str:
        return "noticed " if self.is_noticed else "SURVIVED" if self.is_sound else "UNSOUND "


class Copy:
    """A copy of the working tree, with a server of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        for name in filter(None, names):
            target = home / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # deleted, and not committed yet
                shutil.copy2(ROOT / name, target)

    @contextlib.contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        """Break the copy for the length of a block."""
        path = self.home / "django_advisory_lock" / mutant.module
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name!r} does not fit {mutant.module} any more: mend mutation/mutants.py.")
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def test(self, tests: Sequence[str]) -> tuple[int, str]:
        """Run some tests up to the first failure; return the status of pytest and what it wrote."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        environment = {name: value for name, value in os.environ.items() if not CHOSEN.fullmatch(name)}
        environment = {**environment, "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command,
            cwd=self.home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT * len(tests))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return FAILED, ""
        finally:
            with contextlib.suppress(ProcessLookupError):  # what a test has left
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output

    def wipe(self) -> None:
        """End the server of this copy, and remove its data."""
        subprocess.run([sys.executable, "-m", "testproject.embedded_postgres", "wipe"], cwd=self.home, check=False)


def judge(mutant: Mutant, status: int, output: str) -> Result:
    """Tell who noticed a breakage; a copy that cannot even be imported proves nothing."""
    if status not in (PASSED, FAILED):
        raise SystemExit(f"{mutant.name!r}: pytest ended with {status}.\n{output}")
    # What was logged looks like that too. With any parameters: these may have spaces in them.
    noticed = re.findall(r"^(?:FAILED|ERROR) (tests/[^\s[]+)", output, re.MULTILINE)
    return Result(mutant, None if status == PASSED else noticed[0] if noticed else TIME, output)


def attempt(copy: Copy, mutant: Mutant) -> Result:
    """Try one breakage on a copy, and then who noticed it on the unbroken copy."""
    with copy.broken(mutant):
        result = judge(mutant, *copy.test(files(mutant.tests)))
    if result.noticed_by in (None, TIME):
        return result
    status, output = copy.test([str(result.noticed_by)])
    return result if status == PASSED else replace(result, is_sound=False, output=output)


def files(tests: Iterable[str]) -> list[str]:
    return [f"tests/{name}.py" for name in tests]


def run(mutants: list[Mutant], jobs: int) -> list[Result]:
    """Try the unbroken package, then all breakages, several at a time."""
    with tempfile.TemporaryDirectory(prefix="advisory-lock-mutation-") as home:
        os.chmod(home, 0o755)  # the account of the server has to come in
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        everyone = [Copy(Path(home, str(number))) for number in range(jobs)]
        for copy in everyone:
            copies.put(copy)

        @contextlib.contextmanager
        def borrowed() -> Iterator[Copy]:
            copy = copies.get()
            try:
                yield copy
            finally:
                copies.put(copy)

        def require_sound(test: str) -> None:
            with borrowed() as copy:
                status, output = copy.test(files([test]))
            if status != PASSED:
                raise SystemExit(f"The tests fail on the unbroken package:\n{output}")

        def attempt_one(mutant: Mutant) -> Result:
            started = time.monotonic()
            with borrowed() as copy:
                result = attempt(copy, mutant)
            print(f"{result.verdict} {time.monotonic() - started:4.0f} s  {mutant.name}", flush=True)
            return result

        tests = sorted({test for mutant in mutants for test in mutant.tests})
        try:
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(require_sound, tests))
                print(f"The unbroken package passes {', '.join(tests)}.", flush=True)
                return list(pool.map(attempt_one, mutants))
        finally:
            for copy in everyone:
                copy.wipe()


def table(results: Iterable[Result]) -> str:
    """Return the results as a table in Markdown."""
    rows = (
        f"| {result.mutant.name} | `{result.mutant.module}` | {_short(result)} |\n"
        for result in sorted(results, key=lambda result: MUTANTS.index(result.mutant))
    )
    return f"| what is broken | where | noticed by |\n|---|---|---|\n{''.join(rows)}"


def _short(result: Result) -> str:
    if result.noticed_by in (None, TIME):
        return result.noticed_by or "**nobody**"
    test = f"`{str(result.noticed_by).removeprefix('tests/')}`"
    return test if result.is_sound else f"**nobody**: {test} fails on the unbroken package too"


def summary(results: Sequence[Result]) -> str:
    noticed = sum(result.is_noticed for result in results)
    late = sum(result.noticed_by == TIME for result in results)
    unsound = sum(not result.is_sound for result in results)
    more = f" {unsound} by a test that is unsound, which does not count." if unsound else ""
    return f"{noticed - late} of {len(results)} were noticed by a test, {late} by a limit of time.{more}"


def write(text: str) -> None:
    """Put the table into its page."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="those alone whose name or module has one in it")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many at a time")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.only and options.write:
        parser.error("the page shows all of them: --write goes without --only")
    texts = options.only or [""]
    mutants = [mutant for mutant in MUTANTS if any(text in mutant.name or text in mutant.module for text in texts)]
    if not mutants:
        parser.error(f"no breakage has {' or '.join(map(repr, texts))} in its name")
    for number in (
        signal.SIGINT,
        signal.SIGQUIT,
    ):  # ignored by what a shell starts in the background, and then by tests
        signal.signal(number, signal.default_int_handler)
    results = run(mutants, options.jobs)
    print(f"\n{table(results)}\n{summary(results)}")
    if options.write:
        write(table(results))
    return 0 if all(result.is_noticed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
