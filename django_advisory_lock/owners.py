"""Who may nest and release a lock: one owner a thread, or a task where synchronous code runs under `sync_to_async`.

One database session grants itself everything, so it is this process that has to keep its threads and tasks apart.
Owners are objects, compared by identity and held weakly by the locks: an ident is given to the next thread once its
thread ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from asgiref.sync import SyncToAsync

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .handles import LockHandle
    from .holds import Hold
    from .keys import LockKey


class Owner:
    """A thread or a task, as far as its locks go."""

    def __init__(self, is_task: bool = False, task: asyncio.Task[Any] | None = None) -> None:
        # Not bound to one thread then, so that its locks may be on the connections of several.
        self.is_task = is_task
        self.entered: dict[object, list[tuple[int, LockHandle]]] = {}
        self.holds: dict[tuple[int, ...], list[ReferenceType[Hold]]] = {}
        # Known where asynchronous code took a lock; synchronous code under sync_to_async cannot tell its task.
        self.task: ReferenceType[asyncio.Task[Any]] | None = None if task is None else ref(task)
        # Who the context belonged to when this task came into it.
        self.around: ReferenceType[Owner] | None = None
        # Who the synchronous code of this task, or of its parent, was, and what it still holds by hand.
        self.before: Owner | None = None

    def speaks_for(self, owner: Owner | None) -> bool:
        """Whether this owner may release what the other one took, if that one is left at all."""
        return owner is None or owner is self or owner is self.before or owner.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether this is a task that is over, which releases nothing any more."""
        task = None if self.task is None else self.task()
        return self.task is not None and (task is None or task.done())

    def note(self, hold: Hold) -> None:
        """Keep, weakly, what was taken: with its connection it is gone."""
        for key in hold.keys:
            self.holds.setdefault(key.args, []).append(ref(hold))

    def forget(self, hold: Hold) -> None:
        """Forget what was released or lost."""
        for key in hold.keys:
            left = [one for one in self.holds.pop(key.args, ()) if one() not in (None, hold)]
            if left:
                self.holds[key.args] = left

    def on(self, keys: Sequence[LockKey]) -> Iterator[Hold]:
        """Yield what this owner holds on some keys, on any session."""
        if self.holds:
            for key in keys:
                for one in self.holds.get(key.args, ()):
                    hold = one()
                    if hold is not None:
                        yield hold

    def enter(self, lock: object, frame: int, handle: LockHandle) -> None:
        """Remember a block that is entered."""
        self.entered.setdefault(lock, []).append((frame, handle))

    def block_of(self, lock: object, frame: int) -> LockHandle | None:
        """Return the handle of the `with` block of a lock that ends, or None where this owner has entered none.

        Generators may end the blocks of one lock in any order: its own frame tells which is meant. Where an ExitStack
        stands in between, it is the innermost. Not forgotten with that: after an interrupt it is looked for again.
        """
        blocks = self.entered.get(lock)
        if blocks is None:
            return None if self.before is None else self.before.block_of(lock, frame)
        if len(blocks) == 1:
            return blocks[0][1]
        return next((handle for entered, handle in reversed(blocks) if entered == frame), blocks[-1][1])

    def forget_block(self, lock: object, handle: LockHandle) -> None:
        """Forget a block that ends, or that was granted and never begun. After an interrupt it can be called again."""
        blocks = self.entered.get(lock)
        if blocks is None:
            if self.before is not None:
                self.before.forget_block(lock, handle)
            return
        left = [block for block in blocks if block[1] is not handle]
        if left:
            self.entered[lock] = left
        else:
            del self.entered[lock]

    @property
    def is_vacant(self) -> bool:
        """Whether the owner is in no block and holds nothing, so that nothing is lost if another takes its place."""
        return self.holds_nothing and (self.before is None or self.before.is_vacant)

    @property
    def holds_nothing(self) -> bool:
        """The same, whatever the one before holds."""
        holds = (one() for ones in list(self.holds.values()) for one in ones)
        return not self.entered and not any(hold is not None and hold.may_stand for hold in holds)


class _ThreadOwner(threading.local):
    def __init__(self) -> None:
        self.owner = Owner()


_thread = _ThreadOwner()
_asgiref_thread = getattr(SyncToAsync, "threadlocal", None)
# Tasks keep their owners. Their contexts do not: tasks may share one, and async_to_sync() under sync_to_async() brings
# that of another task back.
_owners: WeakKeyDictionary[asyncio.Task[Any], Owner] = WeakKeyDictionary()
_task: contextvars.ContextVar[Owner] = contextvars.ContextVar("django_advisory_lock_owner")


def current_owner() -> Owner:
    """Return the owner that the calling code acts for."""
    # Under sync_to_async tasks share the thread, so the thread says nothing. asgiref notes the loop on its threads, and
    # in a main thread the note outlives async_to_sync(): hence the second question.
    loop = getattr(_asgiref_thread, "main_event_loop", None)
    return _thread.owner if loop is None or not loop.is_running() else _owner_under_sync_to_async()


def task_owner() -> Owner:
    """Return the owner of the current task, for asynchronous code; its synchronous code then acts for the same one."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("Asynchronous locks are for tasks, and this code runs in none.")
    owner, before = _owners.get(task), _task.get(None)
    if owner is None:
        owner = _owners[task] = Owner(True, task)
        owner.around = None if before is None else ref(before)
    if before is not owner:
        # Not the parent's, nor what its synchronous code holds: a task never walks into another one's lock.
        if before is not None and before.task is None and not before.is_vacant:
            owner.before = before
        _task.set(owner)
    return owner


def owner_in(lock: object, frame: int) -> Owner | None:
    """Return the task that entered a block: a generator left half way is closed by its loop, in another task."""
    for find_task in _owners.keyrefs():  # a list made in one step: other loops add tasks meanwhile
        task = find_task()
        owner = None if task is None else _owners.get(task)
        if owner is not None and any(entered == frame for entered, _ in owner.entered.get(lock, ())):
            return owner
    return None


def _owner_under_sync_to_async() -> Owner:
    # asgiref runs the call in a copy of the task's context and carries changes back into the task. A task started by
    # another one inherits its owner too: only an owner that holds something is kept, so that siblings never share one.
    owner = _task.get(None)
    while owner is not None and owner.has_ended and owner.is_vacant:
        owner = None if owner.around is None else owner.around()
    # Where its asynchronous code holds nothing any more, it is again who it was before.
    while owner is not None and owner.before is not None and owner.holds_nothing:
        owner = owner.before
    if owner is None or owner.is_vacant:
        owner = Owner(is_task=True)
    _task.set(owner)
    return owner
