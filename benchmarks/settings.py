"""The settings of the benchmarks: a module with one database, as most projects have, and DEBUG off."""

from importlib.util import find_spec

from testproject.embedded_postgres import database_settings

SECRET_KEY = "benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
# django-pglock asks for both of its own.
INSTALLED_APPS = ["django_advisory_lock", *(app for app in ("pgactivity", "pglock") if find_spec(app))]
DATABASES = {"default": database_settings()}
