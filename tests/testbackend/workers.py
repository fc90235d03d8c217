"""What processes do that import their work: `multiprocessing` by spawn and forkserver, process pools."""

from __future__ import annotations

import os
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from django.db import connections

from django_advisory_lock import AdvisoryLock, LockHandle, advisory_lock, try_advisory_lock

module_level = advisory_lock("tests-workers", timeout=30)


def close_connections() -> None:
    """Initialize a worker as many projects do."""
    connections.close_all()


def is_taken(name: str) -> bool:
    """Try a lock, and hold it for no longer than this call."""
    with try_advisory_lock(name) as lock:
        return not lock


def time_out(name: str) -> LockHandle:
    """Raise an error that has to travel to another process."""
    return advisory_lock(name, timeout=0).acquire()


def count(path: str) -> None:
    """Read a number, pause, and write the next one: two at once lose one of the two."""
    number = int(Path(path).read_text() or 0)
    time.sleep(0.002)
    Path(path).with_suffix(f".{os.getpid()}").write_text(str(number + 1))
    Path(path).with_suffix(f".{os.getpid()}").replace(path)


def count_under(lock: AdvisoryLock, path: str) -> None:
    """Count under a lock that was passed to this process."""
    with lock:
        count(path)


@module_level
def count_under_module_level(path: str) -> None:
    """Count under a lock that every process has by its import."""
    count(path)


def put_is_taken(queue: SimpleQueue[bool], name: str) -> None:
    """Answer through a queue, as a plain process does."""
    queue.put(is_taken(name))
