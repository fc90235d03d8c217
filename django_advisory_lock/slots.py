"""The slots of a semaphore: locks of their own, and a gate that those who wait for a slot pass one by one."""

from __future__ import annotations

import contextlib
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from . import outcomes, sql, transactions
from .exceptions import LockTimeout
from .inspection import read_key_locks
from .keys import KeySource, LockKey
from .options import Options
from .parts import GS
from .several import TakeAll
from .single import Take

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .handles import LockHandle
    from .inspection import KeyLock

LOOK = 0.02  # seconds between two looks of the one who waits at the gate, on the average


def slot_key(key: LockKey, slot: int | str) -> LockKey:
    """Return the key of a slot, or of the gate of a semaphore: the same for ever, in every process."""
    numbers = ",".join(map(str, key.args))
    return KeySource(f"semaphore{GS}{numbers}{GS}{slot}", f"{key.name}:{slot}").key("")


@lru_cache(256)
def slot_keys(key: LockKey, limit: int) -> tuple[LockKey, ...]:
    """Return the keys of all slots, numbered from 1."""
    return tuple(slot_key(key, slot) for slot in range(1, limit + 1))


class TakeGate(Take):
    """The guarded take of the gate, which is a session lock also where the slot is a transaction lock."""

    def __init__(self, semaphore: LockKey, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.semaphore = semaphore

    def _send(self, *arguments: Any) -> Sequence[Any]:
        with self._unguarded():
            return super()._send(*arguments)

    def _doubt(self) -> bool:
        with self._unguarded():
            return super()._doubt()

    @contextlib.contextmanager
    def _unguarded(self) -> Iterator[None]:
        # A transaction has one server session, whatever pooler is in front of it, and frees the gate before it ends.
        guard = self.session.guard
        if self.in_transaction:
            self.session.guard = None
        try:
            yield
        finally:
            self.session.guard = guard

    def _warn_of_snapshot(self, isolation: str) -> None:
        """Leave that to the slot."""

    def _facts(self) -> outcomes.Facts:
        return {**super()._facts(), "key": self.semaphore}  # nobody but us knows the gate


class TakeSlot(TakeAll):
    """The guarded take of the first free slot.

    A try knocks at the gate, looks and goes on in one statement. Who waits takes the gate, in the order of the server's
    queue, then looks again and again, alone, and frees the gate with the take.
    """

    def __init__(self, gate: LockHandle, slots: tuple[LockKey, ...], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate = gate
        self.slots = slots
        self.asked: list[LockKey] = []
        self.taken: tuple[LockKey, ...] = ()

    @property
    def is_at_gate(self) -> bool:
        """Whether this attempt, or an earlier one of the same task, holds the gate."""
        hold = self.gate._hold
        return hold is not None and hold.noted and hold.session is self.session

    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            self.gate._give_up(self.owner)
            raise

    def _form(self) -> tuple[object, ...]:
        return ()

    def _taken_keys(self) -> tuple[LockKey, ...]:
        return self.taken

    def _try(self) -> bool:
        with self.session.mutex:
            self._renew_notes(self.slots)
            # The server would grant this session its own slots once more.
            self.asked = [slot for slot in self.slots if not self.session.on(slot)]
            # It would also let this session past the gate that another thread or task holds on it.
            if not self.asked or self._is_behind_another():
                return False
            slots = f"{{{','.join(str(slot.args[0]) for slot in self.asked)}}}"
            gate = self.gate.key.args[0]
            if self.is_at_gate:
                row = self._send(sql.take_slot_at_gate, slots, gate)
            else:
                row = self._send(sql.try_slot, gate, slots, gate)
            if not row[0]:
                return False
            self.taken = (self.asked[row[-1] - 1],)
            if self.gate._hold is not None:
                self.session.drop(self.gate._hold)
            return self._granted(row)

    def _try_for_task(self) -> None:
        super()._try_for_task()
        if self.hold is None and not self.options.tries_only and not self.is_at_gate:
            self._forget_gate()  # of a session that was closed meanwhile
            self.gate._send(self.owner, self.started)

    def _wait_for(self) -> None:
        self._refuse_endless_wait()
        try:
            while not self._reach_gate():
                time.sleep(LOOK)
        except LockTimeout:
            raise self._timed_out() from None
        with self._savepoint():
            self._poll(LOOK)

    def _reach_gate(self) -> bool:
        """Wait for the gate; False while another thread holds it on this session, where the server would not wait."""
        remaining = self._remaining()
        with self.session.mutex:
            if self._is_behind_another():
                if remaining is not None and remaining <= 0:
                    raise self._timed_out()
                return False
            self.gate._options = Options(False, "session", None if remaining is None else max(remaining, 0.0))
            self.gate._send(self.owner)
            return True

    def _is_behind_another(self) -> bool:
        return self.session.refuses((self.gate.key,), False, self.owner)

    def _refuse_endless_wait(self) -> None:
        if not self.asked:
            raise outcomes.endless_wait(self._facts(), "in all of its slots by this session itself")

    def _clean_up(self) -> None:
        raw = self.connection.connection
        if self.in_transaction and self.is_at_gate and raw is not None and not transactions.is_failed(raw):
            # On the server session of this transaction, which behind a pooler nobody finds later.
            self.gate._give_up(self.owner)
        super()._clean_up()

    def _doubt(self) -> bool:
        self._forget_gate()
        pid = self.session.guard
        self.session.doubt((self.gate.key,), True, pid)
        if self.scope == "session":
            self.session.doubt(self.asked, False, pid)
            if self.hold is not None:
                self.session.drop(self.hold)
        return True

    def _forget_gate(self) -> None:
        """Leave it to the session to free the gate, if it has it."""
        hold = self.gate._hold
        if hold is not None and hold.noted:
            hold.session.disown(hold)

    def _timed_out(self, locks: list[KeyLock] | None = None) -> LockTimeout:
        locks = read_key_locks(self.cursor, self.slots)
        return outcomes.no_slot(self._facts(), len(self.slots), self.options.timeout or 0, locks)
