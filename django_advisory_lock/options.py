"""How a lock is taken: what its options mean, and which of PostgreSQL's two scopes it gets."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

from django.db.transaction import TransactionManagementError

from . import transactions

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from .holds import HeldScope
    from .keys import LockKey

Scope = Literal["auto", "session", "transaction"]


def seconds(value: float | timedelta | None, name: str) -> float | None:
    """Check a length of time and return it in seconds; None stands for no limit."""
    if value is None:
        return None
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name} is a number of seconds, a timedelta or None, not {type(value).__name__}.")
    if not 0 <= number <= sys.float_info.max:
        raise ValueError(f"{name} is at least 0 and finite, not {value!r}. None waits for ever, 0 tries once.")
    return float(number)


class Options:
    """How a lock is taken; nothing in it changes. A timeout of None waits for ever."""

    __slots__ = ("dedicated", "poll_interval", "scope", "shared", "timeout", "tries_only", "waits_at_once")

    def __init__(
        self,
        shared: bool,
        scope: Scope,
        timeout: float | timedelta | None = None,
        poll_interval: float | timedelta | None = None,
        tries_only: bool = False,
        dedicated: bool = False,
    ) -> None:
        if scope not in get_args(Scope):
            raise ValueError(f"scope is one of {', '.join(map(repr, get_args(Scope)))}, not {scope!r}.")
        if not isinstance(shared, bool):
            raise TypeError(f"shared is True or False, not {type(shared).__name__}.")
        if dedicated and scope == "transaction":
            raise ValueError(
                "A dedicated session has no transaction: dedicated=True goes with scope 'auto' or 'session'."
            )
        self.dedicated = bool(dedicated)
        self.shared = shared
        self.scope = scope
        self.timeout = seconds(timeout, "timeout")
        self.poll_interval = seconds(poll_interval, "poll_interval")
        if self.poll_interval == 0:
            raise ValueError("poll_interval is more than 0: the seconds between two tries.")
        self.tries_only = tries_only
        self.waits_at_once = timeout is None and poll_interval is None and not tries_only


def resolve_scope(
    key: LockKey, options: Options, connection: BaseDatabaseWrapper, in_server_transaction: bool, for_task: bool
) -> HeldScope:
    """Return the scope of a lock on an open connection, or refuse one that would not last as long as it should."""
    scope = options.scope
    if scope == "session":
        return "session"
    in_transaction = in_server_transaction and transactions.in_transaction(connection)
    if for_task and (in_transaction or scope == "transaction"):
        raise TransactionManagementError(
            f"The lock {key.name!r} on {connection.alias!r} cannot be a transaction lock in asynchronous code: tasks"
            f" share the session, so it would join another task's transaction. Take it in the synchronous function that"
            f" holds the transaction; or outside the transaction."
        )
    if in_transaction:
        return "transaction"
    alias = connection.alias
    if scope == "transaction":
        raise TransactionManagementError(
            f"scope='transaction' needs a transaction on {alias!r}: use it inside atomic(using={alias!r})."
        )
    if not options.dedicated:  # that was looked at before the session was opened
        refuse_other_transactions(key, alias, options)
    return "session"


def refuse_other_transactions(key: LockKey, alias: str, options: Options) -> None:
    """Refuse a session lock that would be freed before a transaction of this thread commits."""
    if options.scope == "session":
        return
    other = transactions.other_alias_in_transaction(None if options.dedicated else alias)
    if other is not None:
        raise TransactionManagementError(
            f"The lock {key.name!r} on {alias!r} would be freed before the transaction on {other!r} commits. Name that"
            f" alias (using={other!r}, not dedicated), take the lock outside the transaction, or say scope='session' if"
            f" the lock has nothing to do with what is written there."
        )
