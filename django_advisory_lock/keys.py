"""What a lock is called: from names, numbers and model instances to the one or two integers that PostgreSQL knows.

All of it is computed here, without a query, and comes out the same in every process, on every platform, in every
release. The integers are those of https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db.models import NOT_PROVIDED, CompositePrimaryKey, Model
from django.utils.functional import Promise

from .conf import UNUSABLE_TEXT, get_namespace

if TYPE_CHECKING:
    from django.contrib.contenttypes.models import ContentType

_USUAL = frozenset({str, int})
# What delimits the text that is hashed: namespace RS scope, part US part, scope US purpose, scope GS primary key.
GS, RS, US = "\x1d", "\x1e", "\x1f"

# The purposes that this process has met, and can read back: in most programs they are a few words.
purposes: set[str] = set()
MOST_PURPOSES = 100


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
            raise TypeError(f"A LockKey has a tuple of one or two ints, not {_name(self.args)}.")
        bits = 64 // len(self.args)
        for number in self.args:
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"A LockKey consists of ints, not {_name(number)}.")
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


_KeyPart: TypeAlias = LockKey | Model | str | int | UUID | date | Enum
KeyLike: TypeAlias = _KeyPart | tuple[_KeyPart, ...]

# What cannot be a part of a key, and what to pass instead; the first line that fits is the advice.
_ADVICE: tuple[tuple[Any, str], ...] = (
    (LockKey, "it is a whole key already, so pass it alone"),
    (Model, "pass model_key(instance, purpose=…) as the whole key"),
    (bool, "pass text that says what is on or off"),
    ((float, Decimal), "pass an int, or text written the way you mean it"),
    ((bytes, bytearray, memoryview), "pass text, such as its .decode() or .hex()"),
    ((tuple, list, set, frozenset, dict), "pass the items as parts of their own, in a fixed order"),
    (Promise, "its text changes with the active language, so pass the untranslated text"),
    (type(Model), "pass model_key(Model, pk=…) for a row, model_key(Model) for the model as a whole"),
    (type, "pass its name as text"),
    (Callable, "a callable belongs into a decorator, which calls it; here pass what it returns"),
    (object, "pass text, an int, a UUID, a date or a datetime that stands for it"),
)


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
        raise TypeError(f"crc32_key() takes text, not {_name(text)}.")
    plain = _text(text)
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
    plain = tuple(map(_unwrap, parts))
    if len(plain) == 1 and isinstance(plain[0], tuple):
        plain = tuple(map(_unwrap, plain[0]))
    if not plain:
        raise ValueError("A key needs at least one part.")
    only = plain[0] if len(plain) == 1 else None
    if isinstance(only, LockKey):
        return only
    if isinstance(only, Model):
        return _read_model(only, NOT_PROVIDED, "")
    texts = [_text(part) for part in plain]
    if isinstance(only, int):
        return LockKey((only,))
    if all(isinstance(part, int) for part in plain):
        raise TypeError(f"{plain!r} are only ints: LockKey.pair(a, b) is PostgreSQL's two-int key; else add a name.")
    return KeySource(US.join(texts), ":".join(texts))


def derive(source: LockKey | KeySource, namespace: str | None = None) -> LockKey:
    """Return the key of what `read_parts` returned; a namespace of None is that of the settings."""
    if isinstance(source, LockKey):
        return source
    return source.key(get_namespace() if namespace is None else _label(namespace, "namespace"))


def _read_model(obj: Model | type[Model], pk: object, purpose: str) -> KeySource:
    label, pk_field, pk = _target(obj, pk)
    scope, name = _scope(label, _label(purpose, "purpose"))
    if pk is NOT_PROVIDED:
        return KeySource(scope, name)
    row = _row(pk, pk_field, label)
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


def _unwrap(part: object) -> object:
    """Return the value of an enum member, and anything else as it is."""
    while isinstance(part, Enum):
        part = part.value
    return part


def _text(part: object) -> str:
    """Turn a part of a key into text, or refuse it."""
    if part is None:
        raise ValueError("None cannot be part of a key: an unsaved instance, or a missing argument?")
    if isinstance(part, str):
        if not part:
            raise ValueError("Empty text cannot be part of a key.")
        return _label(part, "part of a key")
    if isinstance(part, int) and not isinstance(part, bool):
        return int.__repr__(part)
    if isinstance(part, UUID):
        return str(part)
    if isinstance(part, date):
        return part.isoformat()
    raise _refusal(part)


def _label(text: object, what: str) -> str:
    """Check text that goes into a key as it is, and return it as a plain str."""
    plain = _unwrap(text)
    if not isinstance(plain, str):
        raise TypeError(f"The {what} must be text, not {_name(plain)}.")
    if UNUSABLE_TEXT.search(plain):
        raise ValueError(f"The {what} must not contain U+001D to U+001F or lone surrogates: {plain!r}.")
    return str.__str__(plain)


def _refusal(part: object) -> TypeError:
    """Say why a part is refused, by its type alone: the repr of a queryset or an instance may run a query."""
    advice = next(advice for types, advice in _ADVICE if isinstance(part, types))
    return TypeError(f"{_name(part)} cannot be part of a key: {advice}.")


def _name(value: object) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def visible(name: str) -> str:
    """Escape what a terminal or a log would not show as it is."""
    if name.isprintable():
        return name
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def _target(obj: Model | type[Model], pk: object) -> tuple[str, Any, object]:
    """Return the label of the concrete model, the field of its primary key (None where it is gone) and that key."""
    model: type[Model] | None = obj if isinstance(obj, type) else None
    # Known by its label: the class can be imported only where contenttypes is installed.
    if isinstance(obj, Model) and obj._meta.label_lower == "contenttypes.contenttype":
        content_type = cast("ContentType", obj)
        if pk is NOT_PROVIDED:
            raise TypeError("A ContentType needs pk=; its model as a whole is model_key(content_type.model_class()).")
        model = content_type.model_class()
        if model is None:
            return f"{content_type.app_label}.{content_type.model}", None, pk
    elif isinstance(obj, Model):
        if pk is not NOT_PROVIDED:
            raise TypeError("An instance has its primary key: pk= goes with a model class or a ContentType.")
        model, pk = obj._meta.model, obj.pk
    concrete = getattr(getattr(model, "_meta", None), "concrete_model", None)
    if concrete is None or concrete._meta.abstract:
        raise TypeError(f"model_key() takes an instance, a concrete model class or a ContentType, not {_name(obj)}.")
    return concrete._meta.label_lower, concrete._meta.pk, pk


def _row(pk: object, pk_field: Any, label: str) -> int | str:
    """Return a primary key as its field reads it: as an int where it is one, else as text."""
    value = _unwrap(pk)
    if isinstance(pk_field, CompositePrimaryKey):
        if not isinstance(value, (tuple, list)) or len(value) != len(pk_field):
            raise ValueError(f"The primary key of {label} is a tuple of {len(pk_field)} values.")
        return US.join(str(_row(item, item_field, label)) for item, item_field in zip(value, pk_field, strict=True))
    if value is None or hasattr(value, "resolve_expression"):
        raise ValueError(f"{label}: the primary key is not known yet; save the instance first.")
    if pk_field is not None:
        value = _read(value, pk_field, label)
    elif isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _read(value: object, pk_field: Any, label: str) -> object:
    """Let the field of a primary key read a value, and return it in the form in which the database gets it."""
    if isinstance(value, (bool, float, Promise)):
        raise _refusal(value)
    try:
        read = pk_field.to_python(value)
        # A text field takes the str() of anything, an integer field cuts off: only text and ints may be respelt.
        if not isinstance(value, (str, int)) and read != value:
            raise ValueError(f"it would be read as {read!r}")
        read = pk_field.get_prep_value(read)
        if isinstance(read, Decimal) and read == read.to_integral_value():
            return int(read)
    except (ValidationError, TypeError, ValueError, ArithmeticError) as error:
        shown = repr(value) if isinstance(value, (str, int, UUID, date, Decimal)) else type(value).__name__
        if isinstance(value, tuple):
            shown = f"A tuple of {len(value)} values"
        raise ValueError(f"{shown} is no primary key of {label}.") from error
    if isinstance(read, datetime) and read.tzinfo is not None:
        return read.astimezone(timezone.utc)  # one moment, one key, whatever the time zone of the instance
    return read
