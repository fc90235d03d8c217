"""Who may nest and release a lock: one owner a thread, or a task where synchronous code runs under `sync_to_async`.

One database session grants itself everything, so it is this process that has to keep its threads and tasks apart.
Owners are objects, compared by identity and held weakly by the locks: an ident is given to the next thread once its
thread ended.
"""

from __future__ import annotations

import contextvars
import threading
from typing import TYPE_CHECKING
from weakref import WeakSet

from asgiref.sync import SyncToAsync

if TYPE_CHECKING:
    from .handles import LockHandle
    from .sessions import Hold


class Owner:
    """A thread or a task, as far as its locks go."""

    def __init__(self) -> None:
        self.entered: list[tuple[object, int, LockHandle]] = []
        self.holds: WeakSet[Hold] = WeakSet()

    def leave(self, lock: object, frame: int) -> LockHandle | None:
        """Return the handle of the `with` block of a lock that ends, or None where this owner has entered none.

        Generators may end the blocks of one lock in any order: its own frame tells which is meant. Where an ExitStack
        stands in between, it is the innermost.
        """
        if self.entered and self.entered[-1][0] is lock and self.entered[-1][1] == frame:
            return self.entered.pop()[2]
        blocks = [index for index, (entered, *_) in enumerate(self.entered) if entered is lock]
        for index in reversed(blocks):
            if self.entered[index][1] == frame:
                return self.entered.pop(index)[2]
        return self.entered.pop(blocks[-1])[2] if blocks else None

    @property
    def is_vacant(self) -> bool:
        """Whether the owner is in no block and holds nothing, so that nothing is lost if another takes its place."""
        return not self.entered and not any(hold.may_stand for hold in self.holds)


class _ThreadOwner(threading.local):
    def __init__(self) -> None:
        self.owner = Owner()


_thread = _ThreadOwner()
_asgiref_thread = getattr(SyncToAsync, "threadlocal", None)
_task: contextvars.ContextVar[Owner] = contextvars.ContextVar("django_advisory_lock_owner")


def current_owner() -> Owner:
    """Return the owner that the calling code acts for."""
    # Under sync_to_async tasks share the thread, so the thread says nothing. asgiref notes the loop on its threads, and
    # in a main thread the note outlives async_to_sync(): hence the second question.
    loop = getattr(_asgiref_thread, "main_event_loop", None)
    return _thread.owner if loop is None or not loop.is_running() else _task_owner()


def _task_owner() -> Owner:
    # asgiref runs the call in a copy of the task's context and carries changes back into the task. A task started by
    # another one inherits its owner too: only an owner that holds something is kept, so that siblings never share one.
    owner = _task.get(None)
    if owner is None or owner.is_vacant:
        owner = Owner()
        _task.set(owner)
    return owner
