"""The timeouts of the server that would end a holder, or a wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .findings import FindingId, Severity
    from .server import Server


class Timeout(NamedTuple):
    """What it means for locks that a timeout is set."""

    name: FindingId
    severity: Severity
    meaning: str
    advice: str


IDLE_SESSION = Timeout(
    "idle_session_timeout",
    "warning",
    "A session that holds a lock while the work goes on elsewhere is idle: it is ended, and the next one is let in."
    " The holder learns it at the end of its block. Locks with dedicated=True switch this off for themselves.",
    'Switch it off for the alias of the locks, with OPTIONS = {"options": "-c idle_session_timeout=0"} or for the'
    " role, or lock with dedicated=True.",
)
TIMEOUTS = (
    IDLE_SESSION,
    Timeout(
        "idle_in_transaction_session_timeout",
        "note",
        "A transaction that stands still for longer is ended, and with it the locks that were taken in it.",
        "Do no slow work between the statements of a transaction that holds a lock.",
    ),
    Timeout(
        "transaction_timeout",
        "note",
        "A transaction that takes longer is ended with its session, and with it the locks that were taken in it.",
        "Let long work take its lock outside the transaction.",
    ),
    Timeout(
        "statement_timeout",
        "note",
        "A wait that takes longer, also one without a timeout of its own, ends with LockNotAcquired.",
        "Pass a shorter timeout, so that it ends with LockTimeout, which names the holder; or wait with poll_interval.",
    ),
    Timeout(
        "lock_timeout",
        "note",
        "It is not about waits for advisory locks, which set their own. Statements of the body that wait for a row or a"
        " table end with an error.",
        "",
    ),
)


def probe_timeouts(server: Server, timeouts: tuple[Timeout, ...] = TIMEOUTS) -> Iterator[Finding]:
    """Judge the timeouts that this server has."""
    for name, severity, meaning, advice in timeouts:
        if server.number(name):
            yield Finding(name, severity, f"{server.told(name)}.", meaning, advice)
        elif name in server.settings:
            yield Finding(name, "ok", f"{name} is off.")
