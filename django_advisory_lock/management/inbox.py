"""What signal handlers and threads have to tell the one thread that waits for all of it."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

THREAD = "advisory_lock run"


class Inbox:
    """Messages, each a word and a number, in the order in which they came."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)

    def put(self, word: str, number: int = 0) -> None:
        """Leave a message. Any thread may, and a signal handler, at any time."""
        self._messages.put((word, number))
        with contextlib.suppress(OSError):  # so many bytes wait that one more wakes nobody; or nobody listens any more
            self._mouth.send(b"\0")

    def get(self, seconds: float | None) -> tuple[str, int] | None:
        """Return the next message; None after some seconds, or sooner."""
        if self._messages.empty():
            self._ear.settimeout(seconds)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                self._ear.recv(4096)
        return None if self._messages.empty() else self._messages.get()

    def close(self) -> None:
        self._ear.close()
        self._mouth.close()

    @contextlib.contextmanager
    def signals(self, numbers: Iterable[int]) -> Iterator[None]:
        """Get the signals that come in a block, which nobody else obeys then; those that are ignored stay so.

        Only for the main thread. The kernel may choose any thread for a signal, so a wait for a lock might not notice
        that there is something to do for Python: https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd.
        """
        before = {}
        descriptor = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        try:
            for number in numbers:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, lambda number, frame: self.put("signal", number))
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(descriptor)


def is_main_thread() -> bool:
    """Whether this thread gets the signals."""
    return threading.current_thread() is threading.main_thread()


def start_thread(function: Callable[[], None]) -> None:
    """Start a thread that leaves all signals to the others."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        threading.Thread(target=function, name=THREAD, daemon=True).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
