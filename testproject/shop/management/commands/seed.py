from __future__ import annotations

import random
import secrets
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand
from django.core.management.color import no_style
from django.db import connections, transaction

from django_advisory_lock import advisory_lock
from django_advisory_lock.models import PeriodicRun
from testproject.shop import arguments
from testproject.shop.models import Account, MonthlyReport, Order, Run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.core.management.base import CommandParser

START = datetime(2025, 10, 1, tzinfo=timezone.utc)
END = datetime(2026, 10, 1, tzinfo=timezone.utc)
USERNAME = "shop"


class Command(BaseCommand):
    help = (
        "Fills the shop with accounts and a year of orders, the same ones each time. All that was in the shop before,"
        f" its reports and its log included, is replaced. Also makes a user for the admin, {USERNAME!r}, unless there"
        " is one, and prints the password; at verbosity 0, which prints nothing, it makes none."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--accounts", type=arguments.positive, default=200, metavar="N", help="Make so many; 200 by default."
        )
        parser.add_argument(
            "--orders", type=arguments.positive, default=20_000, metavar="N", help="Make so many; 20000 by default."
        )
        arguments.add_database(parser)

    def handle(self, *, accounts: int, orders: int, database: str, verbosity: int, **options: Any) -> None:
        # Inside a transaction the lock lasts until the commit, so a second run starts with what this one leaves.
        with transaction.atomic(using=database), advisory_lock("shop", "seed", using=database):
            for model in (PeriodicRun, Run, MonthlyReport, Order, Account):
                model._default_manager.using(database).all().delete()
            Account.objects.using(database).bulk_create(make_accounts(accounts))
            Order.objects.using(database).bulk_create(make_orders(orders, accounts), batch_size=5000)
            reset_sequences(database)
            password = make_user(database) if verbosity else None
        if verbosity:
            self.stdout.write(self.style.SUCCESS(f"Made {accounts:,} accounts and {orders:,} orders."))
            self.stdout.write(
                f"Log in at /admin/ as {USERNAME!r}, with the password {password!r}."
                if password
                else f"The user {USERNAME!r} keeps the password; `manage.py changepassword {USERNAME}` sets another."
            )


def make_user(database: str) -> str | None:
    """Make a user who may do everything, and return the password; None where there is one already."""
    users = User.objects.db_manager(database)
    if users.filter(username=USERNAME).exists():
        return None
    password = secrets.token_urlsafe(12)
    users.create_superuser(USERNAME, password=password)
    return password


def make_accounts(number: int) -> Iterator[Account]:
    for pk in range(1, number + 1):
        yield Account(pk=pk, name=f"Account {pk}", email=f"account{pk}@example.com")


def make_orders(number: int, accounts: int) -> Iterator[Order]:
    rng = random.Random(20260930)
    minutes = (END - START) // timedelta(minutes=1)
    for pk in range(1, number + 1):
        yield Order(
            pk=pk,
            account_id=rng.randint(1, accounts),
            placed_at=START + timedelta(minutes=rng.randrange(minutes)),
            amount=Decimal(rng.randint(100, 50_000)) / 100,
        )


def reset_sequences(database: str) -> None:
    """Let the database go on counting after the keys given above."""
    connection = connections[database]
    with connection.cursor() as cursor:
        for statement in connection.ops.sequence_reset_sql(no_style(), [Account, MonthlyReport, Order, Run]):
            cursor.execute(statement)
