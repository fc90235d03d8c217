"""The reports for other programs, by Django REST framework: `POST /api/reports/2026-09/generate/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.authentication import BasicAuthentication, SessionAuthentication
from rest_framework.decorators import action
from rest_framework.exceptions import NotFound
from rest_framework.permissions import IsAuthenticated
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.serializers import ModelSerializer
from rest_framework.viewsets import ReadOnlyModelViewSet

from django_advisory_lock import AdvisoryLockViewMixin

from .models import MonthlyReport
from .reports import NoOrdersError, generate_report, report_key

if TYPE_CHECKING:
    from rest_framework.request import Request

    from django_advisory_lock import KeyLike


class ReportSerializer(ModelSerializer):  # type: ignore[misc, type-arg, unused-ignore]
    class Meta:
        model = MonthlyReport
        fields = ("month", "order_count", "total", "computed_at", "computed_by_host", "computed_by_pid")


class ReportViewSet(AdvisoryLockViewMixin, ReadOnlyModelViewSet):  # type: ignore[misc, type-arg, unused-ignore]
    """Lists and shows the reports, and computes one. Who may not is told so before any lock is tried."""

    queryset = MonthlyReport.objects.all()
    serializer_class = ReportSerializer
    # Basic first: a stranger is asked who he is (401), not sent away (403).
    authentication_classes = (BasicAuthentication, SessionAuthentication)
    permission_classes = (IsAuthenticated,)
    renderer_classes = (JSONRenderer,)
    lookup_field = "month"
    lookup_value_converter = "month"
    lock_methods = ("POST",)

    def get_lock_key(self) -> KeyLike:
        return report_key(self.kwargs["month"])

    @action(detail=True, methods=["post"])  # type: ignore[untyped-decorator, unused-ignore]
    def generate(self, request: Request, month: str) -> Response:
        try:
            report = generate_report(month)
        except NoOrdersError as error:
            raise NotFound(str(error)) from error
        return Response(self.get_serializer(report).data)


router = SimpleRouter(use_regex_path=False)
router.register("reports", ReportViewSet, basename="report")
