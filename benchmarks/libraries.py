"""Which libraries are there to be compared."""

from __future__ import annotations

from importlib.util import find_spec

from .alchemy import dlock
from .peers import Peer, ours, pglock, pgware, wrapper


def libraries() -> list[Peer]:
    """Return this library and those of its peers that are installed."""
    peers = {"pglock": pglock, "django_pg_utils": pgware, "sqlalchemy_dlock": dlock}
    return [ours(), *(make() for module, make in peers.items() if find_spec(module)), wrapper()]
