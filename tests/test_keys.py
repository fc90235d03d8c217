import copy
import enum
import itertools
import os
import pickle
import random
import subprocess
import sys
import uuid
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db import connection, models
from django.db.models import F, Value
from django.test import override_settings
from django.test.utils import isolate_apps
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy

from django_advisory_lock.keys import LockKey, crc32_key, derive, lock_key, model_key, read_parts
from tests.testapp.models import (
    Account,
    AccountProxy,
    Country,
    Legacy,
    Membership,
    PremiumAccount,
    Profile,
    Reading,
    Stamped,
    Token,
)

# Without the mark that opens the database, pytest-django fails every query: no derivation sends one.

UUID_1 = uuid.UUID("0189dcd5-3f6b-7c2e-a1b2-c3d4e5f60718")
SHA256_IN_SQL = "('x'||substr(encode(sha256(convert_to({text},'UTF8')),'hex'),1,{digits}))::bit({bits})::{type}"


class Job(enum.IntEnum):
    SYNC = 7


class Kind(str, enum.Enum):
    MONTHLY = "monthly"


class Color(models.TextChoices):
    RED = "red", gettext_lazy("Red")


class Odd(enum.Enum):
    NOTHING = None
    EMPTY = ""
    YES = True
    RATIO = 0.5
    LIST = frozenset([1])
    NUMBER = 12
    PARTS = ("report", 42)
    DAY = date(2026, 9, 1)
    OTHER = Kind.MONTHLY


class Name(str):
    def __str__(self):
        return "something else"


class Count(int):
    def __repr__(self):
        return "something else"

    __str__ = __repr__


@pytest.fixture
def shop_account():
    with isolate_apps("tests.testapp"):

        class Account(models.Model):
            class Meta:
                app_label = "shop"

        yield Account


class TestLockKey:
    @pytest.mark.parametrize(
        "args", [(0,), (-(2**63),), (2**63 - 1,), (0, 0), (-(2**31), 2**31 - 1), (2**31 - 1, -(2**31))]
    )
    def test_numbers_at_the_edges(self, args):
        assert LockKey(args).args == args

    @pytest.mark.parametrize(
        "args", [(-(2**63) - 1,), (2**63,), (10**5000,), (2**31, 0), (0, 2**31), (-(2**31) - 1, 0), (0, -(2**31) - 1)]
    )
    def test_numbers_out_of_range(self, args):
        with pytest.raises(ValueError):
            LockKey(args)

    @pytest.mark.parametrize("args", [(), (1, 2, 3), [1], 1, None, ("1",), (1.0,), (True,), (1, False), (Decimal(1),)])
    def test_what_is_no_pair_of_ints(self, args):
        with pytest.raises(TypeError, match="LockKey"):
            LockKey(args)

    def test_pair(self):
        assert LockKey.pair(1, -2).args == (1, -2)
        assert LockKey.pair(1, 2) != LockKey.pair(2, 1)
        assert LockKey.pair(0, 8) != lock_key(8)
        with pytest.raises(ValueError, match="32 signed bits"):
            LockKey.pair(2**31, 1)

    def test_numbers_become_plain_ints(self):
        key = LockKey((Job.SYNC, Count(5)))
        assert [type(number) for number in key.args] == [int, int]
        assert key.name == "(7, 5)"

    def test_the_name_does_not_count(self):
        one, two = LockKey((1,), "one"), LockKey((1,), "two")
        assert one == two
        assert hash(one) == hash(two)
        assert not one < two
        assert len({one, two}) == 1

    def test_names_and_texts(self):
        assert (str(lock_key(-5)), str(LockKey.pair(1, 2)), str(lock_key("report", 42))) == (
            "-5",
            "(1, 2)",
            "report:42",
        )
        assert repr(lock_key("report")) == "LockKey(args=(-8908523020745054052,), name='report')"

    def test_frozen(self):
        key = lock_key(1)
        with pytest.raises(AttributeError):
            key.args = (2,)  # type: ignore[misc]
        with pytest.raises(AttributeError):
            del key.name

    @pytest.mark.parametrize("key", [lock_key("é", 1, namespace=""), LockKey.pair(1, -2)])
    def test_copies_and_pickles(self, key):
        for twin in (copy.copy(key), copy.deepcopy(key), *(pickle.loads(pickle.dumps(key, p)) for p in range(6))):
            assert (twin, twin.name) == (key, key.name)

    def test_the_order_is_total(self):
        numbers = random.Random(1).sample(range(-(2**31), 2**31), 40)
        keys = [LockKey((a,)) for a in numbers[:20]] + [
            LockKey.pair(a, b) for a, b in itertools.product(numbers[:5], repeat=2)
        ]
        shuffled = random.Random(2).sample(keys, len(keys))
        assert sorted(shuffled) == sorted(keys) == sorted(keys, key=lambda key: key.args)
        for a, b in itertools.product(keys, repeat=2):
            assert (a < b) + (a == b) + (a > b) == 1

    @pytest.mark.parametrize(
        ("key", "columns"),
        [
            (LockKey((-1,)), (4294967295, 4294967295, 1)),
            (LockKey((42,)), (0, 42, 1)),
            (LockKey((2**32,)), (1, 0, 1)),
            (LockKey((-(2**63),)), (2**31, 0, 1)),
            (LockKey.pair(1, 2), (1, 2, 2)),
            (LockKey.pair(-1, -(2**31)), (4294967295, 2**31, 2)),
        ],
    )
    def test_pg_locks(self, key, columns):
        assert key.pg_locks == columns
        assert LockKey.from_pg_locks(*columns) == key

    def test_pg_locks_there_and_back(self):
        pick = random.Random(3).randint
        for _ in range(500):
            for key in (
                LockKey((pick(-(2**63), 2**63 - 1),)),
                LockKey.pair(pick(-(2**31), 2**31 - 1), pick(-(2**31), 2**31 - 1)),
            ):
                assert LockKey.from_pg_locks(*key.pg_locks) == key


class TestGoldenValues:
    """A promise: another release, another language and psql find the same numbers."""

    @pytest.mark.parametrize(
        ("parts", "namespace", "number"),
        [
            (("nightly-report",), "", 7440995589958059143),
            (("account-sync", 42), "", 2143988575447157952),
            (("é",), "", 5375421630974772051),
            (("nightly-report",), "shop", -6461420283524574146),
        ],
    )
    def test_text(self, parts, namespace, number):
        assert lock_key(*parts, namespace=namespace).args == (number,)

    def test_crc32(self):
        assert crc32_key("account-sync-42").args == (124136801,)
        assert crc32_key("é").args == (235179326,)
        assert crc32_key("a").args == (0xE8B7BE43,)  # beyond 31 bits, and unsigned all the same

    def test_model(self, shop_account):
        assert model_key(shop_account, pk=42).args == (1439191994, 42)
        assert model_key(shop_account, pk=42, purpose="sync").args == (1990027054, 42)
        assert model_key(shop_account, pk=42, namespace="shop").args == (1513294602, 42)
        assert model_key(shop_account).args == (6181282549562123626,)
        assert model_key(shop_account, pk=2**31).args == (8376619087556528385,)
        assert model_key(shop_account, pk=-1).args == (-6605767634814973547,)

    def test_model_with_other_primary_keys(self):
        assert model_key(Token, pk=UUID_1).args == (-7866600434875716746,)
        assert model_key(Country, pk="é").args == (2587220729104727367,)
        assert model_key(Membership, pk=(1, "admins")).args == (-9052359337906107032,)


class TestTextKeys:
    def test_case_49_parts_are_delimited(self):
        assert len({lock_key("a", "bc"), lock_key("ab", "c"), lock_key("abc"), lock_key("a", "b", "c")}) == 4

    def test_case_49_distinct_parts_give_distinct_keys_in_range(self):
        pick = random.Random(4)
        alphabet = ["a", "b", ":", "|", "\x00", "\x1c", "\x20", "é", "e\u0301", "\U0001f512", "1", "-"]
        seen: dict[object, object] = {}
        for _ in range(3000):
            parts = tuple("".join(pick.choices(alphabet, k=pick.randint(1, 4))) for _ in range(pick.randint(1, 3)))
            (number,) = lock_key(*parts).args
            assert -(2**63) <= number < 2**63
            assert seen.setdefault(number, parts) == parts

    def test_case_49_text_is_taken_as_it_is(self):
        assert lock_key("é") != lock_key("e\u0301"), "no Unicode normalisation"
        assert lock_key("a") != lock_key("A")
        assert lock_key("a") != lock_key("a ")

    def test_case_49_other_types_are_spelt_as_text(self):
        assert lock_key("report", 42) == lock_key("report", "42")
        assert lock_key("report", -1) == lock_key("report", "-1")
        assert lock_key("t", UUID_1) == lock_key("t", str(UUID_1))
        assert lock_key("t", date(2026, 9, 1)) == lock_key("t", "2026-09-01")
        assert lock_key("t", datetime(2026, 9, 1, 6)) == lock_key("t", "2026-09-01T06:00:00")
        moment = datetime(2026, 9, 1, 6, tzinfo=timezone.utc)
        assert lock_key("t", moment) == lock_key("t", "2026-09-01T06:00:00+00:00")
        assert lock_key(UUID_1) == lock_key(str(UUID_1))

    def test_case_46_one_int_is_a_key_and_text_is_not(self):
        assert lock_key(12).args == (12,)
        assert lock_key("12") != lock_key(12)
        assert lock_key("12").name == "12"

    def test_case_46_digests_cover_the_signed_range(self):
        numbers = [lock_key(f"text {i}").args[0] for i in range(200)]
        assert min(numbers) < -(2**62) < 2**62 < max(numbers)

    @pytest.mark.parametrize("number", [0, -1, -(2**63), 2**63 - 1])
    def test_case_46_ints_at_the_edges(self, number):
        assert lock_key(number).args == (number,)

    @pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
    def test_case_46_ints_out_of_range(self, number):
        with pytest.raises(ValueError, match="out of the range of 64 signed bits"):
            lock_key(number)

    @pytest.mark.parametrize("part", [True, False, 1.5, float("nan"), Decimal(1), b"12", bytearray(b"12")])
    @pytest.mark.parametrize("before", [(), ("name",), (1,)])
    def test_case_46_numbers_and_bytes_that_are_no_ints(self, before, part):
        with pytest.raises(TypeError, match=f"{type(part).__name__} cannot be part of a key"):
            lock_key(*before, part)

    @pytest.mark.parametrize("parts", [(), ((),), (None,), ((None,),), ("a", None), ("",), ("a", ""), (("a", ""),)])
    def test_case_29_nothing_is_no_key(self, parts):
        with pytest.raises(ValueError, match="part"):
            lock_key(*parts)

    @pytest.mark.parametrize("text", ["a\x1db", "\x1e", "a\x1f", "\ud800", "a\udfff"])
    def test_text_that_delimits_or_has_no_utf8(self, text):
        for parts in ((text,), ("a", text), ((text, "a"),)):
            with pytest.raises(ValueError, match=r"must not contain U\+001D to U\+001F or lone surrogates"):
                lock_key(*parts)
        with pytest.raises(ValueError, match="namespace must not"):
            lock_key("a", namespace=text)
        with pytest.raises(ValueError, match="purpose must not"):
            model_key(Account, purpose=text)

    @pytest.mark.parametrize(
        ("part", "advice"),
        [
            ([1], "items as parts"),
            ({1}, "items as parts"),
            ({"a": 1}, "items as parts"),
            ((1, "a"), "items as parts"),
            (LockKey((1,)), "pass it alone"),
            (Account(pk=1), r"pass model_key\(instance, purpose=…\)"),
            (SimpleLazyObject(lambda: Account(pk=1)), r"pass model_key\(instance, purpose=…\)"),
            (Account, r"^Account cannot .* model_key\(Model, pk=…\)"),
            (str, "^str cannot .* its name"),
            (len, "^len cannot .* decorator"),
            (lambda account: account, "decorator"),
            (gettext_lazy("Report"), "active language"),
            (1.5, "written the way you mean it"),
            (True, "on or off"),
            (b"x", "decode"),
            (time(6), "stands for it"),
            (timedelta(1), "stands for it"),
            (object(), "stands for it"),
            (Account.objects.all(), "^QuerySet cannot .* stands for it"),
        ],
    )
    def test_what_is_refused_with_what_to_pass_instead(self, part, advice):
        with pytest.raises(TypeError, match=advice):
            lock_key("name", part)

    @pytest.mark.parametrize("parts", [(1, 2), ((1, 2),), (1, 2, 3), (Job.SYNC, 1), (Odd.NUMBER, Odd.NUMBER)])
    def test_only_ints_could_mean_two_things(self, parts):
        with pytest.raises(TypeError, match=r"LockKey\.pair"):
            lock_key(*parts)

    def test_one_tuple_is_its_parts(self):
        assert lock_key(("report", 42)) == lock_key("report", 42)
        assert lock_key(("report",)) == lock_key("report")
        assert lock_key((5,)) == lock_key(5)
        assert lock_key((LockKey.pair(1, 2),)) == LockKey.pair(1, 2)
        assert lock_key((Account(pk=1),)) == model_key(Account, pk=1)
        with pytest.raises(TypeError, match="tuple cannot"):
            lock_key((("report", 42),))  # type: ignore[arg-type]

    def test_enum_members_count_as_their_value(self):
        assert lock_key(Job.SYNC) == lock_key(7)
        assert lock_key("job", Job.SYNC) == lock_key("job", 7)
        assert lock_key("job", Kind.MONTHLY) == lock_key("job", "monthly") == lock_key("job", Odd.OTHER)
        assert lock_key("job", Color.RED) == lock_key("job", "red")  # type: ignore[arg-type]
        assert lock_key("job", Odd.NUMBER) == lock_key("job", 12)
        assert lock_key("job", Odd.DAY) == lock_key("job", "2026-09-01")
        assert lock_key(Odd.PARTS) == lock_key("report", 42)
        assert lock_key("job", Kind.MONTHLY).name == "job:monthly"

    @pytest.mark.parametrize("member", [Odd.NOTHING, Odd.EMPTY, Odd.YES, Odd.RATIO, Odd.LIST, Odd.PARTS])
    def test_an_enum_member_is_refused_as_its_value_is(self, member):
        for part in (member, member.value):
            with pytest.raises((TypeError, ValueError)):
                lock_key("name", part)

    def test_subclasses_count_as_what_they_are(self):
        assert lock_key(mark_safe("report")) == lock_key("report")
        assert str(Name("report")) == str(Count(5)) == "something else"
        assert lock_key(Name("report")) == lock_key("report")
        assert lock_key("report", Count(5)) == lock_key("report", 5)
        assert lock_key(Count(5)) == lock_key(5)
        assert lock_key(Name("report"), Count(5)).name == "report:5"

    def test_a_lock_key_is_itself(self):
        key = LockKey.pair(1, 2)
        assert lock_key(key) is key
        assert lock_key(key, namespace="shop") is key

    def test_names_are_for_people(self):
        assert lock_key("report", 42).name == "report:42"
        assert lock_key("a\nb\x1b[31m\u202e", "é 🔒").name == r"a\nb\x1b[31m\u202e:é 🔒"
        assert lock_key("report", 42, namespace="shop").name == "shop/report:42"
        assert lock_key("report", namespace="a\tb").name == r"a\tb/report"


class TestCrc32:
    def test_text(self):
        assert crc32_key("a\nb").name == r"a\nb"
        assert crc32_key(Kind.MONTHLY) == crc32_key("monthly") == crc32_key(mark_safe("monthly"))

    def test_no_namespace_applies(self):
        with override_settings(ADVISORY_LOCK_NAMESPACE="shop"):
            assert crc32_key("account-sync-42").args == (124136801,)

    @pytest.mark.parametrize("value", [None, 42, b"text", Job.SYNC, gettext_lazy("text"), ("a", "b")])
    def test_not_text(self, value):
        with pytest.raises(TypeError, match="crc32_key"):
            crc32_key(value)

    @pytest.mark.parametrize("value", ["", "\ud800"])
    def test_no_usable_text(self, value):
        with pytest.raises(ValueError):
            crc32_key(value)


class TestValidate:
    @pytest.mark.parametrize("parts", [("a",), (1,), (("a", 1),), (LockKey.pair(1, 2),), (Account(pk=1),)])
    def test_accepted(self, parts):
        with override_settings(ADVISORY_LOCK_NAMESPACE=None):  # it would be refused if it were asked
            source = read_parts(parts)
        assert derive(source) == lock_key(*parts)

    @pytest.mark.parametrize("parts", [(), (None,), (1, 2), (2**63,), (Account(),), (Account,), (1.5,), ("\x1f",)])
    def test_refused(self, parts):
        with pytest.raises((TypeError, ValueError)):
            read_parts(parts)


class TestNamespace:
    def test_it_makes_other_keys_of_texts_and_models(self):
        for make in (
            lambda **kw: lock_key("a", **kw),
            lambda **kw: model_key(Account, pk=1, **kw),
            lambda **kw: model_key(Account, **kw),
        ):
            assert len({make(), make(namespace="a"), make(namespace="b")}) == 3
            assert make(namespace="") == make(namespace=None) == make()

    def test_it_cannot_be_forged(self):
        assert lock_key("b", namespace="a") != lock_key("a", "b") != lock_key("a/b")

    def test_raw_numbers_are_untouched(self):
        for key in (lock_key(5, namespace="shop"), lock_key(LockKey.pair(0, 5), namespace="shop")):
            assert key.args[-1] == 5
        assert lock_key(5, namespace="shop").name == "5"
        with override_settings(ADVISORY_LOCK_NAMESPACE="shop"):
            assert lock_key(5).args == (5,)
            assert lock_key(LockKey.pair(1, 2)) == LockKey.pair(1, 2)

    def test_case_52_tenants_do_not_meet_and_global_jobs_do(self):
        tenants = iter(["t1", "t2", "t1", "t2"])
        with override_settings(ADVISORY_LOCK_NAMESPACE=lambda: next(tenants)):
            assert lock_key("command") != lock_key("command")
            assert model_key(Account, pk=1).args[0] != model_key(Account, pk=1).args[0]
            assert lock_key("command", namespace="") == lock_key("command", namespace="")
        with override_settings(ADVISORY_LOCK_NAMESPACE="shop"):
            assert lock_key("a") == lock_key("a", namespace="shop") != lock_key("a", namespace="")
            assert lock_key(Account(pk=1)) == model_key(Account(pk=1), namespace="shop")
            assert model_key(Account, pk=1).name == "shop/testapp.account:1"

    @pytest.mark.parametrize("value", [1, b"shop", ["shop"], gettext_lazy("shop"), Job.SYNC])
    def test_not_text(self, value):
        with pytest.raises(TypeError, match="namespace must be text"):
            lock_key("a", namespace=value)

    def test_a_member_of_a_text_enum(self):
        assert lock_key("a", namespace=Kind.MONTHLY) == lock_key("a", namespace="monthly")


class TestModelKeys:
    def test_a_small_int_makes_a_pair(self):
        key = model_key(Account(pk=42))
        assert len(key.args) == 2
        assert key.args[1] == 42
        assert key == model_key(Account, pk=42) == lock_key(Account(pk=42))
        assert key != model_key(Account, pk=43)
        assert (key.name, str(key)) == ("testapp.account:42", "testapp.account:42")

    def test_rows_of_a_model_never_collide(self):
        assert len({model_key(Account, pk=pk) for pk in range(5000)}) == 5000

    @pytest.mark.parametrize("pk", [0, 2**31 - 1])
    def test_case_47_the_edges_of_the_pair(self, pk):
        assert model_key(Account, pk=pk).args[1] == pk

    @pytest.mark.parametrize("pk", [2**31, 2**40, 2**63, -1, -(2**31), -(2**63)])
    def test_case_47_other_ints_are_hashed(self, pk):
        key = model_key(Account(pk=pk))
        assert len(key.args) == 1
        assert key == model_key(Account, pk=str(pk))
        neighbours = [model_key(Account, pk=pk + 1), model_key(Account, pk=pk % 2**31), lock_key("testapp.account", pk)]
        assert len({key, *neighbours}) == 4
        assert key.name == f"testapp.account:{pk}"

    def test_purposes(self):
        keys = {model_key(Account, pk=1, purpose=purpose) for purpose in ("", "sync", "mail")}
        assert len(keys) == 3
        assert model_key(Account, pk=1, purpose=Kind.MONTHLY) == model_key(Account, pk=1, purpose="monthly")
        assert model_key(Account, pk=1, purpose="sync").name == "testapp.account[sync]:1"
        assert model_key(Account, pk=-1, purpose="sync").name == "testapp.account[sync]:-1"

    @pytest.mark.parametrize("purpose", [None, 1, b"sync", gettext_lazy("sync")])
    def test_purposes_are_text(self, purpose):
        with pytest.raises(TypeError, match="purpose must be text"):
            model_key(Account, pk=1, purpose=purpose)

    def test_the_model_as_a_whole(self):
        whole = model_key(Account)
        assert len(whole.args) == 1
        assert whole.name == "testapp.account"
        assert whole == model_key(AccountProxy) != model_key(PremiumAccount)
        assert model_key(Account, purpose="sync") != whole
        assert model_key(Account, purpose="sync").name == "testapp.account[sync]"

    def test_case_55_proxy_and_deferred_are_the_concrete_row(self):
        key = model_key(Account, pk=42)
        deferred = Account.from_db("default", ["id"], [42])
        assert deferred.get_deferred_fields() == {"name", "balance"}
        assert key == model_key(AccountProxy(pk=42)) == model_key(AccountProxy, pk=42) == model_key(deferred)

    def test_case_55_a_multi_table_child_has_its_own(self):
        child = PremiumAccount(pk=42)
        assert model_key(child) == model_key(PremiumAccount, pk="42") != model_key(Account, pk=42)
        assert model_key(child).args[1] == 42

    def test_case_55_a_swapped_user_model_goes_by_its_own_label(self):
        class Meta:
            app_label = "testapp"
            swappable = "AUTH_USER_MODEL"

        with isolate_apps("tests.testapp"):
            swapped = type("OldUser", (models.Model,), {"Meta": Meta, "__module__": __name__})
        assert swapped._meta.swapped  # type: ignore[attr-defined]
        assert model_key(swapped, pk=1).name == "testapp.olduser:1"
        assert model_key(User(pk=1)).name == "auth.user:1"

    def test_case_55_lazy_objects_such_as_request_user(self):
        lazy: Any = SimpleLazyObject(lambda: User(pk=1))
        assert model_key(lazy) == model_key(User, pk=1)
        assert lock_key(lazy) == model_key(User, pk=1)

    def test_case_56_uuids_in_any_spelling(self):
        spellings = [UUID_1, str(UUID_1), str(UUID_1).upper(), UUID_1.hex, f"{{{UUID_1}}}", UUID_1.urn, UUID_1.int]
        assert len({model_key(Token, pk=pk) for pk in spellings}) == 1
        assert model_key(Token(pk=UUID_1)) == model_key(Token(pk=UUID_1.hex)) == model_key(Token, pk=UUID_1)
        assert model_key(Token(pk=UUID_1)).name == f"testapp.token:{UUID_1}"

    def test_case_56_ints_in_any_spelling(self):
        spellings = [42, "42", " 42 ", "042", Decimal(42), Decimal("42.0"), Count(42), mark_safe("42")]
        assert {model_key(Account, pk=pk) for pk in spellings} == {model_key(Account, pk=42)}
        assert model_key(Account, pk=Job.SYNC) == model_key(Account, pk=7)

    def test_case_56_text(self):
        assert model_key(Country, pk=42) == model_key(Country, pk="42")
        assert len(model_key(Country, pk="42").args) == 1
        assert len({model_key(Country, pk=pk) for pk in ("a", "A", "a ", "a:", "é", "e\u0301")}) == 6
        assert model_key(Country, pk="a\nb").name == r"testapp.country:a\nb"

    def test_case_56_text_cannot_forge_another_key(self):
        assert model_key(Country, pk="x:42") != model_key(Country, pk="x", purpose="42")
        for text in ("\x1d", "a\x1e", "a\x1fb", "\ud800", ""):
            with pytest.raises(ValueError):
                model_key(Country, pk=text)

    def test_case_56_composite(self):
        key = model_key(Membership(account_id=1, group="admins"))
        assert len(key.args) == 1
        assert key == model_key(Membership, pk=(1, "admins")) == model_key(Membership, pk=["1", "admins"])
        assert key == model_key(Membership, pk=(Decimal(1), "admins"))
        assert len({key, model_key(Membership, pk=(11, "admins")), model_key(Membership, pk=(1, "1,admins"))}) == 3
        assert key.name == "testapp.membership:1,admins"

    @pytest.mark.parametrize("pk", [1, "1", (1,), (1, "a", "b"), (None, "a"), (1, None), (1, ""), (1, "\x1f"), None])
    def test_case_56_what_is_no_composite_key(self, pk):
        with pytest.raises(ValueError):
            model_key(Membership, pk=pk)

    def test_a_foreign_key_as_primary_key(self):
        assert (
            model_key(Profile(account_id=42))
            == model_key(Profile, pk="42")
            == model_key(Profile(account=Account(pk=42)))
        )
        assert model_key(Profile, pk=42).args[1] == 42

    def test_decimals(self):
        assert model_key(Legacy, pk=Decimal("42.00")) == model_key(Legacy, pk="42") == model_key(Legacy(pk=42))
        assert model_key(Legacy, pk=42).args[1] == 42
        with pytest.raises(TypeError, match="Decimal"):
            model_key(Legacy, pk="42.50")

    def test_a_moment_is_the_same_in_every_time_zone(self):
        moment = datetime(2026, 9, 1, 6, tzinfo=timezone.utc)
        elsewhere = moment.astimezone(timezone(timedelta(hours=2)))
        assert (
            model_key(Reading, pk=moment)
            == model_key(Reading(pk=elsewhere))
            == model_key(Reading, pk="2026-09-01 06:00Z")
        )
        assert model_key(Reading, pk=moment) != model_key(Reading, pk=moment + timedelta(microseconds=1))

    def test_naive_moments(self):
        with override_settings(USE_TZ=False):
            assert model_key(Reading, pk=datetime(2026, 9, 1)).name == "testapp.reading:2026-09-01T00:00:00"

    @pytest.mark.parametrize(
        "instance", [Account(), PremiumAccount(), Profile(), Membership(group="a"), Account(pk=F("id"))]
    )
    def test_case_29_unsaved_instances(self, instance):
        for make in (model_key, lock_key):
            with pytest.raises(ValueError, match="save the instance first"):
                make(instance)

    @pytest.mark.parametrize(
        ("model", "pk"),
        [
            (Account, None),
            (Account, ""),
            (Account, "not a number"),
            (Account, "1.0"),
            (Account, Decimal("1.5")),
            (Account, Decimal("NaN")),
            (Account, Decimal("sNaN")),
            (Account, Decimal("Infinity")),
            (Account, (1,)),
            (Account, [1]),
            (Account, b"1x"),
            (Account, UUID_1),
            (Account, Account(pk=1)),
            (Account, Value(1)),
            (Account, Odd.NOTHING),
            (Country, None),
            (Country, ["a"]),
            (Country, b"a"),
            (Country, Account(pk=1)),
            (Country, object()),
            (Country, F("code")),
            (Country, Country.objects.all()),
            (Token, "no uuid"),
            (Token, 2**128),
            (Legacy, "x"),
            (Reading, date(2026, 9, 1)),
            (Reading, 5),
        ],
    )
    @pytest.mark.filterwarnings("ignore:DateTimeField:RuntimeWarning")
    def test_primary_keys_that_the_field_refuses(self, model, pk):
        with pytest.raises(ValueError):
            model_key(model, pk=pk)

    @pytest.mark.parametrize("model", [Account, Country, Token, Profile])
    @pytest.mark.parametrize("pk", [True, 1.0, gettext_lazy("1"), Odd.YES])
    def test_primary_keys_of_a_type_that_is_refused(self, model, pk):
        with pytest.raises(TypeError, match="cannot be part of a key"):
            model_key(model, pk=pk)

    @pytest.mark.parametrize("pk", [2, 1, None])
    def test_an_instance_has_its_primary_key(self, pk):
        with pytest.raises(TypeError, match="pk="):
            model_key(Account(pk=1), pk=pk)

    @pytest.mark.parametrize("obj", [Stamped, models.Model, str, None, "testapp.account", 42, Account.objects.all()])
    def test_what_is_no_model(self, obj):
        with pytest.raises(TypeError, match=r"model_key\(\) takes"):
            model_key(obj, pk=1)


class TestContentTypes:
    def test_the_row_it_points_to(self):
        assert model_key(ContentType(app_label="testapp", model="account"), pk="42") == model_key(Account, pk=42)
        assert model_key(ContentType(app_label="testapp", model="accountproxy"), pk=42) == model_key(Account, pk=42)
        assert model_key(ContentType(app_label="testapp", model="token"), pk=UUID_1.hex) == model_key(Token, pk=UUID_1)

    def test_without_a_primary_key_two_things_could_be_meant(self):
        content_type = ContentType(pk=5, app_label="testapp", model="account")
        for make in (model_key, lock_key):
            with pytest.raises(TypeError, match="model_class"):
                make(content_type)

    def test_its_own_row(self):
        assert model_key(ContentType, pk=5).name == "contenttypes.contenttype:5"

    def test_case_29_no_row(self):
        for model in ("account", "gone"):
            with pytest.raises(ValueError):
                model_key(ContentType(app_label="testapp", model=model), pk=None)

    def test_a_model_that_is_gone(self):
        gone = ContentType(app_label="testapp", model="gone")
        assert model_key(gone, pk=42).args == model_key(gone, pk="42").args
        assert model_key(gone, pk=42).args[1] == 42
        assert model_key(gone, pk=42).name == "testapp.gone:42"
        assert len(model_key(gone, pk="a").args) == len(model_key(gone, pk=-1).args) == 1
        assert model_key(gone, pk=UUID_1) == model_key(gone, pk=str(UUID_1))
        for pk in (True, (1, 2), 1.5):
            with pytest.raises(TypeError):
                model_key(gone, pk=pk)

    def test_a_model_that_is_gone_had_the_same_keys(self, shop_account):
        gone = ContentType(app_label="shop", model="account")
        for pk in (42, 2**40, -1):
            assert model_key(gone, pk=pk) == model_key(shop_account, pk=pk)


class TestOtherProcesses:
    def run(self, code, **variables):
        environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
        root = str(Path(__file__).parent.parent)
        done = subprocess.run(  # noqa: PLW1510
            [sys.executable, "-W", "error", "-c", code],
            env={**environment, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]), **variables},
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_case_45_no_seed_matters(self):
        code = (
            "import django; django.setup()\n"
            "from tests.testapp.models import Account, Country\n"
            "from django_advisory_lock.keys import lock_key, model_key\n"
            "print(lock_key('é', 7).args, model_key(Account, pk=7).args, model_key(Country, pk='é').args)\n"
        )
        here = f"{lock_key('é', 7).args} {model_key(Account, pk=7).args} {model_key(Country, pk='é').args}\n"
        for seed in ("1", "2"):
            seeded = {"PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8", "DJANGO_SETTINGS_MODULE": "tests.settings"}
            assert self.run(code, **seeded) == here

    def test_before_settings_are_configured(self):
        code = (
            "from django.core.exceptions import ImproperlyConfigured\n"
            "from django_advisory_lock import conf, exceptions\n"
            "from django_advisory_lock.keys import LockKey, crc32_key, lock_key, read_parts\n"
            "read_parts(('nightly-report', 42))\n"
            "print(lock_key('nightly-report', namespace=''), lock_key(5), LockKey.pair(1, 2), crc32_key('a').args[0])\n"
            "try: lock_key('nightly-report')\n"
            "except ImproperlyConfigured as error: print('ADVISORY_LOCK_NAMESPACE' in str(error))\n"
        )
        assert self.run(code) == "nightly-report 5 (1, 2) 3904355907\nTrue\n"


@pytest.mark.django_db
class TestServer:
    def one(self, sql, params=()):
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {sql}", params)
            return cursor.fetchone()[0]

    def hashed(self, texts, delimiters, *, bits=64):
        """What the recipe in the documentation gives: texts with the character of each number between them."""
        text = "%s::text" + "".join(f"||chr({delimiter})||%s::text" for delimiter in delimiters)
        type_name = {64: "bigint", 32: "int"}[bits]
        return self.one(SHA256_IN_SQL.format(text=text, digits=bits // 4, bits=bits, type=type_name), texts)

    def test_the_recipe_as_it_is_documented(self):
        recipe = (
            "('x'||substr(encode(sha256(convert_to('account-sync'||chr(31)||'42','UTF8')),'hex'),1,16))"
            "::bit(64)::bigint"
        )
        assert self.one(recipe) == 2143988575447157952 == lock_key("account-sync", 42).args[0]

    @pytest.mark.parametrize(
        "parts",
        [("nightly-report",), ("é",), ("e\u0301", "ß"), ("鍵", "🔒", 7), ("a\nb", "-1"), ("x" * 1000,), ("%", "'")],
    )
    def test_case_49_texts(self, parts):
        texts = [str(part) for part in parts]
        assert self.hashed(texts, [31] * (len(parts) - 1)) == lock_key(*parts).args[0]
        assert (
            self.hashed(["größe", *texts], [30] + [31] * (len(parts) - 1))
            == lock_key(*parts, namespace="größe").args[0]
        )

    def test_models(self):
        label = "testapp.account"
        assert self.hashed([label], [], bits=32) == model_key(Account, pk=42).args[0]
        assert self.hashed([label, "sync"], [31], bits=32) == model_key(Account, pk=42, purpose="sync").args[0]
        assert self.hashed(["shop", label], [30], bits=32) == model_key(Account, pk=42, namespace="shop").args[0]
        assert self.hashed([label], []) == model_key(Account).args[0]
        assert self.hashed([label, str(2**31)], [29]) == model_key(Account, pk=2**31).args[0]
        assert (
            self.hashed(["n", label, "p", "-1"], [30, 31, 29])
            == model_key(Account, pk=-1, purpose="p", namespace="n").args[0]
        )
        assert self.hashed(["testapp.token", str(UUID_1)], [29]) == model_key(Token, pk=UUID_1).args[0]
        assert self.hashed(["testapp.membership", "1", "é"], [29, 31]) == model_key(Membership, pk=(1, "é")).args[0]

    def test_golden_model(self, shop_account):
        assert self.hashed(["shop.account"], [], bits=32) == 1439191994 == model_key(shop_account, pk=42).args[0]

    @pytest.mark.parametrize(
        "key",
        [
            *(LockKey((number,)) for number in (0, 1, -1, 2**31, 2**32, -(2**32), 2**63 - 1, -(2**63))),
            *(LockKey.pair(*args) for args in ((0, 0), (0, 8), (-1, -1), (2**31 - 1, -(2**31)), (-(2**31), 2**31 - 1))),
            lock_key("nightly-report", namespace="shop"),
            crc32_key("a"),
        ],
        ids=str,
    )
    def test_case_46_pg_locks_shows_these_columns(self, key):
        casts = ["CAST(%s AS bigint)"] if len(key.args) == 1 else ["CAST(%s AS int)"] * 2
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_advisory_xact_lock({', '.join(casts)})", key.args)
            cursor.execute(
                "SELECT classid::bigint, objid::bigint, objsubid FROM pg_locks"
                " WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
            )
            rows = cursor.fetchall()
        assert rows == [key.pg_locks]
        assert LockKey.from_pg_locks(*rows[0]) == key

    @pytest.mark.parametrize("model", [Account, AccountProxy])
    def test_case_55_content_types_from_the_database(self, model):
        content_type = ContentType.objects.get_for_model(model, for_concrete_model=False)
        account = model.objects.create(name="a")
        assert (
            model_key(content_type, pk=account.pk) == model_key(account) == model_key(Account.objects.only("id").get())
        )

    def test_case_29_a_deleted_instance(self):
        account = Account.objects.create()
        key = model_key(account)
        assert key.args[1] == account.pk
        account.delete()
        with pytest.raises(ValueError, match="save the instance first"):
            model_key(account)
