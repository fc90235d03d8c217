"""The settings of a worker, which the plan of the run makes."""

from tests.soak import plan

SECRET_KEY = "soak"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ALLOWED_HOSTS = ["testserver"]
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_advisory_lock"]
DATABASES = plan.read().databases
ADVISORY_LOCK_SESSION_POOLER = [plan.BY_SESSION]
