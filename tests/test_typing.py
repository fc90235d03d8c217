"""What a type checker makes of the public names; `make lint` reads it, the test only sees that it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_advisory_lock import (
    AdvisoryLock,
    LockHandle,
    LockKey,
    TryAdvisoryLock,
    advisory_lock,
    lock_key,
    try_advisory_lock,
)

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value: object, expected: object) -> None:
        """What typing.assert_type does from Python 3.11 on: nothing."""


def test_decorators_keep_the_signature() -> None:
    @advisory_lock("x", timeout=5)
    def wait(x: int, *, y: str = "") -> bytes:
        return b""

    @try_advisory_lock("x")
    def attempt(x: int) -> bytes:
        return b""

    @try_advisory_lock("x", default="skipped")
    def attempt_or(x: int) -> bytes:
        return b""

    if TYPE_CHECKING:
        assert_type(attempt_or(1), "bytes | str")
        assert_type(wait(1, y=""), bytes)
        assert_type(attempt(1), "bytes | None")
        wait("1")  # type: ignore[arg-type]
        wait(1, z=2)  # type: ignore[call-arg]


def test_locks_and_handles() -> None:
    assert_type(advisory_lock("x"), AdvisoryLock)
    assert_type(try_advisory_lock("x"), TryAdvisoryLock[None])
    assert_type(try_advisory_lock("x", default=0), TryAdvisoryLock[int])
    assert_type(lock_key("report", 42), LockKey)
    if TYPE_CHECKING:
        with advisory_lock("x") as lock:
            assert_type(lock, LockHandle)
        assert_type(try_advisory_lock("x").acquire(), LockHandle)
        advisory_lock(1.5)  # type: ignore[arg-type]
        advisory_lock("x", "y", None)  # type: ignore[arg-type]
        advisory_lock("x", timeout="5")  # type: ignore[arg-type]
