"""The settings of the tests."""

from typing import Any

from testproject.embedded_postgres import database_settings

SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django_advisory_lock",
    "tests.testapp",
]


def database(options: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """Return one more alias on the server of the tests."""
    entry = database_settings()
    return {**entry, **extra, "OPTIONS": {**entry.get("OPTIONS", {}), **(options or {})}}


def mirror(options: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """Return one more alias of the default database."""
    return database(options, TEST={"MIRROR": "default"}, **extra)


DATABASES = {
    "default": database(),
    "same": mirror(),
    "other": database(TEST={"NAME": "test_advisory_lock_other", "DEPENDENCIES": []}),
    "pooled": mirror({"pool": {"min_size": 1, "max_size": 1, "timeout": 5}}),
    "binding": mirror({"server_side_binding": True}),
    "prepared": mirror({"prepare_threshold": 0}),
    "serializable": mirror({"isolation_level": 4}),
    "persistent": mirror(CONN_MAX_AGE=None),
    "healthy": mirror(CONN_HEALTH_CHECKS=True),
    "sqlite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
}
