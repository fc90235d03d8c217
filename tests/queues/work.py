"""Work that says when it begins, and stays until its test lets it go. Files carry that from any process, forks too."""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support import LIMIT, spawn, wait_until


def work(folder: str) -> str:
    """Be inside until the test opens the place; note it where another one is inside too."""
    place = Place(Path(folder))
    mark = place.path / f"in-{uuid.uuid4().hex}"
    mark.touch()
    if place.inside() > 1:
        (place.path / "overlap").touch()
    wait_until((place.path / "open").exists, "the test lets it go")
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
    process = spawn(code, *arguments, DJANGO_SETTINGS_MODULE="tests.queues.settings", **environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT)
