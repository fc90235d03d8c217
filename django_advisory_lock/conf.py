"""The settings, read when they are used: never at import, never kept."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.conf import Settings, settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

if TYPE_CHECKING:
    from collections.abc import Callable

# What no text in a key may hold: the characters that delimit it, and lone surrogates, which have no UTF-8.
UNUSABLE_TEXT = re.compile("[\x1d-\x1f\ud800-\udfff]")


def _setting(name: str, default: Any) -> Any:
    # What is missing costs LazySettings two AttributeErrors, some 2 % of a lock. Plain settings can be asked; others,
    # such as those of override_settings(), have settings behind them.
    plain = settings._wrapped  # type: ignore[misc]
    if type(plain) is Settings and name not in plain.__dict__:
        return default
    return getattr(settings, name, default)


def get_database() -> str:
    """Return the alias that locks live on where `using` names none: `ADVISORY_LOCK_DATABASE`, else `"default"`."""
    alias = _setting("ADVISORY_LOCK_DATABASE", DEFAULT_DB_ALIAS)
    if not isinstance(alias, str) or not alias:
        raise ImproperlyConfigured(f"ADVISORY_LOCK_DATABASE must be the alias of a database, not {alias!r}.")
    return alias


def get_namespace() -> str:
    """Return the namespace of keys, `ADVISORY_LOCK_NAMESPACE`, asked anew at each call; `""` where there is none.

    The setting is the text itself, a callable that returns it, or the dotted path of such a callable. Text made of
    identifiers joined by dots (`shop.tenants.current`) is always read as a path, and must lead to a callable:
    whether a module can be imported must not decide what a key is, and a slip of the pen must not become a namespace.
    """
    source = namespace_source()
    return _usable(source()) if callable(source) else source


def namespace_source() -> str | Callable[[], Any]:
    """Return what makes namespaces: the text, or the callable, which may need a request or a tenant to answer."""
    source = _setting("ADVISORY_LOCK_NAMESPACE", "")
    if source == "":
        return ""
    if isinstance(source, str) and "." in source and all(part.isidentifier() for part in source.split(".")):
        return _import_callable(source)
    return source if callable(source) else _usable(source)


def _usable(namespace: Any) -> str:
    if not isinstance(namespace, str):
        raise ImproperlyConfigured(f"ADVISORY_LOCK_NAMESPACE must be or return text, not {namespace!r}.")
    if UNUSABLE_TEXT.search(namespace):
        raise ImproperlyConfigured(
            f"ADVISORY_LOCK_NAMESPACE must not contain U+001D to U+001F or lone surrogates: {namespace!r}."
        )
    return str.__str__(namespace)  # a member of a str enum differs from its text in how it is formatted


def session_pooler_aliases() -> frozenset[str]:
    """Return the aliases in `ADVISORY_LOCK_SESSION_POOLER`: those behind a connection pooler in session mode."""
    aliases = _setting("ADVISORY_LOCK_SESSION_POOLER", ())
    if aliases == ():
        return frozenset()
    if not isinstance(aliases, (list, tuple, set, frozenset)) or not all(isinstance(alias, str) for alias in aliases):
        raise ImproperlyConfigured(
            f"ADVISORY_LOCK_SESSION_POOLER must be a list of database aliases, such as ['default'], not {aliases!r}."
        )
    return frozenset(aliases)


def get_slow_wait() -> float:
    """Return the seconds after which a wait counts as slow: `ADVISORY_LOCK_SLOW_WAIT`, seconds or a timedelta, else 5.

    Where the setting is None, no wait is slow: infinity is returned.
    """
    slow: Any = _setting("ADVISORY_LOCK_SLOW_WAIT", 5)
    seconds = math.inf if slow is None else slow.total_seconds() if isinstance(slow, timedelta) else slow
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ImproperlyConfigured(
            f"ADVISORY_LOCK_SLOW_WAIT must be seconds or a timedelta, at least 0, or None for never, not {slow!r}."
        )
    return float(seconds)


def _import_callable(path: str) -> Callable[[], Any]:
    """Import what ADVISORY_LOCK_NAMESPACE points to."""
    try:
        target = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"ADVISORY_LOCK_NAMESPACE reads as a dotted path, but {path!r} cannot be imported ({error}). "
            "Text with dots in it comes from a callable, or is spelt with another separator."
        ) from error
    if not callable(target):
        raise ImproperlyConfigured(f"ADVISORY_LOCK_NAMESPACE: {path!r} must be a callable, not {target!r}.")
    return target  # type: ignore[no-any-return]
