"""What the numbers of `pg_locks` mean, as far as this process knows: a name is hashed, and no hash can be read back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from django.apps import apps

from . import keys
from .conf import get_namespace
from .notices import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Source = Callable[[str | None], Iterable[keys.LockKey]]

# Weakly: what was decorated in a function that is gone is no longer asked.
_noted: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
_sources: list[Source] = []


def note(named: Any) -> None:
    """Remember a lock that decorates a function, or a class of guards, so that its `_known_keys()` can be read back."""
    _noted[named] = None


def fixed(key: Any) -> tuple[keys.LockKey, ...]:
    """Return the key that a class of guards names; none where only its instances know it, or where it is wrong."""
    try:
        return () if key is None or hasattr(type(key), "__get__") else (keys.lock_key(key),)
    except (TypeError, ValueError):
        return ()  # said when it is used


def source(ask: Source) -> Source:
    """Decorate a function of an alias that returns keys which exist whether or not the code that locks was imported.

    An alias of None asks for those that can be told without a query.
    """
    _sources.append(ask)
    return ask


class Meaning(NamedTuple):
    """A key, with its name or else its numbers, and the row of a model that it stands for."""

    key: keys.LockKey
    is_named: bool
    model: str | None = None
    object_pk: int | None = None


class Names:
    """The names of keys, gathered once for many rows: with an alias of None, without a query."""

    def __init__(self, using: str | None, more: Iterable[keys.LockKey] = ()) -> None:
        self._keys: dict[keys.LockKey, keys.LockKey] = {}
        self._models: dict[int, tuple[str, str]] = {}
        # What the function of the namespace raises where there is no tenant, as in a shell: no reason to list nothing.
        self._untold: tuple[type[Exception], ...] = ()
        self._add_models(self._namespaces())
        for ask in _sources:
            self._add(lambda ask=ask: ask(using))  # type: ignore[misc]
        for find in _noted.keyrefs():  # a list made in one step: other threads add to it
            named = find()
            if named is not None:
                self._add(named._known_keys)
        self._add(lambda: more)

    def _namespaces(self) -> set[str]:
        try:
            return {"", get_namespace()}
        except Exception as error:
            self._untold = (type(error),)
            logger.warning("Names in the namespace of ADVISORY_LOCK_NAMESPACE stay numbers: %r", error)
            return {""}

    def _add(self, find: Callable[[], Iterable[keys.LockKey]]) -> None:
        with contextlib.suppress(*self._untold):
            self._keys.update((key, key) for key in find())

    def _add_models(self, namespaces: set[str]) -> None:
        models = apps.get_models(include_auto_created=True) if apps.models_ready else ()
        for label in {model._meta.label_lower for model in models if not model._meta.proxy}:
            for namespace in namespaces:
                for purpose in ("", *keys.purposes):
                    number, name = keys.scope_number(label, purpose, namespace)
                    self._models[number] = (name, label)
                    whole = keys.model_key(apps.get_model(label), purpose=purpose, namespace=namespace)
                    self._keys[whole] = whole

    def read(self, classid: int, objid: int, objsubid: int) -> Meaning:
        """Read back what a row of `pg_locks` shows."""
        number = keys.LockKey.from_pg_locks(classid, objid, objsubid)
        key, (first, *rest) = self._keys.get(number), number.args
        if not rest or rest[0] < 0 or first not in self._models:
            return Meaning(key or number, key is not None)
        name, model = self._models[first]
        return Meaning(key or keys.LockKey(number.args, f"{name}:{rest[0]}"), True, model, rest[0])
