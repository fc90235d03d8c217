from __future__ import annotations

from django.urls import path

from . import views

app_name = "shop"
urlpatterns = [
    path("", views.Overview.as_view(), name="overview"),
    path("reports/<month:month>/", views.Month.as_view(), name="month"),
    path("reports/<month:month>/orders.csv", views.export, name="export"),
    path("accounts/", views.Accounts.as_view(), name="accounts"),
    path("accounts/<int:pk>/sync/", views.sync, name="sync"),
]
