"""Which model a key is for, and its primary key as its field reads it."""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db.models import NOT_PROVIDED, CompositePrimaryKey, Model
from django.utils.functional import Promise

from .lock_keys import type_name
from .parts import US, as_text, refusal, unwrap

if TYPE_CHECKING:
    from django.contrib.contenttypes.models import ContentType


def read_target(obj: Model | type[Model], pk: object) -> tuple[str, Any, object]:
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
        raise TypeError(
            f"model_key() takes an instance, a concrete model class or a ContentType, not {type_name(obj)}."
        )
    return concrete._meta.label_lower, concrete._meta.pk, pk


def read_row(pk: object, pk_field: Any, label: str) -> int | str:
    """Return a primary key as its field reads it: as an int where it is one, else as text."""
    value = unwrap(pk)
    if isinstance(pk_field, CompositePrimaryKey):
        if not isinstance(value, (tuple, list)) or len(value) != len(pk_field):
            raise ValueError(f"The primary key of {label} is a tuple of {len(pk_field)} values.")
        return US.join(str(read_row(item, item_field, label)) for item, item_field in zip(value, pk_field, strict=True))
    if value is None or hasattr(value, "resolve_expression"):
        raise ValueError(f"{label}: the primary key is not known yet; save the instance first.")
    if pk_field is not None:
        value = _read(value, pk_field, label)
    elif isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else as_text(value)


def _read(value: object, pk_field: Any, label: str) -> object:
    """Let the field of a primary key read a value, and return it in the form in which the database gets it."""
    if isinstance(value, (bool, float, Promise)):
        raise refusal(value)
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
