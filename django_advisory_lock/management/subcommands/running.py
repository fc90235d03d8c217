"""`run`: any command under a lock."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError

from ...exceptions import LockLost, LockTimeout
from ...guards.command import POLL_INTERVAL, _exit_code, _seconds, _seconds_or_none
from ...locks import advisory_lock
from ..bequest import bequeath
from ..child import supervise
from .base import SOFTWARE, TEMPFAIL, USAGE, Status, Subcommand, add_key_arguments, read_key

if TYPE_CHECKING:
    import threading

    from django.core.management.base import BaseCommand

    from .base import SubcommandParser

GRACE = 10.0  # seconds
NOT_FOUND, NOT_STARTED = 127, 126  # as in a shell


class Run(Subcommand):
    name = "run"
    help = "Run a command, with all of its arguments after the first --, while an advisory lock is held."
    usage = "%(prog)s [options] KEY [KEY ...] -- COMMAND [ARG ...]"
    epilog = """\
The command gets the signals HUP, INT, QUIT, TERM, USR1, USR2 and WINCH that come here, and the terminal where it asks
for it. Where the lock is lost, the command and all of its process group are ended.

exit status:
  n      that of the command
  128+n  the command was ended by signal n
  2      wrong usage
  69     the lock could not be taken: the database does not answer, or cannot hold it
  70     the lock was lost: the command was ended, or had just done so
  75     the lock is busy, and stayed so for --timeout seconds; nothing was run (--busy-exit-code)
  126    the command cannot be started
  127    the command was not found
  130    Ctrl-C before the command was started
"""

    def add_arguments(self, parser: SubcommandParser) -> None:
        parser.takes_command = True
        add_key_arguments(parser)
        parser.add_argument(
            "--timeout",
            type=_seconds_or_none,
            default=0,
            metavar="SECONDS",
            help='Wait this long for the lock; 0, the default, tries once, "none" waits for ever.',
        )
        parser.add_argument("--shared", action="store_true", help="Exclude exclusive holders only.")
        parser.add_argument(
            "--grace",
            type=_seconds,
            default=GRACE,
            metavar="SECONDS",
            help=f"The time from SIGTERM to SIGKILL where the lock was lost; {GRACE:g} by default.",
        )
        parser.add_argument(
            "--busy-exit-code",
            type=_exit_code,
            default=TEMPFAIL,
            metavar="N",
            help=f"The exit status where the lock is busy; {TEMPFAIL} by default.",
        )

    def handle(self, command: BaseCommand, using: str, **options: Any) -> None:
        key, line = read_key(options), options["command_line"]
        if key is None or not line:
            raise CommandError("Name a lock, and after -- the command: run KEY -- COMMAND.", returncode=USAGE)
        lock = advisory_lock(
            key,
            using=using,
            timeout=options["timeout"],
            shared=options["shared"],
            poll_interval=POLL_INTERVAL,
            dedicated=True,
        )
        status: int | None = None
        command.stdout.flush()
        try:
            with lock as held, bequeath(held):
                status = _run(line, held.lost, options["grace"])
        except LockTimeout as error:
            _say_busy(command, error, options["busy_exit_code"], is_quiet=not options["verbosity"])
        except LockLost as error:
            end = "It was not started" if status is None else f"It ended with exit status {status}"
            raise CommandError(f"{error} {end}: {line[0]}", returncode=SOFTWARE) from error
        if status:
            raise Status(f"{line[0]} ended with exit status {status}.", returncode=status)


def _say_busy(command: BaseCommand, error: LockTimeout, returncode: int, *, is_quiet: bool) -> None:
    if returncode:
        raise (Status if is_quiet else CommandError)(str(error), returncode=returncode) from error
    if not is_quiet:
        command.stdout.write(f"Skipped. {error}")


def _run(line: list[str], lost: threading.Event, grace: float) -> int:
    try:
        return supervise(line, lost, grace)
    except (OSError, ValueError) as error:
        # Python itself refuses "", which no shell finds.
        returncode = NOT_FOUND if getattr(error, "errno", errno.ENOENT) == errno.ENOENT else NOT_STARTED
        raise CommandError(f"{line[0]}: {getattr(error, 'strerror', error)}", returncode=returncode) from error
