from __future__ import annotations

from django.contrib import admin
from django.contrib.staticfiles.views import serve
from django.urls import include, path

from testproject.shop.api import router

urlpatterns = [
    path("", include("testproject.shop.urls")),
    path("api/", include((router.urls, "api"))),
    path("admin/", admin.site.urls),
    # For servers other than runserver, which has its own way: no page of this project is without its style.
    path("static/<path:path>", serve, {"insecure": True}),
]
