from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand

from django_advisory_lock import try_advisory_lock
from testproject.shop import arguments
from testproject.shop.models import Account
from testproject.shop.syncing import REMOTE_DELAY, sync_account, sync_key

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

    from testproject.shop.models import AccountQuerySet


class Command(BaseCommand):
    help = (
        "Fetches the balances of the accounts from a remote system. Start as many copies at the same time as you like:"
        " they share the accounts out among them, by one lock for each account."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--older-than",
            type=arguments.seconds,
            default=3600.0,
            metavar="SECONDS",
            help="Leave out accounts that were synced within this time; 3600 by default.",
        )
        parser.add_argument(
            "--limit", type=arguments.positive, metavar="N", help="Look at no more than N accounts; at all by default."
        )
        parser.add_argument(
            "--delay",
            type=arguments.seconds,
            default=REMOTE_DELAY,
            metavar="SECONDS",
            help=f"How long the remote system, which is only pretended, takes to answer; {REMOTE_DELAY} by default.",
        )
        arguments.add_database(parser)

    def handle(
        self, *, older_than: float, limit: int | None, delay: float, database: str, verbosity: int, **options: Any
    ) -> None:
        due = Account.objects.using(database).due(timedelta(seconds=older_than))
        accounts = due.order_by("pk")[:limit]
        outcomes = Counter(self.sync(account, due, delay=delay, using=database) for account in accounts)
        if verbosity:
            self.stdout.write(
                self.style.SUCCESS(
                    f"Accounts synced: {outcomes['synced']}; skipped because another worker was at them:"
                    f" {outcomes['busy']}; no longer due: {outcomes['done']}."
                )
            )

    def sync(self, account: Account, due: AccountQuerySet, *, delay: float, using: str) -> str:
        with try_advisory_lock(sync_key(account.pk), using=using) as lock:
            if not lock:
                return "busy"
            # Another worker may have been through since the list was read: look again, under the lock.
            if not due.filter(pk=account.pk).exists():
                return "done"
            sync_account(account, delay=delay, using=using)
            return "synced"
