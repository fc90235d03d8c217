"""A lock before it is taken: its key and its options, checked, and the ways to enter and to leave."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction

from . import conf, keys
from .awaiting import take_in_task
from .decorating import is_function
from .exceptions import AdvisoryLockError
from .handles import LockHandle
from .owners import current_owner, owner_in, task_owner

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

    from .keys import LockKey
    from .options import Options


class ConfiguredLock:
    """The configuration of a lock, checked; nothing in it ever changes."""

    def __init__(self, key: tuple[Any, ...], using: str | None, options: Options) -> None:
        self._key_function = key[0] if len(key) == 1 and is_function(key[0]) else None
        if self._key_function is None:
            self._source = self._read_key(key)
        elif iscoroutinefunction(self._key_function):
            raise TypeError("The function that makes a key is simply called, so it cannot be a coroutine function.")
        if using is not None and not isinstance(using, str):
            raise TypeError(f"using is the alias of a database or None, not {type(using).__name__}.")
        self._parts = key
        self._using = using
        self._options = options

    def __repr__(self) -> str:
        using = "" if self._using is None else f" on {self._using!r}"
        return f"<{type(self).__name__} {', '.join(map(repr, self._parts))}{using}>"

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} holds nothing by itself: enter it with `with`, decorate a function, or acquire() it."
        )

    def acquire(self) -> LockHandle:
        """Make the attempt by hand; `release()` of the handle ends it. The errors are those of the `with` block."""
        return self._fixed_handle()._take(current_owner())

    async def aacquire(self) -> LockHandle:
        """See `acquire()`. `await handle.arelease()` ends it."""
        return await take_in_task(self._fixed_handle, task_owner(), None)

    def __enter__(self) -> LockHandle:
        return self._fixed_handle()._enter(current_owner(), self, id(sys._getframe(1)))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handle, frame = None, id(sys._getframe(1))
        try:
            owner = current_owner()
            handle = owner.block_of(self, frame)
            if handle is None:
                raise AdvisoryLockError(f"{self!r}: only the thread or task that entered a block can leave it.")
            owner.forget_block(self, handle)
            handle._leave(exc, owner)
        except BaseException:
            owner = current_owner()
            if handle is None:  # not `or`: one that was not acquired is false
                handle = owner.block_of(self, frame)
            if handle is not None:
                owner.forget_block(self, handle)
                handle._give_up()
            raise

    def __aenter__(self) -> Coroutine[Any, Any, LockHandle]:
        return take_in_task(self._fixed_handle, task_owner(), (self, id(sys._getframe(1))))

    def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        return self._aexit(exc, id(sys._getframe(1)))

    async def _aexit(self, exc: BaseException | None, frame: int) -> None:
        # A generator that is left half way is closed by its loop, in another task.
        owner = (owner_in(self, frame) if isinstance(exc, GeneratorExit) else None) or task_owner()
        handle = owner.block_of(self, frame)
        if handle is None:
            raise AdvisoryLockError(f"{self!r}: only the task that entered a block can leave it.")
        owner.forget_block(self, handle)
        await handle._aend_block(exc, owner)

    def _handle_for_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LockHandle:
        """Make the handle for one call of a decorated function."""
        if self._key_function is None:
            return self._handle(self._source)
        returned = self._key_function(*args, **kwargs)
        if returned is None:
            raise TypeError(f"The function that makes the key of {self!r} returned None, which is no key.")
        return self._handle(self._read_returned(returned))

    def _enter_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LockHandle:
        return self._handle_for_call(args, kwargs)._enter(current_owner())

    async def _aenter_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LockHandle:
        return await take_in_task(lambda: self._handle_for_call(args, kwargs), task_owner(), (None, 0))

    def _fixed_handle(self) -> LockHandle:
        if self._key_function is not None:
            raise TypeError(
                "A function as the key belongs to a decorator, which calls it with the arguments of the call. Here pass"
                " the key itself; and write @advisory_lock(…) with a key, not the bare @advisory_lock."
            )
        return self._handle(self._source)

    # What a kind of lock does with its key: read when the lock is made, derived at each entry.

    def _read_key(self, parts: tuple[Any, ...]) -> Any:
        return keys.read_parts(parts)

    def _read_returned(self, returned: Any) -> Any:
        return self._read_key((returned,))

    def _handle(self, source: Any) -> LockHandle:
        return LockHandle((keys.derive(source),), self._alias(), self._options, kind=type(self))

    def _known_keys(self) -> tuple[LockKey, ...]:
        """Return the keys that this lock stands for whatever it is called with."""
        return () if self._key_function is not None else self._handle(self._source).keys

    def _alias(self) -> str:
        return conf.get_database() if self._using is None else self._using
