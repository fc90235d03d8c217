"""Semaphores: at most so many at once, with slots that are locks like all others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from . import keys
from .handles import LockHandle
from .locks import AdvisoryLock, TryAdvisoryLock
from .options import Options
from .slots import TakeGate, TakeSlot, slot_key, slot_keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from .keys import KeyLike, LockKey
    from .options import Scope
    from .owners import Owner

D = TypeVar("D")


class SemaphoreHandle(LockHandle):
    """One attempt to take a slot, and the slot itself where it succeeded."""

    _longest_pause = 0.05  # whoever waits at the gate holds up all behind it

    def __init__(self, key: LockKey, using: str, options: Options, limit: int, kind: type) -> None:
        gate = slot_key(key, "gate")
        self._gate = LockHandle((gate,), using, Options(False, "session", tries_only=True), partial(TakeGate, key))
        super().__init__((key,), using, options, partial(TakeSlot, self._gate, slot_keys(key, limit)), kind)

    @property
    def _keeps_something(self) -> bool:
        return super()._keeps_something or self._gate._keeps_something

    def _give_up(self, owner: Owner | None = None) -> None:
        self._gate._give_up(owner)
        super()._give_up(owner)


class AdvisorySemaphore(AdvisoryLock):
    """A semaphore to wait for, as `advisory_semaphore()` returns it: used as `AdvisoryLock` is."""

    def __init__(self, key: tuple[Any, ...], using: str | None, options: Options, limit: int) -> None:
        super().__init__(key, using, options)
        self._limit = _checked(limit)

    def _known_keys(self) -> tuple[LockKey, ...]:
        return _slots_and_gate(super()._known_keys(), self._limit)

    def _handle(self, source: Any) -> LockHandle:
        return SemaphoreHandle(keys.derive(source), self._alias(), self._options, self._limit, type(self))


class TryAdvisorySemaphore(TryAdvisoryLock[D]):
    """A semaphore to try for, as `try_advisory_semaphore()` returns it: used as `TryAdvisoryLock` is."""

    def __init__(self, key: tuple[Any, ...], using: str | None, options: Options, default: D, limit: int) -> None:
        super().__init__(key, using, options, default)
        self._limit = _checked(limit)

    def _known_keys(self) -> tuple[LockKey, ...]:
        return _slots_and_gate(super()._known_keys(), self._limit)

    def _handle(self, source: Any) -> LockHandle:
        return SemaphoreHandle(keys.derive(source), self._alias(), self._options, self._limit, type(self))


def advisory_semaphore(
    *key: KeyLike | Callable[..., KeyLike],
    limit: int,
    using: str | None = None,
    timeout: float | timedelta | None = None,
    scope: Scope = "auto",
) -> AdvisorySemaphore:
    """Return a semaphore: at most `limit` entries are inside at once, the others wait.

    Used as `advisory_lock()` is, with its options and errors. Each entry takes a slot of its own, also one of a thread
    that is in a slot already. The limit belongs to the call, not to the key: where programs disagree, each takes the
    first slots up to its own limit, so change it everywhere at once. Who waits is served in the order of the server's
    queue.
    """
    return AdvisorySemaphore(key, using, Options(False, scope, timeout), limit)


@overload
def try_advisory_semaphore(
    *key: KeyLike | Callable[..., KeyLike], limit: int, using: str | None = None, scope: Scope = "auto"
) -> TryAdvisorySemaphore[None]: ...


@overload
def try_advisory_semaphore(
    *key: KeyLike | Callable[..., KeyLike], limit: int, using: str | None = None, scope: Scope = "auto", default: D
) -> TryAdvisorySemaphore[D]: ...


def try_advisory_semaphore(
    *key: KeyLike | Callable[..., KeyLike],
    limit: int,
    using: str | None = None,
    scope: Scope = "auto",
    default: Any = None,
) -> TryAdvisorySemaphore[Any]:
    """Return a semaphore to try for: used as `try_advisory_lock()` is. False also while somebody waits for a slot."""
    return TryAdvisorySemaphore(key, using, Options(False, scope, tries_only=True), default, limit)


def _slots_and_gate(found: tuple[LockKey, ...], limit: int) -> tuple[LockKey, ...]:
    return tuple(slot for key in found for slot in (slot_key(key, "gate"), *slot_keys(key, limit)))


def _checked(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit is the number of slots, an int, not {type(limit).__name__}.")
    if limit < 1:
        raise ValueError(f"limit is at least 1, not {limit}.")
    return limit
