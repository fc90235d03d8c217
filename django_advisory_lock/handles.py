"""The handle of one attempt to take a lock: what came of it, and the way to give the lock back."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, NoReturn

from django.db import connections

from . import conf, releasing, transactions
from .exceptions import AdvisoryLockError, LockLost
from .notices import logger, warn_caller
from .owners import current_owner
from .taking import take

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from .keys import LockKey
    from .options import Options
    from .owners import Owner
    from .sessions import Hold


MOMENT = 0.01  # seconds; a shorter wait is never a slow one


class LockHandle:
    """One attempt to take a lock, and the lock itself where it succeeded.

    `bool(handle)` and `acquired` tell how the attempt ended and never change; `is_held()` asks for the present.
    """

    _hold: Hold | None = None

    def __init__(self, key: LockKey, using: str, options: Options) -> None:
        self.key = key
        self.using = using
        self.waited = 0.0
        self._options = options
        self._acquired = False
        self._was_asked = False
        self._savepoint: transactions.BodySavepoint | None = None

    def __repr__(self) -> str:
        is_over = self._hold is not None and not self._hold.noted
        outcome = "not acquired" if not self._acquired else "over" if is_over else "acquired"
        return f"<{type(self).__name__} {self.key.name!r} on {self.using!r}: {outcome}>"

    def __bool__(self) -> bool:
        return self.acquired

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # A copy that is dropped would free the lock of the original.
        raise TypeError(f"{self!r} cannot be copied or pickled: it is one attempt of this process.")

    @property
    def acquired(self) -> bool:
        """Whether the attempt succeeded. Stays True after the release, and after a loss."""
        self._was_asked = True
        return self._acquired

    @property
    def scope(self) -> str:
        """What the lock lasts for, `"session"` or `"transaction"`; where it was not acquired, what was asked for."""
        return self._options.scope if self._hold is None else self._hold.scope

    @property
    def lost(self) -> threading.Event:
        """An event that is set once the loss of the lock is known."""
        # One step, so that two threads that ask at once get the same event.
        event: threading.Event = self.__dict__.setdefault("_lost", threading.Event())
        return event

    def is_held(self) -> bool:
        """Ask the server whether the lock is held now, with one query on `pg_locks`.

        Its cost grows with the locks of the whole server, so keep it out of tight loops. In a failed transaction the
        server answers nothing: a session lock counts as held while its session is open, a transaction lock does not.
        See https://www.postgresql.org/docs/current/view-pg-locks.html.
        """
        self._was_asked = True
        hold = self._hold
        if hold is None or releasing.is_held(hold):
            return hold is not None
        if hold.noted and hold.scope == "session" and not releasing.is_inherited(hold):
            self.lost.set()
        return False

    def check(self) -> None:
        """Raise `LockLost` unless the lock is held now. See `is_held()` for the cost."""
        if not self.is_held():
            was = "is no longer held" if self._acquired else "was never acquired"
            raise LockLost(f"The lock {self.key.name!r} on {self.using!r} {was}.", key=self.key, using=self.using)

    def release(self) -> None:
        """Release a session lock, with one statement; a second call sends nothing, and so does a forked child.

        A transaction lock stays until COMMIT or ROLLBACK, whatever is called. A lock that turns out to be gone raises
        `LockLost`; a thread or task that did not take the lock gets `AdvisoryLockError`, and the lock stays. In a
        failed transaction nothing can be sent: that is logged, and the next lock operation on the session frees the
        lock. See https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS.
        """
        if self._hold is not None and self._hold.scope == "session":
            self._finish(current_owner(), raised=False)

    def __del__(self) -> None:
        """Note a session lock that nobody can release any more. Runs in any thread, so nothing is sent from here."""
        hold = self._hold
        if hold is None or not hold.noted or hold.scope == "transaction":
            return
        if releasing.is_inherited(hold) or sys.is_finalizing():
            return
        hold.session.abandoned.append(hold)
        hold.session.unpin(hold)
        warnings.warn(f"{self!r} was dropped without release().", ResourceWarning, stacklevel=2, source=self)

    def __enter__(self) -> Self:
        if self._hold is not None and not self._hold.noted:
            raise AdvisoryLockError(f"{self!r}: acquire the lock again.", key=self.key, using=self.using)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._leave(exc, current_owner())
        except BaseException:
            self._give_up()
            raise

    # The life of an attempt

    def _take(self, owner: Owner) -> Self:
        """Make the attempt."""
        started = time.monotonic()
        try:
            take(self.key, self.using, self._options, owner, self._keep)
            self.waited = time.monotonic() - started
            if not self._acquired:
                logger.info("The lock %r on %r is busy.", self.key.name, self.using)
            elif self.waited > MOMENT and self.waited >= conf.get_slow_wait():
                logger.warning("Waited %.1f s for the lock %r on %r.", self.waited, self.key.name, self.using)
            return self
        except BaseException:
            self._give_up()
            raise

    def _enter(self, owner: Owner, lock: object = None, frame: int = 0) -> Self:
        """Make the attempt at the beginning of a block, which its owner remembers where a lock is named."""
        try:
            self._take(owner)
            hold = self._hold
            if hold is not None and hold.in_transaction and hold.scope == "session":
                self._savepoint = transactions.BodySavepoint(connections[hold.using], hold.session.savepoints)
            if lock is not None:
                owner.entered.append((lock, frame, self))
            return self
        except BaseException:
            self._give_up()
            raise

    def _leave(self, error: BaseException | None, owner: Owner) -> None:
        """End a block. An error of the body stays itself, and gets a note of what went wrong here."""
        if not self._acquired:
            if not self._was_asked:
                self._warn_unasked(error)
            return
        try:
            self._finish(owner, raised=error is not None)
        except BaseException as own:
            self._give_up()
            if error is None or not isinstance(own, Exception):
                raise
            logger.error("At the end of a block that raised %s: %s", type(error).__name__, own)
            if hasattr(error, "add_note"):  # pragma: no branch - Python 3.10 has only the log
                error.add_note(str(own))

    def _give_up(self) -> None:
        """Release a lock in the wake of an interrupt, whose error is already on its way."""
        hold = self._hold
        if hold is not None and hold.noted and hold.scope == "session":
            with contextlib.suppress(Exception):
                self._finish(current_owner(), raised=True)

    def _warn_unasked(self, error: BaseException | None) -> None:
        message = (
            f"The body of `with try_advisory_lock(…)` ran although {self.key.name!r} on {self.using!r} was not"
            f" acquired: say `as lock` and `if lock:`, or use the decorator."
        )
        logger.error("%s", message)
        if error is None:
            warn_caller(message)

    def _keep(self, hold: Hold) -> None:
        self._hold = hold
        self._acquired = True

    def _finish(self, owner: Owner, *, raised: bool) -> None:
        hold, savepoint = self._hold, self._savepoint
        if hold is None or releasing.is_inherited(hold):
            return
        if hold.noted and hold.scope == "session" and hold.owner() not in (owner, None):
            raise AdvisoryLockError(
                f"The lock {self.key.name!r} on {self.using!r} belongs to another thread or task, and stays. Release it"
                f" where it was acquired.",
                key=self.key,
                using=self.using,
            )
        self._savepoint = None
        try:
            if hold.scope == "transaction":
                releasing.end_transaction_block(hold)
            else:
                releasing.release(hold, savepoint, raised=raised)
        except LockLost:
            self.lost.set()
            raise
