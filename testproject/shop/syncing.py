"""The balances of the accounts, fetched from a remote system under one lock for each account."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import DEFAULT_DB_ALIAS, transaction
from django.db.models.functions import Now

from django_advisory_lock import model_key

from .models import Account, Run
from .remote import fetch_balance

if TYPE_CHECKING:
    from django_advisory_lock import LockKey

REMOTE_DELAY = 0.05  # seconds that the remote system, which is only pretended, takes to answer


def sync_key(pk: int) -> LockKey:
    """Return the key of the lock that whoever syncs an account has to hold."""
    return model_key(Account, pk=pk, purpose="sync")


def sync_account(account: Account, *, delay: float = REMOTE_DELAY, using: str = DEFAULT_DB_ALIAS) -> None:
    """Fetch the balance of an account, and log the work. The caller holds `sync_key(account.pk)`."""
    with Run.objects.using(using).record("sync_accounts", account.pk):
        balance = fetch_balance(account, delay=delay)
        with transaction.atomic(using=using):
            row = Account.objects.using(using).select_for_update().get(pk=account.pk)
            row.balance = balance
            row.synced_at = Now()
            row.save(update_fields=["balance", "synced_at"])
