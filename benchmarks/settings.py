"""The settings of the benchmarks: a module with one database, as most projects have, and DEBUG off."""

from testproject.embedded_postgres import database_settings

SECRET_KEY = "benchmarks"
USE_TZ = True
DATABASES = {"default": database_settings()}
