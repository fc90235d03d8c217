from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="PeriodicRun",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("key", models.CharField(editable=False, max_length=50, unique=True, verbose_name="key")),
                ("name", models.TextField(verbose_name="name")),
                ("last_started_at", models.DateTimeField(blank=True, null=True, verbose_name="last started at")),
                ("last_finished_at", models.DateTimeField(blank=True, null=True, verbose_name="last finished at")),
                ("last_succeeded_at", models.DateTimeField(blank=True, null=True, verbose_name="last succeeded at")),
                (
                    "last_outcome",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("started", "started, not finished"),
                            ("succeeded", "succeeded"),
                            ("failed", "failed"),
                        ],
                        max_length=20,
                        verbose_name="last outcome",
                    ),
                ),
                ("last_error", models.TextField(blank=True, verbose_name="last error")),
                ("last_host", models.CharField(blank=True, max_length=255, verbose_name="last host")),
                ("last_pid", models.PositiveIntegerField(blank=True, null=True, verbose_name="last pid")),
                ("min_interval", models.DurationField(verbose_name="minimum interval")),
                ("run_count", models.PositiveBigIntegerField(default=0, verbose_name="number of runs")),
            ],
            options={
                "verbose_name": "periodic run",
                "verbose_name_plural": "periodic runs",
                "ordering": ("name",),
            },
        ),
        migrations.CreateModel(
            name="HeldLock",
            fields=[
                ("pid", models.IntegerField(primary_key=True, serialize=False, verbose_name="process")),
                ("session", models.TextField(blank=True, verbose_name="session")),
            ],
            options={
                "verbose_name": "advisory lock",
                "verbose_name_plural": "advisory locks",
                "permissions": (("end_session", "Can end a session that holds or waits for an advisory lock"),),
                "managed": False,
                "default_permissions": ("view",),
                "base_manager_name": "objects",
            },
        ),
    ]
