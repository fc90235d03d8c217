"""A database engine of a project's own: each cursor first sets something, as engines for tenants do."""

from __future__ import annotations

from typing import Any

from django.db.backends.postgresql import base


class DatabaseWrapper(base.DatabaseWrapper):
    display_name = "PostgreSQL for tenants"

    def _cursor(self, name: Any = None) -> Any:
        cursor = super()._cursor(name)  # type: ignore[misc]
        cursor.execute("SELECT set_config('search_path', 'public', false)")
        return cursor
