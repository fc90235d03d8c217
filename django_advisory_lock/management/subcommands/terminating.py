"""`terminate`: the end of a session that holds a lock, or waits for one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError
from django.db import ProgrammingError
from psycopg.errors import InsufficientPrivilege

from ... import inspection
from ...ending import Outcome, end_session, own_sessions, start_of
from .base import NOPERM, TEMPFAIL, Subcommand
from .listing import encoding_of, table

if TYPE_CHECKING:
    from django.core.management.base import BaseCommand

    from .base import SubcommandParser

TIMEOUT = 5.0  # seconds to wait for the end of a session


class Terminate(Subcommand):
    name = "terminate"
    help = "End the database session that holds an advisory lock or waits for one, by its pid as `list` shows it."
    epilog = """\
All of its locks are freed, a transaction that it is in is rolled back, and its process gets an error at its next query.

exit status:
  0   the session has ended
  1   not asked to: no such session, the own one, or not confirmed
  2   wrong usage
  69  the database does not answer, or is not PostgreSQL
  75  told to end, but still there
  77  this role may not end it
"""

    def add_arguments(self, parser: SubcommandParser) -> None:
        parser.add_argument("pid", type=_pid, metavar="PID", help="The pid of the session on the database server.")
        parser.add_argument(
            "--no-input", "--noinput", action="store_false", dest="interactive", help="Do not ask for confirmation."
        )

    def handle(self, command: BaseCommand, using: str, **options: Any) -> None:
        pid, is_quiet = options["pid"], not options["verbosity"]
        locks = [lock for lock in inspection.all_locks(using) if lock.pid == pid]
        if not locks:
            raise CommandError(
                f"No session with the pid {pid} holds an advisory lock on {using!r}, or waits for one."
                f" `advisory_lock list` shows those that do."
            )
        if (pid, start_of(locks[0])) in own_sessions():  # also one of another alias, as in call_command()
            raise CommandError(f"The pid {pid} is the own session. It ends with this process.")
        if options["interactive"] or not is_quiet:
            command.stdout.write(table(locks, encoding_of(command)))
        if options["interactive"]:
            _confirm(pid)
        said = _end(pid, start_of(locks[0]), using)
        if not is_quiet:
            command.stdout.write(said)


def _pid(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is no pid")
    return int(text)


def _confirm(pid: int) -> None:
    question = f"\nEnd the session {pid}, and roll back what it is doing?\nType 'yes' to continue, or 'no' to cancel: "
    try:
        answer = input(question)
    except EOFError as error:
        raise CommandError("Nobody is here to confirm. --no-input goes without.") from error
    if answer != "yes":
        raise CommandError("Cancelled.")


def _end(pid: int, start: int | None, using: str) -> str:
    try:
        outcome = end_session(pid, start, using, timeout=TIMEOUT)
    except ProgrammingError as error:
        if not isinstance(error.__cause__, InsufficientPrivilege):
            raise
        raise CommandError(
            f"This role may not end the session {pid}: that takes its owner, a member of pg_signal_backend, or a"
            f" superuser where the owner is one.",
            returncode=NOPERM,
        ) from error
    if outcome is Outcome.STAYS:
        raise CommandError(f"The session {pid} was told to end, but is still there.", returncode=TEMPFAIL)
    return f"The session {pid} {'has ended' if outcome is Outcome.ENDED else 'had ended, or let go of its locks'}."
