from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connection

from django_advisory_lock import AdvisoryLockCommandMixin
from testproject.demo import server, steps
from testproject.demo.stage import Stage
from testproject.shop import arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.core.management.base import CommandParser

ORDERS_PER_ACCOUNT = 100


class Command(AdvisoryLockCommandMixin, BaseCommand):
    help = (
        "Shows with real processes what advisory locks do, and what happens without them. Every claim is checked; the"
        " exit status is not 0 where one fails. Whatever is in the shop is replaced, as by seed."
    )
    lock_key = ("shop", "demo")
    lock_busy_exit_code = 1

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--copies",
            type=arguments.positive,
            default=10,
            metavar="N",
            help="Start so many copies of the same command, at least 2; 10 by default.",
        )
        parser.add_argument(
            "--accounts",
            type=arguments.positive,
            default=200,
            metavar="N",
            help=f"Let the workers share so many accounts, at least {steps.WORKERS}; 200 by default.",
        )

    def handle(self, *, copies: int, accounts: int, verbosity: int, **options: Any) -> None:
        if copies < 2 or accounts < steps.WORKERS:
            raise CommandError(f"It takes at least 2 copies and {steps.WORKERS} accounts.")
        started = time.monotonic()
        stage = Stage(self, quiet=verbosity < 1)
        try:
            with sigterm_as_interrupt():
                self.prepare(stage, accounts)
                self.show(stage, copies, accounts)
        except KeyboardInterrupt:
            raise CommandError(
                "Interrupted; the processes that were started have been ended.", returncode=130
            ) from None
        if stage.failed:
            raise CommandError("\n".join(["The demo failed:", *(f"- {claim.text}" for claim in stage.failed)]))
        stage.end(f"All {len(stage.claims)} claims hold. That took {time.monotonic() - started:.0f} s.")

    def prepare(self, stage: Stage, accounts: int) -> None:
        server.end_leftovers()
        call_command("migrate", interactive=False, verbosity=0)
        call_command("seed", accounts=accounts, orders=accounts * ORDERS_PER_ACCOUNT, verbosity=0)
        version = server.ask("SHOW server_version").split()[0]
        stage.say(
            f"PostgreSQL {version}, database {connection.settings_dict['NAME']}: {accounts:,} accounts and"
            f" {accounts * ORDERS_PER_ACCOUNT:,} orders."
        )

    def show(self, stage: Stage, copies: int, accounts: int) -> None:
        steps.copies_with_lock(stage, copies)
        steps.copies_without_lock(stage, copies)
        steps.workers_with_lock(stage, accounts)
        steps.workers_without_lock(stage, accounts)
        steps.requests_with_lock(stage)
        steps.killed_holder(stage)
        steps.periodic_work(stage)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, which ends Python where it stands, end the started processes too, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
