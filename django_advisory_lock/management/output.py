"""The standard streams of a program, which may be closed, full, or read by nobody."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from django.core.management.base import CommandError, OutputWrapper

from .subcommands.base import IOERR, Status

if TYPE_CHECKING:
    from collections.abc import Callable


def open_what_is_closed() -> None:
    """Read and write nothing where a standard stream is closed, as by `2>&-`: for Python it is None then.

    What is started later finds it closed all the same.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode, closefd=False))  # noqa: SIM115


class Stderr(OutputWrapper):
    """The exit status tells what is so where nobody can read why."""

    def write(  # type: ignore[override]
        self, msg: str = "", style_func: Callable[[str], str] | None = None, ending: str | None = None
    ) -> None:
        try:
            super().write(msg, style_func, ending)
            self.flush()
        except OSError as error:
            # What is left in the buffer would fail again at the end of Python, and make that its exit status.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            self.complain(error)

    def complain(self, error: OSError) -> None:
        """Say that it cannot be written to."""


class Stdout(Stderr):
    """What cannot be written is an error with an exit status of its own: 1 would be an answer of `list`."""

    def complain(self, error: OSError) -> None:
        message = f"Cannot write to stdout: {error.strerror}"
        if isinstance(error, BrokenPipeError):  # as `| head` wants it
            raise Status(message, returncode=128 + signal.SIGPIPE) from error
        raise CommandError(message, returncode=IOERR) from error
