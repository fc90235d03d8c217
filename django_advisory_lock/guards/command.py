"""A guard for management commands: ten copies started by cron on ten hosts, one works, nine skip."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction
from django.core.management import get_commands
from django.core.management.base import BaseCommand, CommandError

from .. import known
from ..keys import lock_key
from ..notices import logger
from ..options import seconds
from .base import Guard, guard_lock, refuse_hidden_hook, refuse_wrong_interval
from .period import NO_PERIOD, NotedPeriod, Period, read_interval

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from django.core.management.base import CommandParser

    from ..exceptions import LockTimeout
    from ..handles import LockHandle
    from ..keys import KeyLike, LockKey

# A session that waits in the server's queue keeps a snapshot open, and CREATE INDEX CONCURRENTLY in the one that holds
# the lock would wait for that snapshot. So a command tries and sleeps, this many seconds.
POLL_INTERVAL = 0.25


class AdvisoryLockCommandMixin(BaseCommand):
    """Run `handle()` under an advisory lock, or skip it where the lock is busy. Name this class before `BaseCommand`.

    The key is `lock_key`, or what `get_lock_key()` returns, by default the module of the command: one lock for each
    command, whatever its arguments. `lock_timeout` is in seconds: 0 tries once, None waits for ever. A command that
    finds the lock busy says so in one line and exits with `lock_busy_exit_code`; 0 counts as success. While `handle()`
    runs, `held_lock` is the handle of the lock, so that long work can `held_lock.check()` between batches; it is None
    with `--no-lock`. With `lock_min_interval`, in seconds or as a timedelta, a command also skips whose key was started
    less than that ago, unless `--lock-ignore-interval` is given: see `periodic_lock()`.

    The lock is a session lock, free right after the command; inside a transaction of the caller it lasts until the
    COMMIT. A lock that was lost while `handle()` ran raises `LockLost`, and the exit status is not 0.
    """

    lock_key: KeyLike | None = None
    lock_timeout: float | timedelta | None = 0
    lock_using: str | None = None
    lock_shared: bool = False
    lock_busy_exit_code: int = 0
    lock_min_interval: float | timedelta | None = None
    held_lock: LockHandle | None = None

    # Those of the options below that are this mixin's; the others belong to the command.
    _lock_options: tuple[str, ...] = ("lock_timeout", "no_lock", "lock_busy_exit_code", "lock_ignore_interval")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_hidden_hook(cls, AdvisoryLockCommandMixin, "execute", also_own=True)
        refuse_wrong_interval(cls)
        known.note(cls)
        if iscoroutinefunction(cls.handle):
            raise TypeError(
                f"{cls.__qualname__}.handle() is a coroutine function; Django runs synchronous commands only."
            )

    def get_lock_key(self, *args: Any, **options: Any) -> KeyLike:
        """Return the key of this run; `args` and `options` are those of `handle()`."""
        return ("command", type(self).__module__) if self.lock_key is None else self.lock_key

    @classmethod
    def _known_keys(cls) -> tuple[LockKey, ...]:
        return known.fixed(("command", cls.__module__) if cls.lock_key is None else cls.lock_key)

    def get_lock_using(self, *args: Any, **options: Any) -> str | None:
        """Return the alias to lock on, by default `lock_using`; a command may take it from its options."""
        return self.lock_using

    def handle_lock_busy(self, error: LockTimeout, /, *args: Any, **options: Any) -> str | None:
        """Called instead of `handle()` where the lock is busy, and returns what `handle()` would."""
        if self.lock_min_interval is not None:
            logger.info("%s was skipped. %s", type(self).__module__, error)
        if self.lock_busy_exit_code:
            raise CommandError(str(error), returncode=self.lock_busy_exit_code) from error
        if options.get("verbosity", 1):
            self.stdout.write(f"Skipped. {error}")
        return None

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        # Not in add_arguments(), which commands override without calling super().
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        taken = {name for action in parser._actions for name in (action.dest, *action.option_strings)}
        group = parser.add_argument_group("advisory lock")
        added = []
        for dest, settings in self._lock_arguments().items():
            option = f"--{dest.replace('_', '-')}"
            if dest not in taken and option not in taken:
                group.add_argument(option, **settings)
                added.append(dest)
        self._lock_options = tuple(added)
        return parser

    def _lock_arguments(self) -> dict[str, dict[str, Any]]:
        arguments: dict[str, dict[str, Any]] = {
            "lock_timeout": {
                "type": _seconds_or_none,
                "default": self.lock_timeout,
                "metavar": "SECONDS",
                "help": 'Wait this long for the lock before the run is skipped; 0 tries once, "none" waits for ever.',
            },
            "no_lock": {"action": "store_true", "help": "Run without the lock."},
            "lock_busy_exit_code": {
                "type": _exit_code,
                "default": self.lock_busy_exit_code,
                "metavar": "N",
                "help": "Exit with this status where the lock is busy; 0 counts as success.",
            },
        }
        if self.lock_min_interval is not None:
            text = "Run although the last start is less than the command's interval ago."
            arguments["lock_ignore_interval"] = {"action": "store_true", "help": text}
        return arguments

    def execute(self, *args: Any, **options: Any) -> str | None:
        own = {name: options.pop(name) for name in self._lock_options if name in options}
        timeout = own.get("lock_timeout", self.lock_timeout)
        is_ignored = bool(own.get("lock_ignore_interval"))
        handle = self.handle

        def locked_handle(*args: Any, **options: Any) -> Any:
            using = self.get_lock_using(*args, **options)
            guard = _CommandGuard(self, using, timeout, is_ignored=is_ignored, verbosity=options.get("verbosity", 1))
            with _attributes(self, held_lock=None):
                return guard.around(handle)(*args, **options)

        if own.get("no_lock"):
            return super().execute(*args, **options)
        # Django's execute() calls self.handle() after its checks: an attribute of the instance comes before the method.
        exit_code = own.get("lock_busy_exit_code", self.lock_busy_exit_code)
        with _attributes(self, handle=locked_handle, lock_busy_exit_code=exit_code):
            return super().execute(*args, **options)


class _CommandGuard(Guard):
    """A lock around the `handle()` of one run."""

    def __init__(
        self,
        command: AdvisoryLockCommandMixin,
        using: str | None,
        timeout: float | timedelta | None,
        *,
        is_ignored: bool,
        verbosity: int,
    ) -> None:
        interval = None if command.lock_min_interval is None else read_interval(command.lock_min_interval)
        shared = command.lock_shared
        super().__init__(
            guard_lock(command.get_lock_key, using, timeout, shared, interval=interval, poll_interval=POLL_INTERVAL)
        )
        self.command = command
        self.interval = interval
        self.is_ignored = is_ignored
        self.verbosity = verbosity

    def period(self) -> Period:
        return NO_PERIOD if self.interval is None else NotedPeriod(self.interval, is_ignored=self.is_ignored)

    def begin(self, handle: LockHandle) -> None:
        self.command.held_lock = handle

    def busy(self, error: LockTimeout, /, *args: Any, **options: Any) -> str | None:
        return self.command.handle_lock_busy(error, *args, **options)

    def too_soon(self, reason: str) -> None:
        logger.info("%s was skipped, %s.", type(self.command).__module__, reason)
        if self.verbosity:
            self.command.stdout.write(f"Skipped, {reason}.")


@known.source
def _installed_commands(using: str | None) -> list[LockKey]:
    """Return the default keys of all commands, without importing one."""
    paths = [
        f"{app}.management.commands.{name}" if isinstance(app, str) else type(app).__module__
        for name, app in get_commands().items()
    ]
    return [lock_key("command", path) for path in paths]


@contextlib.contextmanager
def _attributes(instance: object, **values: object) -> Iterator[None]:
    """Set attributes of an instance for the length of a block."""
    before = dict(vars(instance))
    vars(instance).update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(instance, name, before[name])
            else:
                delattr(instance, name)


def _seconds(text: str) -> float:
    try:
        return seconds(float(text), "the timeout") or 0.0
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, at least 0") from error


def _seconds_or_none(text: str) -> float | None:
    try:
        return None if text == "none" else _seconds(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or none") from error


def _exit_code(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 256):
        raise argparse.ArgumentTypeError(f"{text!r} is not an exit status from 0 to 255")
    return int(text)
