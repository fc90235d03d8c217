"""The environment of a command, as if it were started without this process."""

from __future__ import annotations

import os
from pathlib import Path

from django.conf import settings

AT_START = Path("/proc/self/environ")  # what this process was started with, on Linux


def environment() -> dict[bytes, bytes]:
    """Return the environment of this process, without the TZ that Django puts there for itself.

    A command would write its dates in the time zone of the settings: another day than that of the machine.
    See https://docs.djangoproject.com/en/stable/ref/settings/#time-zone.
    """
    found = dict(os.environb)
    if found.get(b"TZ") != os.fsencode(settings.TIME_ZONE or ""):
        return found
    try:
        entries = AT_START.read_bytes().split(b"\0")
    except OSError:
        return found  # nobody knows what it was
    del found[b"TZ"]
    found.update((b"TZ", entry[3:]) for entry in entries if entry.startswith(b"TZ="))
    return found
