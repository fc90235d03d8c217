"""What the subcommands of `manage.py advisory_lock` share: their form, exit statuses, and the ways to name a key."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from ...keys import LockKey, lock_key, model_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.models import Model

# Those that are not 0 or 1 come from sysexits.h, as far as it has them.
USAGE, UNAVAILABLE, SOFTWARE, IOERR, TEMPFAIL, NOPERM = 2, 69, 70, 74, 75, 77


class Status(CommandError):
    """An exit status that is an answer, not a failure: on the command line there is nothing more to say."""


class SubcommandParser(CommandParser):
    """A parser of one subcommand. One that takes a command leaves all after the first `--` to that."""

    takes_command = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self.takes_command:
            return super().parse_known_args(args, namespace)
        # argparse has dropped different ones of several `--` in different releases of Python.
        own = list(args)
        end = own.index("--") if "--" in own else len(own)
        parsed, unknown = super().parse_known_args(own[:end], namespace)
        parsed.command_line = own[end + 1 :]
        return parsed, unknown


class Subcommand:
    """One thing that the command does. Each is known by its name, and gets an alias of a database in `using`."""

    name = ""
    help = ""
    usage: str | None = None
    epilog: str | None = None

    def add_parser(self, subparsers: Any) -> None:
        """Add the parser of this subcommand."""
        parser = subparsers.add_parser(
            self.name,
            help=self.help,
            description=self.help,
            usage=self.usage,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_arguments(parser)
        parser.add_argument(
            "--database",
            choices=tuple(connections),
            help="The alias of the database that the lock lives on, by default ADVISORY_LOCK_DATABASE.",
        )
        _add_base_arguments(parser)

    def add_arguments(self, parser: SubcommandParser) -> None:
        """Add the arguments of this subcommand."""

    def handle(self, command: BaseCommand, using: str, **options: Any) -> None:
        """Do it. `Status` and `CommandError` carry the exit status where that is not 0."""
        raise NotImplementedError


def _add_base_arguments(parser: CommandParser) -> None:
    """Take the options of every command after the name of the subcommand too, and leave those before it alone."""
    common = parser.add_argument_group("options of every command")
    common.add_argument(
        "-v",
        "--verbosity",
        type=int,
        choices=range(4),
        default=argparse.SUPPRESS,
        help="0 is quiet but for errors and warnings: the exit status says it all.",
    )
    for option in ("--settings", "--pythonpath"):
        common.add_argument(option, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for option in ("--traceback", "--no-color", "--force-color"):
        common.add_argument(option, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_key_arguments(parser: CommandParser) -> None:
    """Add the ways to name one key."""
    parser.add_argument(
        "key", nargs="*", default=(), metavar="KEY", help="The parts of the name of one lock, each of them text."
    )
    forms = parser.add_argument_group("a key that is no name")
    forms.add_argument("--int", type=int, metavar="N", help="One number: LockKey((N,)).")
    forms.add_argument("--pair", type=int, nargs=2, metavar=("A", "B"), help="Two numbers: LockKey.pair(A, B).")
    forms.add_argument(
        "--model",
        nargs="+",
        metavar=("APP.MODEL", "PK"),
        help="A row: model_key(Model, pk=PK). Without a PK the model as a whole; a composite PK is several words.",
    )
    forms.add_argument("--purpose", default="", help="The purpose of a --model key.")


def read_key(options: dict[str, Any]) -> LockKey | None:
    """Return the one key that was named, or None; `CommandError` where it is none, or several."""
    forms = [form for form in ("key", "int", "pair", "model") if options[form] not in (None, [], ())]
    if len(forms) > 1:
        raise CommandError("Name one lock: by KEY words, or by one of --int, --pair and --model.", returncode=USAGE)
    if options["purpose"] and forms != ["model"]:
        raise CommandError("--purpose goes with --model.", returncode=USAGE)
    try:
        return _key_of(forms[0], options[forms[0]], options["purpose"]) if forms else None
    except (TypeError, ValueError) as error:
        raise CommandError(str(error), returncode=USAGE) from error


def _key_of(form: str, value: Any, purpose: str) -> LockKey:
    if form == "int":
        return LockKey((value,))
    words = (value,) if isinstance(value, str) else tuple(value)  # call_command() passes on what it is given
    if form == "pair":
        return LockKey.pair(*words)
    return lock_key(*words) if form == "key" else _model_key(words, purpose)


def _model_key(words: Sequence[Any], purpose: str) -> LockKey:
    label, *pk = words
    try:
        model: type[Model] = apps.get_model(label)
    except (LookupError, ValueError) as error:
        raise ValueError(f"There is no model {label!r}: name one as app_label.model.") from error
    if not pk:
        return model_key(model, purpose=purpose)
    return model_key(model, pk=pk[0] if len(pk) == 1 else tuple(pk), purpose=purpose)
