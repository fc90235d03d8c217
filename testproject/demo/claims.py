"""What a step claims, decided from what the processes logged: the intervals in which each of them was at work."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .timeline import Interval


@dataclass(frozen=True)
class Claim:
    holds: bool
    text: str


def overlapping_pairs(intervals: Collection[Interval]) -> int:
    """Return how many pairs of intervals have time in common; where one ends as the next begins there is none."""
    return sum(a[0] < b[1] and b[0] < a[1] for a, b in combinations(intervals, 2))


def peak(intervals: Collection[Interval]) -> int:
    """Return how many intervals there were at once, at most."""
    # At the same moment ends come first: (t, -1) sorts before (t, 1).
    changes = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def one_worked(worked: int, skipped: int, copies: int) -> Claim:
    holds = worked == 1 and skipped == copies - 1
    return Claim(holds, f"{worked} of {copies} copies worked, {skipped} skipped")


def gave_up_meanwhile(at_work: int, skipped: int) -> Claim:
    """`at_work` were counted at the moment when all copies had decided."""
    return Claim(at_work == 1, f"at work when all had decided: {at_work}; skipped and gone by then: {skipped}")


def one_answered(statuses: Sequence[int], *, command_skipped: bool) -> Claim:
    """The statuses are those of the answers to requests that came while a command was started, too."""
    worked, busy = statuses.count(302), statuses.count(409)
    command = "skipped" if command_skipped else "worked"
    text = f"{worked} of {len(statuses)} requests worked, {busy} were answered 409; the command {command}"
    return Claim(command_skipped and worked == 1 and busy == len(statuses) - 1, text)


def never_two(intervals: Collection[Interval]) -> Claim:
    pairs = overlapping_pairs(intervals)
    if not intervals:
        return Claim(False, "nobody worked at all")
    return Claim(pairs == 0, f"never two at work at the same time ({pairs} overlaps in the log)")


def all_collided(intervals: Collection[Interval], copies: int) -> Claim:
    """The negative control: what cannot see a collision proves nothing where it sees none."""
    most, pairs = peak(intervals), overlapping_pairs(intervals)
    text = f"the work was done {len(intervals)} times, by up to {most} at once ({pairs} overlaps in the log)"
    return Claim(len(intervals) == most == copies, text)


def each_once(synced: int, distinct: int, accounts: int) -> Claim:
    return Claim(synced == distinct == accounts, f"{distinct} of {accounts} accounts were synced, in {synced} runs")


def no_account_twice(doubled: int) -> Claim:
    return Claim(doubled == 0, f"no account was in two hands at a time ({doubled} overlaps in the log)")


def shared_out(counts: Sequence[int]) -> Claim:
    return Claim(min(counts) > 0, f"the work was shared: {', '.join(map(str, counts))} accounts")


def accounts_collided(doubled: int, distinct: int, synced: int) -> Claim:
    """The negative control of `no_account_twice`."""
    return Claim(doubled > 0, f"{distinct} accounts were synced in {synced} runs, {doubled} of them by several at once")


def taken_over(after: float | None, limit: float) -> Claim:
    """`after` is the time from the kill to the work of the next one; None where that one did nothing."""
    if after is None:
        return Claim(False, "the next one never got in")
    if after < 0:
        return Claim(False, f"the next one got in {-after:.2f} s before the kill")
    return Claim(after < limit, f"the next one got in {after:.2f} s after the kill")


def once_in_its_interval(first: int, second: int, third: int) -> Claim:
    """The third ignores the interval, and is the negative control."""
    text = f"the first ran {times(first)}, the second {times(second)}, one without the interval {times(third)}"
    return Claim((first, second, third) == (1, 0, 1), text)


def times(count: int) -> str:
    return {0: "not at all", 1: "once"}.get(count, f"{count} times")


def nothing_left(locks: int) -> Claim:
    return Claim(locks == 0, "no advisory lock is left" if not locks else f"{locks} advisory locks are left")
