"""A command as a child: started in a process group of its own, told of signals, and ended where its lock is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from .inbox import Inbox, is_main_thread, start_thread
from .surroundings import environment
from .terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

# What is passed on, and those of it that ask for the end.
ENDING = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGTSTP)
# Python ignores these for itself, which a command would inherit.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

UNKNOWN = 255  # the exit status of a child that somebody else has waited for
TICK = 1.0  # seconds until it is looked again whether the terminal is free; and for what was killed to be gone
PAUSE = 0.02  # seconds between two looks at what is left of a group
NEVER = float("inf")


def supervise(command: list[str], lost: threading.Event, grace: float) -> int:
    """Run a command to its end and return its exit status, 128 and more where a signal ended it.

    As soon as `lost` is set its process group is told to end, and killed `grace` seconds later; the same happens before
    anything is raised in here. In the main thread the signals of this process are passed on to the group, and it is
    lent the terminal. Raises `OSError` where the command cannot be started.
    """
    with (
        contextlib.closing(Inbox()) as inbox,
        contextlib.closing(Terminal()) as terminal,
        _signals_into(inbox),
        _loss_into(inbox, lost),
    ):
        return Child(inbox, terminal, grace).run(command)


class Child:
    """A process group, from the start of the command that leads it to its end."""

    def __init__(self, inbox: Inbox, terminal: Terminal, grace: float) -> None:
        self._inbox = inbox
        self._terminal = terminal
        self._grace = grace
        self._pid = 0
        self._mutex = threading.Lock()
        self._is_wanted = True
        self._has_begun = threading.Event()
        self._error: Exception | None = None
        self._status: int | None = None
        self._ended_with: int | None = None  # known before it is told: who is interrupted may miss the message
        self._wants_terminal = False
        self._was_told = False  # to end
        self._kill_at = self._leave_at = NEVER
        self._reactions = {
            "signal": self._pass_on,
            "stopped": self._react_to_stop,
            "ended": self._react_to_end,
            "lost": self._end,
        }

    def run(self, command: list[str]) -> int:
        """Start the command, wait for its end, and return its exit status."""
        try:
            self._start(command)
            return self._wait()
        except BaseException:
            with self._mutex:
                self._is_wanted = False
            if self._pid:
                self._status = self._ended_with
                self._end()
                self._wait()
            raise

    def _start(self, command: list[str]) -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        start_thread(lambda: self._live(command, mask))
        self._has_begun.wait()
        if self._error is not None:
            raise self._error
        if self._terminal.is_all_ours():
            self._terminal.lend(self._pid)

    def _live(self, command: list[str], mask: set[signal.Signals | int]) -> None:
        """Start the command and wait for its end, in a thread: in the main one an interrupt could lose its pid."""
        with self._mutex:
            if not self._is_wanted:
                return
            try:
                self._pid = os.posix_spawnp(
                    command[0], command, environment(), setpgroup=0, setsigdef=IGNORED_BY_PYTHON, setsigmask=mask
                )
            except Exception as error:
                self._error = error  # for the thread that waits, which would wait for ever
        self._has_begun.set()
        if self._pid:
            self._ended_with = _wait_for_end(self._pid, self._inbox)
            self._inbox.put("ended", self._ended_with)

    def _wait(self) -> int:
        while self._status is None or self._is_something_left():
            self._react()
        return self._status

    def _react(self) -> None:
        message = self._inbox.get(self._patience())
        if message is None:
            self._look_round()
        else:
            word, number = message
            self._reactions[word](number)

    def _is_something_left(self) -> bool:
        """Whether there is more of a group that was told to end, and still time to wait for that."""
        # The first process of a container is the parent of its orphans, which else stay in the group as zombies.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self._pid, os.WNOHANG)[0]:
                pass
        return self._was_told and time.monotonic() < self._leave_at and self._send(0)

    def _patience(self) -> float | None:
        seconds = self._kill_at - time.monotonic()
        if self._status is not None:
            seconds = PAUSE
        elif self._wants_terminal:
            seconds = min(seconds, TICK)
        return None if seconds == NEVER else max(0.0, seconds)

    def _look_round(self) -> None:
        if time.monotonic() >= self._kill_at:
            self._kill_at, self._leave_at = NEVER, time.monotonic() + TICK
            self._send(signal.SIGKILL)
        if self._wants_terminal:
            self._lend_terminal()

    def _send(self, number: int) -> bool:
        """Send a signal to the whole group; tell whether there is anybody in it."""
        try:
            os.killpg(self._pid, number)
        except OSError as error:  # or all of it runs as another user
            return not isinstance(error, ProcessLookupError)
        return True

    # What happens to it

    def _pass_on(self, number: int) -> None:
        self._send(number)
        if number in ENDING:
            self._was_told = True
            self._send(signal.SIGCONT)  # one that is stopped obeys nothing else
        elif number == signal.SIGTSTP and not self._terminal.is_lent:
            _stop(os.getpid(), number)
            self._send(signal.SIGCONT)

    def _end(self, number: int = 0) -> None:
        self._was_told = True
        self._kill_at, self._leave_at = min(self._kill_at, time.monotonic() + self._grace), NEVER
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)

    def _react_to_end(self, status: int) -> None:
        self._status = status if status >= 0 else 128 - status
        if self._terminal.is_lent and -status in (signal.SIGINT, signal.SIGQUIT):
            # Ctrl-C was meant for the whole job, such as the script that this one is a part of.
            os.kill(-os.getpgrp(), -status)
        # A signal that came from the terminal went to all of the group, some of which may still be at work.
        self._was_told = self._was_told or status < 0
        self._leave_at = min(self._leave_at, time.monotonic() + self._grace)

    def _react_to_stop(self, number: int) -> None:
        if number in (signal.SIGTTIN, signal.SIGTTOU):
            self._wants_terminal = True
            if not self._lend_terminal() and self._terminal.is_there:
                # In the background too. The kernel would stop the whole job.
                _stop(-os.getpgrp(), number)
                self._lend_terminal()
        elif self._terminal.is_lent:
            # Ctrl-Z. Nothing is stopped here where nobody could continue it: the kernel sees to that.
            self._terminal.take_back()
            _stop(-os.getpgrp(), signal.SIGTSTP)
            self._terminal.lend(self._pid)
            self._send(signal.SIGCONT)

    def _lend_terminal(self) -> bool:
        if not self._terminal.lend(self._pid):
            return False
        self._wants_terminal = False
        self._send(signal.SIGCONT)
        return True


def _stop(whom: int, number: int) -> None:
    """Stop this process, or its whole group, with a signal; come back when it is continued."""
    before = signal.signal(number, signal.SIG_DFL)
    os.kill(whom, number)
    signal.signal(number, before or signal.SIG_DFL)


def _wait_for_end(pid: int, inbox: Inbox) -> int:
    """Wait for a child, tell when it is stopped, and return how it ended: a negative number where a signal did it."""
    while True:
        try:
            _, status = os.waitpid(pid, os.WUNTRACED)
        except ChildProcessError:
            return UNKNOWN
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        inbox.put("stopped", os.WSTOPSIG(status))


@contextlib.contextmanager
def _signals_into(inbox: Inbox) -> Iterator[None]:
    if not is_main_thread():
        yield
        return
    ignores_children = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if ignores_children:  # the kernel would forget how a child ended
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with inbox.signals(PASSED_ON):
            yield
    finally:
        if ignores_children:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@contextlib.contextmanager
def _loss_into(inbox: Inbox, lost: threading.Event) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if lost.wait(TICK):
                inbox.put("lost")
                return

    start_thread(watch)
    try:
        yield
    finally:
        over.set()
