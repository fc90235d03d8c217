"""A Celery application for real workers, with a broker that is a directory."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import kombu.transport
from celery import Celery, Task, shared_task, signals
from kombu.transport import filesystem
from kombu.utils.json import dumps

from django_advisory_lock import AdvisoryLockJobMixin, LockTimeout, advisory_lock, try_advisory_lock
from tests.support import LIMIT, value, wait_until


class Channel(filesystem.Channel):
    """A message appears as a whole: the broker of kombu creates a file and fills it while others may take it."""

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:  # type: ignore[override]
        path = Path(self.data_folder_out, f"{time.monotonic_ns():020}_{os.getpid()}.{queue}.msg")
        path.with_suffix(".new").write_text(dumps(payload))
        path.with_suffix(".new").rename(path)


class Transport(filesystem.Transport):
    Channel = Channel


kombu.transport.TRANSPORT_ALIASES["filesystem"] = f"{__name__}:Transport"
app = Celery("tests", broker="filesystem://")
app.conf.update(
    task_ignore_result=True,
    task_acks_on_failure_or_timeout=True,
    worker_prefetch_multiplier=1,
    worker_lost_wait=0.1,  # seconds until a killed child is given up, instead of 10
    worker_enable_remote_control=False,
    worker_hijack_root_logger=True,
    broker_connection_retry_on_startup=True,
)
if "CELERY_TESTS_REUSE" in os.environ:
    app.conf.update(CELERY_DB_REUSE_MAX=1000)


def use_folder(folder: str) -> None:
    """Let the broker, and what tasks tell, live in a directory."""
    os.environ["CELERY_TESTS"] = folder
    messages = f"{folder}/messages"
    app.conf.broker_transport_options = {
        "data_folder_in": messages,
        "data_folder_out": messages,
        "control_folder": f"{folder}/control",
        "processed_folder": f"{folder}/processed",
        "store_processed": True,
        "polling_interval": 0.01,
    }


if "CELERY_TESTS" in os.environ:
    use_folder(os.environ["CELERY_TESTS"])


def tell(event: str, **facts: Any) -> None:
    """Tell the test what happened, in one write."""
    with open(f"{os.environ['CELERY_TESTS']}/events", "ab", buffering=0) as events:
        events.write(json.dumps({"event": event, "pid": os.getpid(), **facts}).encode() + b"\n")


@signals.worker_ready.connect
def _ready(**kwargs: Any) -> None:
    tell("ready")


@signals.worker_shutting_down.connect
def _ending(**kwargs: Any) -> None:
    tell("ending")


@signals.task_postrun.connect
def _over(task_id: str, task: Any, retval: Any, state: str, args: Any, **kwargs: Any) -> None:
    if "CELERY_TESTS" in os.environ:
        tell("over", id=task_id, task=task.name, label=args[0] if args else None, state=state, returned=repr(retval))


def body(label: str) -> str:
    """Tell when it begins, and end when it may."""
    tell("begun", label=label, backend=value("SELECT pg_backend_pid()"))
    go = Path(os.environ["CELERY_TESTS"], f"go-{label}")
    wait_until(go.exists, f"{label} may end")
    tell("ended", label=label)
    if label.startswith("fails"):
        raise ZeroDivisionError(label)
    return "done"


class Locked(AdvisoryLockJobMixin, Task):
    """For tasks that are functions."""


class Work(Locked):
    """A task that is a class."""

    def run(self, label: str) -> str:
        return body(label)


work = app.register_task(Work())


@shared_task(base=Locked, lock_key="static", lock_using="persistent")
def static(label: str) -> str:
    return body(label)


@shared_task(base=Locked, bind=True)
def bound(self: Any, label: str) -> str:
    return f"{body(label)} {self.name}"


# The worker puts the message back at once, and the server may see the end of the killed child a moment later.
@shared_task(base=Locked, acks_late=True, reject_on_worker_lost=True, lock_timeout=LIMIT)
def late(label: str) -> str:
    return body(label)


@shared_task
@try_advisory_lock("decorated", default="skipped")
def decorated(label: str) -> str:
    return body(label)


@shared_task(autoretry_for=(LockTimeout,), max_retries=1000, retry_kwargs={"countdown": 0.02})
@advisory_lock("automatic", timeout=0)
def automatic(label: str) -> str:
    return body(label)


class Patient(AdvisoryLockJobMixin, Task):
    """A task that comes back later where the lock is busy."""

    max_retries = 1000

    def run(self, label: str) -> str:
        return body(label)

    def handle_lock_busy(self, error: LockTimeout, /, *args: Any, **kwargs: Any) -> Any:
        raise self.retry(exc=error, countdown=0.02)


patient = app.register_task(Patient())


class Brief(Patient):
    """A task that gives up soon."""

    max_retries = 2


brief = app.register_task(Brief())


@shared_task
def unlocked(label: str) -> str:
    """The control."""
    return body(label)


def main(arguments: list[str]) -> None:
    """Be a worker: in a process group of its own, so that all of it can be killed, and not for ever."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGALRM, lambda *args: os.killpg(0, signal.SIGKILL))
    signal.alarm(int(6 * LIMIT))
    app.worker_main(arguments)
