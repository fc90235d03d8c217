"""A link to a server that can be cut, stalled and refused: a TCP proxy in a thread."""

from __future__ import annotations

import queue
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from tests.support import LIMIT


@dataclass(eq=False)
class _Flow:
    """One direction of a link, and what of it has been held back."""

    source: socket.socket
    target: socket.socket
    held_back: bytes = b""
    has_ended: bool = False


@dataclass(eq=False)
class _Link:
    client: socket.socket
    flows: tuple[_Flow, _Flow]

    @property
    def is_stalled(self) -> bool:
        return bool(self.flows[0].held_back)


class Proxy:
    """Pass what clients send to a free port of this machine on to the unix socket of a server, and the answers back.

    One thread owns every socket; the methods hand it a command and wait until it is done.
    """

    host = "127.0.0.1"

    def __init__(self, path: str) -> None:
        self.path = path
        self.accepted = 0
        self.refused = 0
        self._links: set[_Link] = set()
        self._is_paused = self._refuses = self._is_closed = False
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._listener = socket.create_server((self.host, 0))
        self.port = self._listener.getsockname()[1]
        self._waker, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._obey)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._command(self._close)
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()

    @property
    def settings(self) -> dict[str, Any]:
        """What an alias of Django needs to come this way."""
        return {"HOST": self.host, "PORT": str(self.port)}

    @property
    def links(self) -> int:
        return len(self._links)

    @property
    def stalled(self) -> int:
        """How many clients have sent something that was held back."""
        return sum(link.is_stalled for link in list(self._links))

    def pause(self) -> None:
        """Let nothing pass, in either direction; what arrives is kept."""
        self._command(lambda: self._set(paused=True))

    def resume(self) -> None:
        """Let all pass again, what was kept first, and accept clients again."""
        self._command(self._resume)

    def cut(self) -> None:
        """Reset every link; what was kept is gone."""
        self._command(self._cut)

    def refuse(self) -> None:
        """Reset every client that comes from now on, until `resume()`."""
        self._command(lambda: self._set(refuses=True))

    # In the thread

    def _command(self, command: Callable[[], None]) -> None:
        done = threading.Event()
        self._commands.put((command, done))
        self._waker.send(b"!")
        assert done.wait(LIMIT), "the proxy does not react"

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select():
                key.data()

    def _obey(self) -> None:
        self._wake.recv(1)
        command, done = self._commands.get()
        command()
        done.set()

    def _set(self, *, paused: bool = False, refuses: bool = False) -> None:
        self._is_paused |= paused
        self._refuses |= refuses

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(socket.AF_UNIX)
        if self._refuses or server.connect_ex(self.path):
            self.refused += 1
            server.close()
            _reset(client)
            return
        self.accepted += 1
        link = _Link(client, (_Flow(client, server), _Flow(server, client)))
        self._links.add(link)
        for flow in link.flows:
            self._selector.register(flow.source, selectors.EVENT_READ, self._pump(link, flow))

    def _pump(self, link: _Link, flow: _Flow) -> Callable[[], None]:
        return lambda: self._read(link, flow)

    def _read(self, link: _Link, flow: _Flow) -> None:
        if link not in self._links:
            return  # dropped by what was ready before it
        try:
            data = flow.source.recv(65536)
        except OSError:
            data = b""
        flow.held_back += data
        if not data:
            flow.has_ended = True
            self._selector.unregister(flow.source)
        if not self._is_paused:
            self._pass_on(link, flow)

    def _pass_on(self, link: _Link, flow: _Flow) -> None:
        try:
            flow.target.sendall(flow.held_back)
        except OSError:
            self._drop(link)
        flow.held_back = b""
        if flow.has_ended and link in self._links:
            self._drop(link)

    def _resume(self) -> None:
        self._is_paused = self._refuses = False
        for link in list(self._links):
            for flow in link.flows:
                if link in self._links:
                    self._pass_on(link, flow)

    def _cut(self) -> None:
        for link in list(self._links):
            self._drop(link, end=_reset)

    def _drop(self, link: _Link, end: Callable[[socket.socket], None] = socket.socket.close) -> None:
        self._links.discard(link)
        for flow in link.flows:
            if not flow.has_ended:
                self._selector.unregister(flow.source)
        link.flows[0].target.close()
        end(link.client)

    def _close(self) -> None:
        self._cut()
        self._is_closed = True
        self._selector.close()
        for own in (self._listener, self._waker, self._wake):
            own.close()


def _reset(client: socket.socket) -> None:
    """Close with RST, as a firewall or a crashed machine does, not with the FIN of an orderly end."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
