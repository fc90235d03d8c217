"""`list`: who holds which lock, and who waits for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from unicodedata import combining, east_asian_width

from django.utils import timezone

from ... import inspection
from ...parts import visible
from .base import Status, Subcommand, add_key_arguments, read_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from django.core.management.base import BaseCommand

    from ...inspection import KeyLock
    from ...keys import LockKey
    from .base import SubcommandParser

HEAD = ("NAME", "MODE", "STATUS", "PID", "APPLICATION", "CLIENT", "STATE", "SINCE", "BLOCKED BY")
NOTHING = "-"  # so that every line has as many columns
MOST_ALIKE = 3  # names that a hint has room for


class List(Subcommand):
    name = "list"
    help = "List who holds which advisory lock of a database, and who waits for one; or ask for one lock."
    epilog = """\
SINCE is when the last query of a holder began, or when a session began to wait; PostgreSQL does not say since when a
lock is held. "-" stands for what is not there, or what this role may not see.

exit status:
  0   done; where a lock was named: somebody holds it
  1   nobody holds the lock that was named
  2   wrong usage
  69  the database does not answer, or is not PostgreSQL
  74  stdout cannot be written to
"""

    def add_arguments(self, parser: SubcommandParser) -> None:
        add_key_arguments(parser)
        parser.add_argument("--json", action="store_true", help="Write one JSON document instead of a table.")

    def handle(self, command: BaseCommand, using: str, **options: Any) -> None:
        key = read_key(options)
        locks = inspection.all_locks(using) if key is None else inspection.locks_on([key], using)
        if options["json"]:
            command.stdout.write(json.dumps({"database": using, "locks": list(map(document, locks))}, indent=2))
        elif options["verbosity"] > 0:
            encoding = encoding_of(command)
            command.stdout.write(table(locks, encoding) if locks else _plain(_nothing(key, using), encoding))
        if key is not None and not any(lock.granted for lock in locks):
            raise Status(f"Nobody holds {key.name!r}.", returncode=1)


def _nothing(key: LockKey | None, using: str) -> str:
    """Say that there is no lock; and what may have been meant, for periodic work and slots have keys of their own."""
    if key is None:
        return "No advisory locks."
    free = f"{visible(key.name)!r} is free."
    locks = {lock.key for lock in inspection.all_locks(using) if lock.granted and lock.is_named and lock.key != key}
    alike = [lock for lock in sorted(locks) if f":{key.name}:" in f":{lock.name}:"]
    if not alike:
        return free
    named = "; ".join(f"{lock.name!r} ({', '.join(map(str, lock.args))})" for lock in alike[:MOST_ALIKE])
    return f"{free} Held are other keys with names like it: {named}{'; …' if alike[MOST_ALIKE:] else '.'}"


def document(lock: KeyLock) -> dict[str, Any]:
    """Return what is known of a lock for JSON, under names that stay. Numbers of 64 bits are text there."""
    return {
        "name": lock.key.name,
        "is_named": lock.is_named,
        "key": list(map(str, lock.key.args)),
        "model": lock.model,
        "object_pk": lock.object_pk,
        "mode": _mode(lock),
        "status": _status(lock),
        "pid": lock.pid,
        "own": lock.own,
        "application_name": lock.application_name,
        "client": lock.client,
        "state": lock.state,
        "seconds_in_state": lock.seconds_in_state,
        "query_start": _iso(lock.query_start),
        "waiting_since": _iso(lock.waiting_since),
        "seconds_waiting": lock.seconds_waiting,
        "blocked_by": list(lock.blocked_by),
    }


def _mode(lock: KeyLock) -> str:
    return "shared" if lock.shared else "exclusive"


def _status(lock: KeyLock) -> str:
    return "held" if lock.granted else "waiting"


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _cells(lock: KeyLock) -> tuple[str, ...]:
    since = lock.query_start if lock.granted else lock.waiting_since
    if since is not None and timezone.is_aware(since):
        since = timezone.localtime(since)
    return (
        lock.key.name,
        _mode(lock),
        _status(lock),
        "prepared" if lock.pid is None else str(lock.pid),
        lock.application_name,
        lock.client or "",
        lock.state or "",
        since.isoformat(" ", "seconds") if since else "",
        ", ".join(map(str, lock.blocked_by)),
    )


def encoding_of(command: BaseCommand) -> str:
    return getattr(command.stdout, "encoding", None) or "utf-8"


def table(locks: Iterable[KeyLock], encoding: str) -> str:
    """Return a line for each lock, in columns, with nothing in it that a terminal would obey or could not show."""
    rows = [HEAD, *([_plain(cell, encoding) or NOTHING for cell in _cells(lock)] for lock in locks)]
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _plain(text: str, encoding: str) -> str:
    return visible(text).encode(encoding, "backslashreplace").decode(encoding)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True))
    return "  ".join(cells).rstrip()


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)
