"""The key itself: the one or two integers that PostgreSQL knows a lock by."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True, slots=True)
class LockKey:
    """Name an advisory lock by the numbers that PostgreSQL knows it by: one bigint, or two ints.

    `args` are the numbers, and all that counts for equality, order and hash; `name` is for people. Keys of one and of
    two numbers never meet: 8 and (0, 8) are different locks. A number out of the range of its form is `ValueError`.
    """

    args: tuple[int, ...]
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.args, tuple) or len(self.args) not in (1, 2):
            raise TypeError(f"A LockKey has a tuple of one or two ints, not {type_name(self.args)}.")
        bits = 64 // len(self.args)
        for number in self.args:
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"A LockKey consists of ints, not {type_name(number)}.")
            if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
                raise ValueError(f"{number} is out of the range of {bits} signed bits; text is hashed and always fits.")
        plain = tuple(map(int, self.args))  # psycopg would send a member of an IntEnum by its name
        object.__setattr__(self, "args", plain)
        object.__setattr__(self, "name", self.name or str(plain if len(plain) == 2 else plain[0]))

    def __str__(self) -> str:
        return self.name

    @classmethod
    def pair(cls, a: int, b: int) -> LockKey:
        """Return the key of two ints of 32 bits, `pg_advisory_lock(int, int)`."""
        return cls((a, b))

    @classmethod
    def from_pg_locks(cls, classid: int, objid: int, objsubid: int) -> LockKey:
        """Return the key that a row of `pg_locks` with locktype `advisory` shows: `pg_locks` read back."""
        return cls(struct.unpack({1: ">q", 2: ">ii"}[objsubid], struct.pack(">II", classid, objid)))

    @property
    def pg_locks(self) -> tuple[int, int, int]:
        """The columns classid, objid and objsubid, as the view `pg_locks` shows this key: unsigned.

        See https://www.postgresql.org/docs/current/view-pg-locks.html.
        """
        classid, objid = struct.unpack(">II", struct.pack({1: ">q", 2: ">ii"}[len(self.args)], *self.args))
        return classid, objid, len(self.args)


def type_name(value: object) -> str:
    return str(getattr(value, "__name__", type(value).__name__))
