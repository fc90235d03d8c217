"""Signals that tell what becomes of locks, for metrics and alerts.

Each is sent with the class of the lock as its sender (`AdvisoryLock`, `TryAdvisoryLock` and their relatives), and with
`key`, `using`, `scope` and `handle`, in the thread that the lock is taken or released in. What a receiver raises is
logged by Django and goes no further. See https://docs.djangoproject.com/en/stable/topics/signals/.
"""

from __future__ import annotations

from django.dispatch import Signal

#: A lock was acquired: + `waited`, in seconds.
lock_acquired = Signal()
#: A session lock was released: + `held_for`, in seconds. Of the end of a transaction, and its locks, nobody is told.
lock_released = Signal()
#: A lock was busy: + `error`, a `LockTimeout`, and `holders`, the rows of `inspection.KeyLock` in the way; both are
#: None after a failed try, which asks for no more than the lock.
lock_busy = Signal()
#: A lock turned out to be lost: + `error`, a `LockLost`. Sent once for each handle.
lock_lost = Signal()
