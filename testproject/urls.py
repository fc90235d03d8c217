from __future__ import annotations

from django.contrib import admin
from django.contrib.staticfiles.views import serve
from django.http import HttpResponse
from django.urls import include, path

from testproject.shop.api import router

urlpatterns = [
    path("", include("testproject.shop.urls")),
    path("api/", include((router.urls, "api"))),
    path("admin/", admin.site.urls),
    # The admin's pages name no icon, so every browser asks for this one.
    path("favicon.ico", lambda request: HttpResponse(status=204)),
    # For servers other than runserver, which has its own way: no page of this project is without its style.
    path("static/<path:path>", serve, {"insecure": True}),
]
