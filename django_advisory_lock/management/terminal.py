"""The controlling terminal, which one process group at a time may read from and which gets its Ctrl-C and Ctrl-Z."""

from __future__ import annotations

import contextlib
import os
import signal

from .inbox import is_main_thread

NONE = -1


class Terminal:
    """The terminal of this process, if there is one; only the main thread has one, since it takes signals to share it.

    See https://pubs.opengroup.org/onlinepubs/9799919799/basedefs/V1_chap11.html#tag_11_01.
    """

    def __init__(self) -> None:
        self._descriptor = NONE
        self.is_lent = False
        if is_main_thread():
            with contextlib.suppress(OSError):
                self._descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)

    @property
    def is_there(self) -> bool:
        return self._descriptor != NONE

    def is_ours(self) -> bool:
        """Whether the process group of this process is in the foreground."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:
            return False

    def is_all_ours(self) -> bool:
        """Whether this process is a job of its own there: a part neither of a script nor of a pipeline."""
        return os.getpgrp() == os.getpid() and all(map(os.isatty, (0, 1))) and self.is_ours()

    def lend(self, group: int) -> bool:
        """Put another group into the foreground, where that is this one's to give; tell whether it is there now."""
        with contextlib.suppress(OSError):
            if self.is_ours():
                os.tcsetpgrp(self._descriptor, group)
                self.is_lent = True
            return os.tcgetpgrp(self._descriptor) == group
        return False

    def take_back(self) -> None:
        """Come to the foreground again, if another group was put there."""
        if not self.is_lent:
            return
        self.is_lent = False
        # Who asks from the background is stopped, unless the signal is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._descriptor, os.getpgrp())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        self.take_back()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
