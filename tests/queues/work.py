"""Work that says when it begins, and stays until its test lets it go. Files carry that from any process, forks too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support import LIMIT, spawn, wait_until


def work(folder: str) -> str:
    """Be inside until the test opens the place; note it where another one is inside too."""
    place = Place(Path(folder))
    mark = place.path / f"in-{uuid.uuid4().hex}"

    def is_open() -> bool:
        mark.touch()
        return (place.path / "open").exists()

    mark.touch()
    place.look()
    wait_until(is_open, "the test lets it go")
    place.look()
    mark.unlink()
    return "done"


class Place:
    """Where the work of one test happens."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def inside(self) -> int:
        return len(list(self.path.glob("in-*")))

    def wait_for_a_beat(self) -> None:
        """Wait until the one inside has gone on, so that no signal handler is at work above it."""
        (mark,) = self.path.glob("in-*")
        before = mark.stat().st_mtime_ns
        wait_until(lambda: mark.stat().st_mtime_ns != before, "it goes on")

    def look(self) -> None:
        """Note where two are inside."""
        if self.inside() > 1:
            (self.path / "overlap").touch()

    def wait_for(self, count: int) -> None:
        wait_until(lambda: self.inside() == count, f"{count} inside")

    def open(self) -> None:
        (self.path / "open").touch()

    @property
    def overlapped(self) -> bool:
        return (self.path / "overlap").exists()


@contextlib.contextmanager
def running(code: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a worker in a process of its own, which ends with the block for certain."""
    code = f"import os\nos.setsid()\n{code}"
    process = spawn(code, *arguments, DJANGO_SETTINGS_MODULE="tests.queues.settings", **environment)
    try:
        yield process
    finally:
        kill(process)
        process.kill()
        print(*process.communicate(timeout=LIMIT), sep="")  # noqa: T201 - pytest shows it where the test fails


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a worker and those that it forked, which would outlive it."""
    with contextlib.suppress(ProcessLookupError):  # not yet a group of its own, or gone
        os.killpg(process.pid, signal.SIGKILL)


def end_with_the_test() -> None:
    """Let a worker, and those that it forks, end when its test has ended in any way: its standard input ends too."""

    def watch() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
