"""One model for each kind of primary key."""

from __future__ import annotations

import uuid

from django.db import models


class Account(models.Model):
    id = models.BigAutoField(primary_key=True)
    name = models.CharField(max_length=50, blank=True)
    balance = models.IntegerField(default=0)


class AccountProxy(Account):
    class Meta:
        proxy = True


class PremiumAccount(Account):
    """A multi-table child: its primary key is the link to its parent."""

    tier = models.CharField(max_length=10, default="gold")


class Profile(models.Model):
    """Its primary key is a foreign key."""

    account = models.OneToOneField(Account, on_delete=models.CASCADE, primary_key=True)


class Token(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)


class Country(models.Model):
    code = models.CharField(max_length=50, primary_key=True)


class Legacy(models.Model):
    """A NUMERIC primary key, as `inspectdb` finds them."""

    number = models.DecimalField(max_digits=20, decimal_places=2, primary_key=True)


class Reading(models.Model):
    """Its primary key is a moment."""

    at = models.DateTimeField(primary_key=True)


class Membership(models.Model):
    pk = models.CompositePrimaryKey("account_id", "group")
    account = models.ForeignKey(Account, on_delete=models.CASCADE)
    group = models.CharField(max_length=50)


class Stamped(models.Model):
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        abstract = True


class Tag(models.Model):
    label = models.CharField(max_length=50)

    def __str__(self) -> str:
        return self.label


class Essay(models.Model):
    """One field for each kind of widget in a form."""

    class Kind(models.TextChoices):
        DAILY = "daily"
        MONTHLY = "monthly"

    title = models.CharField(max_length=100)
    slug = models.SlugField(blank=True)
    body = models.TextField(blank=True)
    is_public = models.BooleanField(default=False)
    kind = models.CharField(max_length=10, choices=Kind, default=Kind.DAILY)
    main_tag = models.ForeignKey(Tag, on_delete=models.SET_NULL, null=True, blank=True, related_name="+")
    tags = models.ManyToManyField(Tag, blank=True)
    internal = models.CharField(max_length=20, blank=True)

    def __str__(self) -> str:
        return self.title


class Line(models.Model):
    essay = models.ForeignKey(Essay, on_delete=models.CASCADE)
    text = models.CharField(max_length=50)
