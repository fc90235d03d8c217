"""Many processes at work under faults, watched by a witness that does not rely on the locks.

`make soak` runs it for SECONDS; see docs/proof.md. Set SOAK_KEEP to a directory to keep the journals there.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from tests.soak import plan, report
from tests.soak.faults import DECK, Faults
from tests.soak.records import read
from tests.soak.site import Site, new_site
from tests.soak.verdict import Verdict, judge
from tests.support import OtherSession, wait_until

SECONDS = float(os.environ.get("SOAK_SECONDS", "40"))
SEED = int(os.environ.get("SOAK_SEED") or random.randrange(1 << 30))
CONTROL_SECONDS = 8.0
LAST = 3.0  # seconds without faults
WORKERS = 4

# Also slow: for one that deselects what is slow, and so says nothing of this.
pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(SECONDS + 300)]


def run(seconds: float, deck: dict[str, int], control: str = "", pause: float = 0.5) -> Verdict:
    """Let workers work under faults, until they end by themselves and have left nothing."""
    print(f"seed {SEED}")  # noqa: T201
    with new_site(SEED, WORKERS, control) as site:
        faults = Faults(site, random.Random(SEED), pause)
        faults.strike_until(site.begin(seconds) - LAST, deck)
        left = wait_for_the_end(site)
        keep(site, faults)
        verdict = judge(read(site.directory, faults.noted))
        verdict.surprises.extend(left)
        return verdict


def wait_for_the_end(site: Site) -> list[str]:
    """Return what is not as it should be when all is over."""
    codes = site.wait_for_workers()
    if set(codes.values()) != {0}:
        return [f"{name} ended with {code}: {site.log(name)[-5000:]}" for name, code in codes.items() if code]
    try:
        wait_until_nothing_is_left(site)
    except AssertionError as error:
        return [str(error)]
    return []


def wait_until_nothing_is_left(site: Site) -> None:
    # Also on the sessions that the poolers keep.
    wait_until(lambda: site.locks() == [], lambda: f"still held: {site.locks()}")
    for running in site.bouncers.values():
        running.close()
    wait_until(lambda: site.sessions() == [], lambda: f"still there: {site.sessions()}")


def keep(site: Site, faults: Faults) -> None:
    if directory := os.environ.get("SOAK_KEEP"):
        kept = Path(directory, f"{SEED}-{time.time():.0f}")
        shutil.copytree(site.directory, kept)
        (kept / "faults").write_text("\n".join(map(str, faults.noted)))


def test_they_exclude_and_are_told_of_every_loss(other: OtherSession, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.soak import awork, guarded, work  # here: what they lock is known by name in this process from now on

    verdict = run(SECONDS, DECK)
    figures = report.figures(verdict, SECONDS, SEED, WORKERS)
    with capsys.disabled():
        print(f"\n{figures}")  # noqa: T201
    assert verdict.complaints == [], "\n".join(verdict.complaints)
    assert verdict.acquisitions.keys() >= {*work.KINDS, *guarded.KINDS, *awork.KINDS}
    assert verdict.faults.keys() == DECK.keys()
    assert verdict.outcomes["lost"] > 0
    if page := os.environ.get("SOAK_REPORT"):
        report.write(Path(page), figures)


def test_the_witness_sees_those_that_take_no_lock(other: OtherSession) -> None:
    verdict = run(CONTROL_SECONDS, {"freeze worker": 1}, plan.NOTHING)
    assert verdict.surprises == []
    assert any("came in to" in text for text in verdict.violations)
    assert any(text.startswith("file of") for text in verdict.violations)
    assert any(text.startswith("row of") for text in verdict.violations)


def test_the_witness_sees_a_loss_that_is_hidden(other: OtherSession) -> None:
    verdict = run(CONTROL_SECONDS, {"terminate": 1}, plan.DEAF, pause=0.05)
    assert verdict.surprises == []
    assert verdict.silent_losses
