import django.core.validators
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

import testproject.shop.models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Account",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=100)),
                ("email", models.EmailField(max_length=254, unique=True)),
                ("balance", models.DecimalField(decimal_places=2, default=0, max_digits=12)),
                ("synced_at", models.DateTimeField(blank=True, null=True)),
            ],
        ),
        migrations.CreateModel(
            name="MonthlyReport",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "month",
                    models.CharField(
                        max_length=7,
                        unique=True,
                        validators=[django.core.validators.RegexValidator("\\A(19|20)[0-9]{2}-(0[1-9]|1[0-2])\\Z")],
                    ),
                ),
                ("order_count", models.PositiveIntegerField(default=0)),
                ("total", models.DecimalField(decimal_places=2, default=0, max_digits=14)),
                ("computed_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("computed_by_pid", models.PositiveIntegerField(default=testproject.shop.models.this_pid)),
                ("computed_by_host", models.CharField(default=testproject.shop.models.this_host, max_length=255)),
            ],
            options={
                "ordering": ("month",),
            },
        ),
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("placed_at", models.DateTimeField(db_index=True)),
                ("amount", models.DecimalField(decimal_places=2, max_digits=10)),
                (
                    "account",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="orders", to="shop.account"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Run",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("task", models.CharField(max_length=50)),
                ("subject", models.CharField(max_length=50)),
                ("pid", models.PositiveIntegerField(default=testproject.shop.models.this_pid)),
                ("host", models.CharField(default=testproject.shop.models.this_host, max_length=255)),
                ("started_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("finished_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "indexes": [models.Index(fields=["task", "subject"], name="shop_run_task_140641_idx")],
            },
        ),
    ]
