"""`manage.py advisory_lock`: what those who run a project do with its locks."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import Error
from django.utils.connection import ConnectionDoesNotExist

from ... import conf
from ...exceptions import AdvisoryLockError
from ..output import Stderr, Stdout, open_what_is_closed
from ..subcommands.base import UNAVAILABLE, Status, Subcommand, SubcommandParser
from ..subcommands.diagnosing import Doctor
from ..subcommands.listing import List
from ..subcommands.running import Run
from ..subcommands.terminating import Terminate

if TYPE_CHECKING:
    from django.core.management.base import CommandParser


class Command(BaseCommand):
    help = "List advisory locks, run a command under one, probe the database of locks, end the session of a holder."
    # It has to work where a project does not.
    requires_system_checks = ()

    subcommands: ClassVar[dict[str, Subcommand]] = {each.name: each for each in (List(), Run(), Doctor(), Terminate())}
    _is_a_program = False

    def add_arguments(self, parser: CommandParser) -> None:
        subparsers = parser.add_subparsers(
            dest="subcommand", required=True, metavar="SUBCOMMAND", parser_class=SubcommandParser
        )
        for subcommand in self.subcommands.values():
            subcommand.add_parser(subparsers)

    def run_from_argv(self, argv: list[str]) -> None:
        self._is_a_program = True
        open_what_is_closed()
        self.stdout, self.stderr = Stdout(sys.stdout), Stderr(sys.stderr)
        self.stderr.style_func = self.style.ERROR
        try:
            super().run_from_argv(argv)
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            using = options.pop("database") or conf.get_database()
            self.subcommands[options.pop("subcommand")].handle(self, using, **options)
        except Status as status:
            # Django would print it as an error. A caller of call_command() gets the error, never SystemExit.
            if self._is_a_program:
                raise SystemExit(status.returncode) from None
            raise
        except (AdvisoryLockError, ConnectionDoesNotExist, Error, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=UNAVAILABLE) from error
