"""What a lock is called: from names, numbers and model instances to the one or two integers that PostgreSQL knows.

All of it is computed here, without a query, and comes out the same in every process, on every platform, in every
release. The integers are those of https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
"""

from __future__ import annotations

import zlib
from datetime import date
from enum import Enum
from functools import lru_cache
from hashlib import sha256
from typing import TypeAlias
from uuid import UUID

from django.db.models import NOT_PROVIDED, Model

from .conf import get_namespace
from .lock_keys import LockKey, type_name
from .parts import GS, RS, US, as_label, as_text, unwrap, visible
from .primary_keys import read_row, read_target

__all__ = ("KeyLike", "LockKey", "crc32_key", "lock_key", "model_key")

_USUAL = frozenset({str, int})

# The purposes that this process has met, and can read back: in most programs they are a few words.
purposes: set[str] = set()
MOST_PURPOSES = 100

_KeyPart: TypeAlias = LockKey | Model | str | int | UUID | date | Enum
KeyLike: TypeAlias = _KeyPart | tuple[_KeyPart, ...]


def lock_key(*parts: KeyLike, namespace: str | None = None) -> LockKey:
    """Return the key that the parts name, as every function that makes a lock does with its `*key`.

    One `LockKey` is itself and one int is that bigint key, whatever the namespace; one model instance means
    `model_key(instance)`. Other parts are hashed as text: str, int, UUID, date and datetime (in their ISO form, so
    that the same moment in two time zones is two keys). Enum members count as their value. One tuple is its parts.
    `42` and `"42"` are the same part, so that a primary key from a URL and one from the database meet.

    `namespace` is the one of `ADVISORY_LOCK_NAMESPACE` where it is None; `""` is none, and then no settings are needed.
    What cannot be a part is refused with what to pass instead: `ValueError` for no parts, None, empty text, text with
    U+001D to U+001F or lone surrogates, and ints out of range; `TypeError` for all else.
    """
    return derive(read_parts(parts), namespace)


def model_key(
    obj: Model | type[Model], *, pk: object = NOT_PROVIDED, purpose: str = "", namespace: str | None = None
) -> LockKey:
    """Return the key of a model instance, or of a model class or `ContentType` and a primary key, without a query.

    A model class alone is the model as a whole, a key that has nothing to do with those of its rows. Locks with
    different purposes never meet. `namespace` is as in `lock_key`.

    The key depends on `app_label.model` of the concrete model and on the primary key as its field reads it, so a proxy,
    a deferred instance, `"42"` and every spelling of a UUID lead to the same key. A multi-table child has a key of its
    own: lock the parent, `child.parent_ptr`, to meet those who do not know the child. A `ContentType` whose model is
    gone still works: digits then count as an int, all else as text.

    A primary key that is None (an unsaved instance) or that the field refuses is `ValueError`. A bool or a float as a
    primary key, `pk=` beside an instance, and a `ContentType` without `pk=` (which could mean two things) are
    `TypeError`.
    """
    return derive(_read_model(obj, pk, purpose), namespace)


def crc32_key(text: str) -> LockKey:
    """Return the unsigned CRC-32 of a text as a bigint key, as `zlib.crc32` gives it; no namespace applies.

    So code that locks by that one number, in any language, and this one exclude each other. (Ruby's with_advisory_lock
    makes two ints of it since 2.0: docs/migrating.md has its key.) Anything but text is `TypeError`; text that
    `lock_key` refuses is `ValueError`.
    """
    if not isinstance(text, str):
        raise TypeError(f"crc32_key() takes text, not {type_name(text)}.")
    plain = as_text(text)
    return LockKey((zlib.crc32(plain.encode()),), visible(plain))


class KeySource:
    """The checked text of a key that is still without its namespace, which may differ by the time the key is used."""

    __slots__ = ("_last", "name", "row", "text")

    def __init__(self, text: str, name: str, row: int | None = None) -> None:
        self.text = text
        self.name = name
        self.row = row
        self._last: tuple[str | None, LockKey | None] = (None, None)

    def key(self, namespace: str) -> LockKey:
        """Hash the text in a namespace: to the one bigint or, beside the number of a row, to the first of two ints."""
        last_namespace, key = self._last
        if key is None or last_namespace != namespace:
            text, name = self.text, self.name
            if namespace:
                text, name = f"{namespace}{RS}{text}", f"{namespace}/{name}"
            size = 8 if self.row is None else 4
            number = int.from_bytes(sha256(text.encode()).digest()[:size], "big", signed=True)
            key = LockKey((number,) if self.row is None else (number, self.row), visible(name))
            self._last = (namespace, key)
        return key


def read_parts(parts: tuple[object, ...]) -> LockKey | KeySource:
    """Check what `lock_key` takes, without a look at the settings, so that this may run while modules are imported."""
    return _read_usual(*parts) if _USUAL.issuperset(map(type, parts)) else _read_all(parts)


@lru_cache(1024, typed=True)
def _read_usual(*parts: object) -> LockKey | KeySource:
    """Keep what names and numbers come to: most programs use the same few over and over."""
    return _read_all(parts)


def _read_all(parts: tuple[object, ...]) -> LockKey | KeySource:
    plain = tuple(map(unwrap, parts))
    if len(plain) == 1 and isinstance(plain[0], tuple):
        plain = tuple(map(unwrap, plain[0]))
    if not plain:
        raise ValueError("A key needs at least one part: pass a name, such as 'refresh-reports'.")
    only = plain[0] if len(plain) == 1 else None
    if isinstance(only, LockKey):
        return only
    if isinstance(only, Model):
        return _read_model(only, NOT_PROVIDED, "")
    texts = [as_text(part) for part in plain]
    if isinstance(only, int):
        return LockKey((only,))
    if all(isinstance(part, int) for part in plain):
        raise TypeError(f"{plain!r} are only ints: LockKey.pair(a, b) is PostgreSQL's two-int key; else add a name.")
    return KeySource(US.join(texts), ":".join(texts))


def derive(source: LockKey | KeySource, namespace: str | None = None) -> LockKey:
    """Return the key of what `read_parts` returned; a namespace of None is that of the settings."""
    if isinstance(source, LockKey):
        return source
    return source.key(get_namespace() if namespace is None else as_label(namespace, "namespace"))


def _read_model(obj: Model | type[Model], pk: object, purpose: str) -> KeySource:
    label, pk_field, pk = read_target(obj, pk)
    scope, name = _scope(label, as_label(purpose, "purpose"))
    if pk is NOT_PROVIDED:
        return KeySource(scope, name)
    row = read_row(pk, pk_field, label)
    if isinstance(row, int) and 0 <= row < 2**31:
        return KeySource(scope, f"{name}:{row}", row)
    return KeySource(f"{scope}{GS}{row}", f"{name}:{row}".replace(US, ","))


def _scope(label: str, purpose: str) -> tuple[str, str]:
    """Return the text that all keys of a model begin with, and how they are called."""
    if not purpose:
        return label, label
    remember_purpose(purpose)
    return label + US + purpose, f"{label}[{purpose}]"


def remember_purpose(purpose: object) -> None:
    """Keep a purpose, so that keys with it can be read back."""
    if isinstance(purpose, str) and purpose and len(purposes) < MOST_PURPOSES:
        purposes.add(purpose)


def scope_number(label: str, purpose: str, namespace: str) -> tuple[int, str]:
    """Return the first of the two ints of the keys of all rows of a model, and how they are called without the row."""
    scope, name = _scope(label, purpose)
    key = KeySource(scope, name, 0).key(namespace)
    return key.args[0], key.name
