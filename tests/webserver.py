"""Real web servers for the tests, each in processes of its own, and requests that really are simultaneous."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
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
        self.received = bytearray()
        self.is_over = False

    def receive(self) -> bool:
        """Read what is there, or wait for more; tell whether that was the end. A server that dies resets."""
        piece = b""
        with contextlib.suppress(ConnectionResetError):
            piece = self.socket.recv(1 << 20)
        self.received += piece
        if not piece:
            self.is_over = True
            self.socket.close()
        return self.is_over

    def read_until(self, text: bytes) -> None:
        while text not in self.received:
            assert not self.receive(), self.received

    def read_all(self) -> bytes:
        while not self.is_over:
            self.receive()
        return bytes(self.received)

    def answer(self) -> Answer:
        head, _, body = self.read_all().decode().partition("\r\n\r\n")
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return Answer(int(first.split()[1]), headers, body)

    def go_away(self) -> None:
        self.socket.close()


def answers(requests: list[Request]) -> list[Answer]:
    """Return all answers. They are read as they come: a server may linger until a client has closed."""
    return first_answers(requests, len(requests))


def first_answers(requests: list[Request], count: int) -> list[Answer]:
    """Return the first answers that come; the other requests have none yet."""

    def over() -> list[Request]:
        waiting = {request.socket: request for request in requests if not request.is_over}
        for readable in select.select(waiting, [], [], 0.05)[0] if waiting else ():
            waiting[readable].receive()
        return [request for request in requests if request.is_over]

    wait_until(lambda: len(over()) >= count, f"{count} answers")
    return [request.answer() for request in over()]


class WebServer:
    """A web server on a port that the system chose, with all of its processes in a group of their own."""

    def __init__(self, name: str, code: str, directory: Path, settings: str, **variables: str) -> None:
        self.name = name
        self.directory = directory
        self.log = directory / "output"
        self.looked_at = 0
        self.requests: list[Request] = []
        with socket.socket() as listener, self.log.open("w") as log:
            listener.bind(("127.0.0.1", 0))
            # From here on a client can connect, and waits until the server is up.
            listener.listen(64)
            self.port = listener.getsockname()[1]
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import sys, django; django.setup()\n{code}",
                    str(listener.fileno()),
                    str(directory),
                ],
                env=environment(
                    DJANGO_SETTINGS_MODULE=settings,
                    PYTHONWARNINGS="default,ignore:unclosed:ResourceWarning",  # gunicorn's sockets
                    WEB_NAME=name,
                    WEB_DIRECTORY=str(directory),
                    **variables,
                ),
                pass_fds=[listener.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        # Whatever becomes of this process, the server does not outlive it.
        self.guardian = subprocess.Popen(
            ["sh", "-c", 'read -r _; kill -KILL -"$0" 2>/dev/null', str(self.process.pid)],
            start_new_session=True,
            stdin=subprocess.PIPE,
        )

    def send(self, path: str, method: str = "GET", **headers: str) -> Request:
        request = Request(self.port, method, path, headers)
        self.requests.append(request)
        return request

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        return self.send(path, method, **headers).answer()

    def post(self, path: str, **headers: str) -> Answer:
        return self.get(path, "POST", **headers)

    def at_once(self, count: int, path: str, method: str = "GET", **headers: str) -> list[Request]:
        """Send requests, of which none waits for the answer to another."""
        return [self.send(path, method, **headers) for _ in range(count)]

    def forget_clients(self) -> None:
        """Let all clients go away that are left."""
        for request in self.requests:
            request.go_away()
        self.requests.clear()

    # Where its views are

    def arrivals(self, name: str, point: str) -> list[int]:
        """Return the processes of the views that have come to a point."""
        return [int(path.read_text()) for path in self.directory.glob(f"{name}.{point}.*")]

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
        """Return what it has printed since the last time, beside what is expected."""
        text = self.log.read_text()
        new, self.looked_at = text[self.looked_at :], len(text)
        return [line for line in expected.sub("", new).splitlines() if line.strip()]

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
            self.guardian.communicate(timeout=LIMIT)
            self.process.wait(LIMIT)
            wait_until(self._is_gone, "the end of its processes")

    def _is_gone(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False


@contextlib.contextmanager
def _running(name: str, package: str, code: str, settings: str, **variables: str) -> Iterator[WebServer]:
    required(package)
    with tempfile.TemporaryDirectory() as directory:
        server = WebServer(name, code, Path(directory), settings, **variables)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def gunicorn(
    name: str, settings: str = "tests.web_settings", variables: dict[str, str] | None = None, **options: Any
) -> Iterator[WebServer]:
    """Serve `tests.locked_views`, or the project of other settings, for the length of a block."""
    chosen = {
        "loglevel": "warning",
        "preload_app": True,
        "control_socket_disable": True,
        "graceful_timeout": 10,
        "timeout": 60,
        **options,
    }
    code = f"from tests.wsgi import serve\nserve(int(sys.argv[1]), sys.argv[2], {chosen!r})"
    with _running(name, "gunicorn", code, settings, **(variables or {})) as server:
        yield server


@contextlib.contextmanager
def uvicorn(name: str, application: str = "locked", settings: str = "tests.web_settings") -> Iterator[WebServer]:
    """Serve `tests.locked_views`, or the `own` views of `tests.asgi`, for the length of a block."""
    code = f"from tests.asgi import serve\nserve(int(sys.argv[1]), {application!r})"
    with _running(name, "uvicorn", code, settings) as server:
        yield server
