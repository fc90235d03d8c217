"""A dedicated lock that lives on in what was started under it, where this process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from ..exceptions import LockLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..handles import LockHandle
    from ..transactions import RawConnection

HIGH = 100  # the lowest descriptor for what is inherited: shell scripts choose low ones for files of their own


@contextlib.contextmanager
def bequeath(handle: LockHandle) -> Iterator[None]:
    """Let the processes that are started in a block inherit the session of a dedicated lock.

    They have no use for it. But where this process is killed, the kernel closes a socket only when its last owner ends,
    and so the server keeps the lock for as long as they run. `LockLost` where the session has ended already.
    """
    raw: RawConnection = handle._own_connection.connection  # type: ignore[union-attr]
    with raw.lock:  # the watcher may be closing it
        if raw.closed:
            message = f"The lock {handle.key.name!r} on {handle.using!r} was lost: its session has ended."
            raise LockLost(message, key=handle.key, using=handle.using)
        copy = fcntl.fcntl(raw.fileno(), fcntl.F_DUPFD, HIGH)
    try:
        yield
    finally:
        os.close(copy)
