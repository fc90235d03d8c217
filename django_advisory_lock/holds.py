"""One lock that is held, or several that were taken at once, as this process knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from weakref import ref

from .transactions import is_idle, transaction_marker

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper

    from .handles import LockHandle
    from .keys import LockKey
    from .owners import Owner
    from .sessions import Session

HeldScope = Literal["session", "transaction"]


def _nobody() -> None:
    return None


# Kept here, so that a reference outlives what it watches: of all that is collected at once, none calls back.
_handles: dict[int, ref[LockHandle]] = {}


def open_handles() -> list[LockHandle]:
    """Return the handles of the session locks that this process holds, or has lost unawares."""
    found = (find() for find in list(_handles.values()))
    return [handle for handle in found if handle is not None]


class Hold:
    """What one owner took on one session at once: one lock, or several."""

    def __init__(
        self,
        session: Session,
        connection: BaseDatabaseWrapper,
        owner: Owner,
        keys: tuple[LockKey, ...],
        shared: bool,
        scope: HeldScope,
        pid: int,
        in_transaction: bool,
    ) -> None:
        self.session = session
        self.connection = ref(connection)
        self.using = connection.alias
        self.owner: Callable[[], Owner | None] = ref(owner)
        self.keys = keys
        self.shared = shared
        self.scope = scope
        self.pid = pid
        self.marker = transaction_marker(connection) if scope == "transaction" else None
        self.in_transaction = in_transaction
        self.start = session._transaction_start if scope == "transaction" else None
        self.noted = False
        self.is_ending = False  # its release has begun: who asks from another thread may find it gone already

    def watch(self, handle: LockHandle, dropped: Callable[[Hold], None]) -> None:
        """Call back when the handle is collected as garbage while the lock is held; runs anywhere."""

        def call_back(_: object) -> None:
            self.unwatch()
            dropped(self)

        _handles[id(self)] = ref(handle, call_back)

    def unwatch(self) -> None:
        """Let the handle go."""
        _handles.pop(id(self), None)

    def disclaim(self) -> None:
        """Belong to nobody any more: none may nest in the lock, and whoever has its handle may end it."""
        with self.session.mutex:
            owner = self.owner()
            if owner is not None:
                owner.forget(self)
            self.owner = _nobody

    @property
    def is_dedicated(self) -> bool:
        """Whether the session is this lock's own."""
        return getattr(self.connection(), "is_dedicated", False)

    @property
    def is_certain(self) -> bool:
        """Whether the lock stands without asking: a transaction lock may be gone once its transaction's marker is."""
        if not self.noted or self.scope == "session":
            return self.noted
        connection = self.connection()
        return connection is not None and self.marker is transaction_marker(connection)

    @property
    def may_stand(self) -> bool:
        """Whether the lock may still be there, for all that can be told without asking."""
        raw = self.session.raw()
        return self.noted and raw is not None and not raw.closed and (self.scope == "session" or not is_idle(raw))
