"""Real web servers for the tests, each in processes of its own, and requests that really are simultaneous."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import LIMIT, environment, wait_until


def required(package: str) -> None:
    """Without a package of the tests skip, or fail where every tool is required, as in `.ci/run`."""
    if importlib.util.find_spec(package) is None:
        message = f"NOT TESTED: there is no {package} in this environment."
        if os.environ.get("TESTS_REQUIRE_TOOLS"):
            pytest.fail(message)
        pytest.skip(message)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: str


class Request:
    """A request that was sent over a connection of its own; its answer is read in full, in part or not at all."""

    def __init__(self, port: int, method: str, path: str, headers: dict[str, str]) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(2 * LIMIT)
        # As small as can be, so that a client that does not read is felt soon.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", port))
        lines = [f"{method} {path} HTTP/1.0", "Host: test", "Content-Length: 0"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())
        self.received = b""

    def read_until(self, text: bytes) -> None:
        while text not in self.received:
            piece = self.socket.recv(65536)
            assert piece, self.received
            self.received += piece

    def read_all(self) -> bytes:
        """Read to the end; a server that is killed may reset the connection."""
        pieces = [self.received]
        with self.socket, contextlib.suppress(ConnectionResetError):
            while piece := self.socket.recv(1 << 20):
                pieces.append(piece)
        return b"".join(pieces)

    def answer(self) -> Answer:
        head, _, body = self.read_all().decode().partition("\r\n\r\n")
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return Answer(int(first.split()[1]), headers, body)

    def go_away(self) -> None:
        self.socket.close()


class WebServer:
    """A web server on a port that the system chose, with all of its processes in a group of their own."""

    def __init__(self, name: str, code: str, directory: Path, settings: str) -> None:
        self.name = name
        self.directory = directory
        self.log = directory / "output"
        with socket.socket() as listener, self.log.open("w") as log:
            listener.bind(("127.0.0.1", 0))
            # From here on a client can connect, and waits until the server is up.
            listener.listen(64)
            self.port = listener.getsockname()[1]
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import sys, django; django.setup()\n{code}", str(listener.fileno()), str(directory)],
                env=environment(
                    DJANGO_SETTINGS_MODULE=settings,
                    PYTHONWARNINGS="default",
                    WEB_NAME=name,
                    WEB_DIRECTORY=str(directory),
                ),
                pass_fds=[listener.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def send(self, path: str, method: str = "GET", **headers: str) -> Request:
        return Request(self.port, method, path, headers)

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        return self.send(path, method, **headers).answer()

    def post(self, path: str, **headers: str) -> Answer:
        return self.get(path, "POST", **headers)

    def at_once(self, count: int, path: str, method: str = "GET", **headers: str) -> list[Request]:
        """Send requests, of which none waits for the answer to another."""
        return [self.send(path, method, **headers) for _ in range(count)]

    # Where its views are

    def arrivals(self, name: str, point: str) -> list[int]:
        """Return the processes of the views that have come to a point."""
        found = self.directory.glob(f"{name}.{point}.*")
        return [int(path.read_text()) for path in found if path.suffix != ".new"]

    def wait_for(self, name: str, point: str, count: int = 1) -> list[int]:
        wait_until(lambda: len(self.arrivals(name, point)) >= count, f"{count} at {point!r}")
        arrivals = self.arrivals(name, point)
        assert len(arrivals) == count
        return arrivals

    def open(self, name: str, point: str) -> None:
        """Let all go on, who are at a point or come to it."""
        (self.directory / f"{name}.{point}").touch()

    def workers(self) -> set[int]:
        """Return the workers that gunicorn has ever started."""
        return {int(path.suffix[1:]) for path in self.directory.glob("worker.*")}

    # What it says, and its end

    def unexpected(self, expected: re.Pattern[str]) -> list[str]:
        """Return what it printed beside what is expected."""
        return [line for line in expected.sub("", self.log.read_text()).splitlines() if line.strip()]

    def says(self, pattern: str) -> bool:
        return re.search(pattern, self.log.read_text()) is not None

    def send_signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def stop(self) -> None:
        """End it, by force where it does not end by itself; no process stays."""
        try:
            self.process.terminate()
            self.process.wait(LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(LIMIT)
            wait_until(self._is_gone, "the end of its processes")

    def _is_gone(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False


@contextlib.contextmanager
def _running(name: str, package: str, code: str, settings: str) -> Iterator[WebServer]:
    required(package)
    with tempfile.TemporaryDirectory() as directory:
        server = WebServer(name, code, Path(directory), settings)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def gunicorn(name: str, **options: Any) -> Iterator[WebServer]:
    """Serve `tests.locked_views` for the length of a block."""
    chosen = {
        "loglevel": "warning",
        "preload_app": True,
        "control_socket_disable": True,
        "graceful_timeout": 10,
        "timeout": 60,
        **options,
    }
    code = f"from tests.wsgi import serve\nserve(int(sys.argv[1]), sys.argv[2], {chosen!r})"
    with _running(name, "gunicorn", code, "tests.web_settings") as server:
        yield server


@contextlib.contextmanager
def uvicorn(name: str, application: str = "locked", settings: str = "tests.web_settings") -> Iterator[WebServer]:
    """Serve `tests.locked_views`, or the `own` views of `tests.asgi`, for the length of a block."""
    code = f"from tests.asgi import serve\nserve(int(sys.argv[1]), {application!r})"
    with _running(name, "uvicorn", code, settings) as server:
        yield server
