"""The handle of one attempt to take a lock: what came of it, and the way to give the lock back."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, NoReturn

from django.db import DatabaseError, connections
from django.utils.asyncio import async_unsafe

from . import dedicated, hops, releasing, savepoints, sessions
from .exceptions import AdvisoryLockError, LockLost, LockTimeout
from .notices import logger, names, tell_acquired, tell_busy, tell_lost, tell_released, warn_caller
from .options import refuse_other_transactions
from .owners import current_owner, task_owner
from .single import Take

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from django.db.backends.base.base import BaseDatabaseWrapper
    from typing_extensions import Self

    from .holds import Hold
    from .keys import LockKey
    from .options import Options
    from .owners import Owner
    from .taking import Attempt


class LockHandle:
    """One attempt to take a lock, and the lock itself where it succeeded.

    `bool(handle)` and `acquired` tell how the attempt ended and never change; `is_held()` asks for the present.
    """

    waited = 0.0
    _since = 0.0  # the moment it was acquired, by the clock of this process
    _acquired = False
    _loss_told = False
    _was_asked = False
    _outlasts_block = False
    _longest_pause = 0.25  # seconds between two tries of a task that waits
    _hold: Hold | None = None
    _savepoint: savepoints.BodySavepoint | None = None
    _own_connection: BaseDatabaseWrapper | None = None

    def __init__(
        self,
        keys: tuple[LockKey, ...],
        using: str,
        options: Options,
        attempt: Callable[..., Attempt] = Take,
        kind: type | None = None,
    ) -> None:
        self.key = keys[0]
        self.keys = keys
        self.using = using
        self._options = options
        self._attempt = attempt
        self._kind = kind  # the class of the lock, which sends the signals; nobody hears of what has none

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
        is_meant = hold.is_ending or not hold.noted or releasing.is_inherited(hold)
        if hold.scope == "session" and not is_meant:
            self.lost.set()
        return False

    def check(self) -> None:
        """Raise `LockLost` unless the lock is held now. See `is_held()` for the cost."""
        if not self.is_held():
            was = "is no longer held" if self._acquired else "was never acquired"
            error = LockLost(f"The lock {self.key.name!r} on {self.using!r} {was}.", key=self.key, using=self.using)
            if self.lost.is_set():
                tell_lost(self, error)
            raise error

    @async_unsafe
    def release(self) -> None:
        """Release a session lock, with one statement; a second call sends nothing, and so does a forked child.

        A transaction lock stays until COMMIT or ROLLBACK, whatever is called. A lock that turns out to be gone raises
        `LockLost`; a thread or task that did not take the lock gets `AdvisoryLockError`, and the lock stays. In a
        failed transaction nothing can be sent: that is logged, and the next lock operation on the session frees the
        lock. See https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS.
        """
        if self._hold is not None and self._hold.scope == "session":
            self._finish(current_owner(), raised=False)

    async def ais_held(self) -> bool:
        """See `is_held()`."""
        return await hops.attempt(self.is_held, anywhere=self._options.dedicated)

    async def acheck(self) -> None:
        """See `check()`."""
        await hops.attempt(self.check, anywhere=self._options.dedicated)

    async def arelease(self) -> None:
        """See `release()`. A task that is cancelled meanwhile still releases."""
        owner, hold = task_owner(), self._hold
        if hold is not None and hold.noted and hold.scope == "session":
            await hops.finish(lambda: self._finish(owner, raised=False), anywhere=self._options.dedicated)

    def __enter__(self) -> Self:
        if self._hold is not None and not self._hold.noted:
            raise AdvisoryLockError(f"{self!r}: acquire the lock again.", key=self.key, using=self.using)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_block(exc, current_owner())

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A lock that goes on needs nothing here, and a cancellation while it waits for that would lose it. A coroutine
        # may be closed after its loop: then there is no task, and nothing can be awaited.
        goes_on = self._outlasts_block and exc is None
        if not goes_on and (not isinstance(exc, GeneratorExit) or hops.can_wait()):
            await self._aend_block(exc, task_owner())

    async def _aend_block(self, error: BaseException | None, owner: Owner) -> None:
        if not self._acquired:
            self._end_block(error, owner)  # it sends nothing, so it needs no thread, and warns of the caller's line
        elif not isinstance(error, GeneratorExit) or hops.can_wait():
            await hops.finish(lambda: self._end_block(error, owner), anywhere=self._options.dedicated)

    # The life of an attempt

    def _take(self, owner: Owner) -> Self:
        """Make the attempt."""
        started = time.monotonic()
        try:
            self._send(owner)
            self._tell_outcome(started)
            return self
        except BaseException:
            self._give_up(owner)
            raise
        finally:
            if self._own_connection is not None:
                self._close_own_connection()

    def _send(self, owner: Owner, task_began: float | None = None) -> None:
        """Send what takes the lock; for a task that waits, once."""
        connection = self._connection(for_task=task_began is not None)
        try:
            with connection.cursor() as cursor:
                self._attempt(self.keys, self._options, owner, self._keep, connection, cursor, task_began).run()
        except LockTimeout as error:
            self.waited = error.waited or 0.0
            tell_busy(self, error)
            raise

    def _connection(self, *, for_task: bool) -> BaseDatabaseWrapper:
        if not self._options.dedicated:
            return sessions.connection_for(self.using)
        if self._own_connection is None:
            if not for_task:  # that was looked at in the thread of the task's synchronous code
                self._refuse_other_transactions()
            self._own_connection = dedicated.connect(sessions.connection_for(self.using))
        return self._own_connection

    def _refuse_other_transactions(self) -> None:
        refuse_other_transactions(self.key, self.using, self._options)

    def _close_own_connection(self) -> None:
        """End a dedicated session once it holds nothing."""
        connection, hold = self._own_connection, self._hold
        if connection is not None and (hold is None or not hold.noted):
            self._own_connection = None
            dedicated.close(connection)

    def _enter(self, owner: Owner, lock: object = None, frame: int = 0) -> Self:
        """Make the attempt at the beginning of a block, which its owner remembers where a lock is named."""
        try:
            self._take(owner)
            self._open_block(owner, lock, frame)
            return self
        except BaseException:
            owner.forget_block(lock, self)
            self._give_up(owner)
            raise

    def _try_for_task(self, owner: Owner, started: float, block: tuple[object, int] | None) -> bool:
        """Make the attempt, or one try of it; tell whether that was the last one."""
        try:
            self._send(owner, started)
            is_over = self._acquired or self._options.tries_only
            if is_over:
                self._tell_outcome(started)
                self._close_own_connection()
                if block is not None:
                    self._open_block(owner, *block)
            return is_over
        except BaseException:
            self._give_up(owner)
            raise

    def _open_block(self, owner: Owner, lock: object, frame: int) -> None:
        hold = self._hold
        if hold is not None and hold.in_transaction and hold.scope == "session":
            self._savepoint = savepoints.BodySavepoint(connections[hold.using], hold.session.savepoints)
        if lock is not None:
            owner.enter(lock, frame, self)

    def _tell_outcome(self, started: float) -> None:
        self._since = time.monotonic()
        self.waited = self._since - started
        if self._acquired:
            tell_acquired(self)
        else:
            tell_busy(self)

    def _end_block(self, error: BaseException | None, owner: Owner) -> None:
        try:
            self._leave(error, owner)
        except BaseException:
            self._give_up(owner)
            raise

    def _leave(self, error: BaseException | None, owner: Owner) -> None:
        """End a block. An error of the body stays itself, and gets a note of what went wrong here."""
        if not self._acquired:
            if not self._was_asked:
                self._warn_unasked(error)
            return
        if self._outlasts_block and error is None:
            return
        try:
            self._finish(owner, raised=error is not None)
        except BaseException as own:
            self._give_up(owner)
            if error is None or not isinstance(own, Exception):
                raise
            logger.error("At the end of a block that raised %s: %s", type(error).__name__, own)
            if hasattr(error, "add_note"):  # pragma: no branch - Python 3.10 has only the log
                error.add_note(str(own))

    def _give_up(self, owner: Owner | None = None) -> None:
        """Release a lock in the wake of an interrupt, whose error is already on its way."""
        hold = self._hold
        if hold is not None and hold.noted and hold.scope == "session":
            with contextlib.suppress(Exception):
                self._finish(owner or current_owner(), raised=True)
        self._close_own_connection()

    @property
    def _keeps_something(self) -> bool:
        """Whether there is a lock, or a session of its own, to be given up."""
        return self._own_connection is not None or (self._hold is not None and self._hold.noted)

    def _warn_unasked(self, error: BaseException | None) -> None:
        message = (
            f"The body of `with try_advisory_lock(…)` ran although {self.key.name!r} on {self.using!r} was not"
            f" acquired: say `as lock` and `if lock:`, or use the decorator."
        )
        logger.error("%s", message)
        if error is None:
            warn_caller(message)

    def _require_right(self, hold: Hold, owner: Owner) -> None:
        """Refuse to end a lock that is somebody else's, or from another thread than its connection's."""
        if hold.may_stand and not owner.speaks_for(hold.owner()):
            raise AdvisoryLockError(
                f"The lock {self.key.name!r} on {self.using!r} belongs to another thread or task, and stays. Release it"
                f" where it was acquired.",
                key=self.key,
                using=self.using,
            )
        connection = hold.connection()
        try:
            if connection is not None:
                connection.validate_thread_sharing()
        except DatabaseError as error:
            raise AdvisoryLockError(
                f"The lock {self.key.name!r} on {self.using!r} was taken over the connection of another thread, and"
                f" stays. Leave a block in the ThreadSensitiveContext, or thread, that it was entered in.",
                key=self.key,
                using=self.using,
            ) from error

    def _keep(self, hold: Hold) -> None:
        self._hold = hold
        self._acquired = True
        if hold.scope == "session":
            hold.watch(self, _abandon)
        if self._own_connection is not None:
            dedicated.watch(self._own_connection, self.lost)

    def _finish(self, owner: Owner, *, raised: bool) -> None:
        hold, savepoint = self._hold, self._savepoint
        if hold is None or releasing.is_inherited(hold):
            return
        if hold.noted and hold.scope == "session" and (hold.owner() is not owner or owner.is_task):
            self._require_right(hold, owner)
        self._savepoint = None
        try:
            if hold.scope == "transaction":
                releasing.end_transaction_block(hold)
            elif hold.noted:
                is_early = self._options.scope == "auto" and releasing.commits_later(hold)
                releasing.release(hold, savepoint, raised=raised)
                tell_released(self)
                if is_early and not raised:
                    warn_caller(
                        f"The lock {self.key.name!r} on {self.using!r} is freed before the transaction inside it"
                        f" commits: end the transaction first, or take the lock in it."
                    )
        except LockLost as error:
            tell_lost(self, error)
            raise
        finally:
            if self._own_connection is not None:
                self._close_own_connection()


def _abandon(hold: Hold) -> None:
    """Note a session lock whose handle was dropped, so that nobody can release it. Runs anywhere: it only appends.

    No finaliser of the handle: it would run for every lock, and Python discards what a signal handler raises in one.
    """
    if hold.noted and not releasing.is_inherited(hold) and not sys.is_finalizing():
        hold.session.abandoned.append(hold)
        hold.session.unpin(hold)
        lock = f"{names(hold.keys)} on {hold.using!r}"
        warnings.warn(f"The handle of the lock {lock} was dropped without release().", ResourceWarning, stacklevel=2)
