"""PostgreSQL advisory locks for Django: only one process at a time runs this."""

from .exceptions import (
    AdvisoryLockError,
    LockDeadlock,
    LockLost,
    LockNotAcquired,
    LockTableFull,
    LockTimeout,
    LockUnsupported,
    PoolerDetected,
)
from .guards.command import AdvisoryLockCommandMixin
from .guards.job import AdvisoryLockJobMixin
from .guards.periodic import periodic_lock
from .guards.view import AdvisoryLockViewMixin, lock_view
from .handles import LockHandle
from .keys import KeyLike, LockKey, crc32_key, lock_key, model_key
from .locks import AdvisoryLock, TryAdvisoryLock, advisory_lock, advisory_lock_all, try_advisory_lock
from .semaphores import advisory_semaphore, try_advisory_semaphore

__all__ = [
    "AdvisoryLock",
    "AdvisoryLockCommandMixin",
    "AdvisoryLockError",
    "AdvisoryLockJobMixin",
    "AdvisoryLockViewMixin",
    "KeyLike",
    "LockDeadlock",
    "LockHandle",
    "LockKey",
    "LockLost",
    "LockNotAcquired",
    "LockTableFull",
    "LockTimeout",
    "LockUnsupported",
    "PoolerDetected",
    "TryAdvisoryLock",
    "advisory_lock",
    "advisory_lock_all",
    "advisory_semaphore",
    "crc32_key",
    "lock_key",
    "lock_view",
    "model_key",
    "periodic_lock",
    "try_advisory_lock",
    "try_advisory_semaphore",
]
