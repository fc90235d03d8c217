"""When the server notices that a client is gone, and frees its locks.

https://www.postgresql.org/docs/current/runtime-config-connection.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .findings import Finding

if TYPE_CHECKING:
    from .findings import FindingId
    from .server import Server

SLOW_KEEPALIVES = 300  # seconds


def probe_keepalives(server: Server) -> Finding:
    if not server.state.is_remote:
        return Finding("keepalives", "ok", "The connection is a unix socket: no link can be cut unnoticed.")
    probes = server.number("tcp_keepalives_interval") * server.number("tcp_keepalives_count")
    seconds = server.number("tcp_keepalives_idle") + probes
    if seconds and seconds <= SLOW_KEEPALIVES:
        return Finding("keepalives", "ok", f"The server notices a cut link after {seconds} s.")
    return Finding(
        "keepalives",
        "note",
        f"The server notices a cut link after {seconds:,} s." if seconds else "The server sends no keepalives.",
        "Until then it keeps the lock of a holder that is gone. Locks with dedicated=True set this for themselves.",
        "Set tcp_keepalives_idle, _interval and _count for the role, or in OPTIONS of the alias, together with those of"
        " the client: see docs/poolers.md#what-ends-a-session.",
    )


def probe_connection_check(server: Server) -> Finding:
    name: FindingId = "client_connection_check_interval"
    if server.number(name):
        return Finding(name, "ok", f"{server.told(name)}.")
    return Finding(
        name,
        "note",
        f"{name} is off.",
        "The lock of a process that was killed stays until the statement ends that it had sent.",
        f"Set {name} to a second or so.",
    )
