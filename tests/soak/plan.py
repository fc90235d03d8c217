"""What a run consists of: the ways to the database, the kinds of work, and where the witness writes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "SOAK_PLAN"

# The aliases. All lead to one database, so that a key excludes on all of them.
DIRECT, KEPT, PROXIED, POOLED, SHORT = "default", "kept", "proxied", "pooled", "short"
BY_SESSION, BY_TRANSACTION = "by_session", "by_transaction"  # through PgBouncer
ROUTES = (DIRECT, KEPT, PROXIED, POOLED, SHORT, BY_SESSION)
IDLE_TIMEOUT = 0.25  # seconds, on SHORT

KEYS = tuple(f"soak-{number}" for number in range(6))
SEMAPHORES = {"soak-two": 2, "soak-three": 3}

# What is run in the place of a lock to show that the witness would notice.
NOTHING = "takes nothing"
DEAF = "hides losses"


@dataclass(frozen=True)
class Plan:
    """What every process of a run is told."""

    directory: str  # of the journals and of the witness's files
    databases: dict[str, Any]
    witness: dict[str, Any]  # how to reach the server of the witness
    table: str
    seed: int
    threads: int = 3
    tasks: int = 4
    control: str = ""

    @property
    def path(self) -> Path:
        return Path(self.directory, "plan.json")

    def write(self) -> None:
        self.path.write_text(json.dumps(asdict(self)))

    def set_end(self, end: float) -> None:
        """Let all begin, and work until then by `time.monotonic()`, which is one clock for all processes."""
        made = self.path.with_name("end.new")
        made.write_text(str(end))
        made.rename(self.path.with_name("end"))

    def wait_for_end(self) -> float:
        """Return when the run ends, once all may begin."""
        while not (path := self.path.with_name("end")).exists():
            time.sleep(0.01)
        return float(path.read_text())


def read() -> Plan:
    return Plan(**json.loads(Path(os.environ[VARIABLE]).read_text()))
