"""The processes of the demo: each a `manage.py` of its own, on the database of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from django.conf import settings
from django.core.management.base import CommandError
from psycopg import pq

from .server import NAME_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

MANAGE = Path(__file__).resolve().parent.parent.parent / "manage.py"
PATIENCE = 60.0
BUSY = 75  # the exit status of a copy that found the lock busy


def database_url(parameters: Mapping[str, Any]) -> str:
    """Return connection parameters, as Django gives them to psycopg, as a URL that libpq reads."""
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    query = {name: str(value) for name, value in parameters.items() if name in known and value not in (None, "")}
    return f"postgresql:///?{urlencode(query, quote_via=quote)}"


class Child:
    """One process. What it writes goes to a file: a pipe that nobody reads could make it wait."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.expected = {0, BUSY}
        self.ended: float | None = None
        self.output = ""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        warnings = [f"-W{option}" for option in sys.warnoptions]
        self.process = subprocess.Popen(
            [sys.executable, *warnings, str(MANAGE), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def skipped(self) -> bool:
        return self.process.returncode == BUSY

    def has_ended(self) -> bool:
        if self.ended is None and self.process.poll() is not None:
            self.ended = time.monotonic()
            self.read()
            if self.process.returncode not in self.expected:
                raise CommandError(f"{self.name} failed with exit status {self.process.returncode}.\n{self.output}")
        return self.ended is not None

    def read(self) -> None:
        """Read what it has written so far."""
        self._file.seek(0)
        self.output = self._file.read().decode(errors="replace").strip()

    def pause(self) -> None:
        """Stop it in its tracks, and return when it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def kill(self) -> None:
        self.expected = {-signal.SIGKILL}
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._file.close()


class Crew:
    """The processes of one step. None of them outlives the block."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            child.end()

    def start(self, name: str, *arguments: str, **environment: str) -> Child:
        parameters = {**self._parameters, "application_name": NAME_PREFIX + name}
        variables = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": settings.SETTINGS_MODULE,
            "DATABASE_URL": database_url(parameters),
            **environment,
        }
        child = Child(name, [*arguments, "--no-color"], variables)
        self.children.append(child)
        return child

    def ended(self) -> int:
        return sum([child.has_ended() for child in self.children])

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition is true; a process that fails meanwhile, or a minute that is over, is an error."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            self.ended()
            if time.monotonic() > deadline:
                for child in self.children:
                    child.read()
                said = "".join(f"\n{child.name}: {child.output}" for child in self.children if child.output)
                raise CommandError(f"Waited {PATIENCE:g} s in vain until {what}.{said}")
            time.sleep(0.02)

    def wait_for_all(self) -> None:
        self.wait(lambda: self.ended() == len(self.children), "all processes have ended")
