"""The parts of a key as text, and what to pass instead of what cannot be one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from django.db.models import Model
from django.utils.functional import Promise

from .conf import UNUSABLE_TEXT
from .lock_keys import LockKey, type_name

# What delimits the text that is hashed: namespace RS scope, part US part, scope US purpose, scope GS primary key.
GS, RS, US = "\x1d", "\x1e", "\x1f"

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


def unwrap(part: object) -> object:
    """Return the value of an enum member, and anything else as it is."""
    while isinstance(part, Enum):
        part = part.value
    return part


def as_text(part: object) -> str:
    """Turn a part of a key into text, or refuse it."""
    if part is None:
        raise ValueError("None cannot be part of a key: an unsaved instance, or a missing argument?")
    if isinstance(part, str):
        if not part:
            raise ValueError("Empty text cannot be part of a key: pass text that stands for it, or leave the part out.")
        return as_label(part, "part of a key")
    if isinstance(part, int) and not isinstance(part, bool):
        return int.__repr__(part)
    if isinstance(part, UUID):
        return str(part)
    if isinstance(part, date):
        return part.isoformat()
    raise refusal(part)


def as_label(text: object, what: str) -> str:
    """Check text that goes into a key as it is, and return it as a plain str."""
    plain = unwrap(text)
    if not isinstance(plain, str):
        raise TypeError(f"The {what} must be text, not {type_name(plain)}.")
    if UNUSABLE_TEXT.search(plain):
        raise ValueError(f"The {what} must not contain U+001D to U+001F or lone surrogates: {plain!r}.")
    return str.__str__(plain)


def refusal(part: object) -> TypeError:
    """Say why a part is refused, by its type alone: the repr of a queryset or an instance may run a query."""
    advice = next(advice for types, advice in _ADVICE if isinstance(part, types))
    return TypeError(f"{type_name(part)} cannot be part of a key: {advice}.")


def visible(name: str) -> str:
    """Escape what a terminal or a log would not show as it is."""
    if name.isprintable():
        return name
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)
