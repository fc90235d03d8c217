"""The settings of the web servers of the tests: three ways to keep connections, and a transaction for every request.

A view says on which alias its requests are transactions; `tests.locked_views` has each both ways.
"""

import os
from typing import Any

from tests.settings import DEFAULT_AUTO_FIELD, INSTALLED_APPS, SECRET_KEY, USE_TZ, mirror

__all__ = ["DATABASES", "DEFAULT_AUTO_FIELD", "INSTALLED_APPS", "SECRET_KEY", "USE_TZ"]

ROOT_URLCONF = "tests.locked_views"
ALLOWED_HOSTS = ["*"]
POOL_SIZE = 4


def alias(name: str, options: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """Return an alias whose sessions tell which server and which alias they belong to."""
    application_name = f"{os.environ.get('WEB_NAME', 'web')}-{name}"
    return mirror({**(options or {}), "application_name": application_name}, ATOMIC_REQUESTS=True, **extra)


DATABASES = {
    "default": alias("default", CONN_MAX_AGE=0),
    "persistent": alias("persistent", CONN_MAX_AGE=None),
    "pooled": alias("pooled", {"pool": {"min_size": 0, "max_size": POOL_SIZE, "timeout": 15}}),
}
