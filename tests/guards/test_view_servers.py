"""Locked views in real servers: requests that are simultaneous, clients that go away, workers that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from django_advisory_lock import LockKey, lock_key
from tests.locked_views import BIG
from tests.support import OtherSession, wait_until
from tests.testapp.models import Account
from tests.web_settings import POOL_SIZE
from tests.webserver import Request, WebServer, answers, first_answers, gunicorn, uvicorn

# How many requests each serves at a time; one worker of gunicorn's may accept what another one has threads for.
CAPACITY = {"sync": 3, "gthread": 2 * 4}
SURELY_AT_ONCE = {"sync": 3, "gthread": 4, "uvicorn": 6}

# What the servers print is looked at, and this is all that may be there.
EXPECTED = re.compile(
    r"""
    ^.*Worker\ \(pid:\d+\)\ was\ sent\ SIG(KILL|ABRT)!.*\n        # gunicorn, whose workers the tests kill
    | ^.*RuntimeWarning:\ The\ lock\ .*\ ends\ with\ the\ transaction,\ before.*\n(\ \ .*\n)*
    | ^.*Warning:\ StreamingHttpResponse\ must\ consume\ synchronous\ iterators.*\n(\ \ .*\n)*  # Django's
    | ^socket\.send\(\)\ raised\ exception\.\n  # asyncio, whose client has gone
    | ^.*ResourceWarning:\ (connection\ )?<psycopg\.Connection.*\ was\ deleted\ while\ still\ open.*\n(\ \ .*\n)*
    # under ASGI, where each request has a thread of its own, Django's persistent connections are dropped with it
    | ^WSGI\ app\ sent\ body\ bytes\ on\ a\ no-body\ response.*\n  # gunicorn, of HEAD
    | ^.*(Error\ handling\ request|Exception\ in\ ASGI\ application).*\n(.*\n)*?.*ZeroDivisionError:\ in\ the\ stream\n
    """,
    re.VERBOSE | re.MULTILINE,
)

on_each = pytest.mark.parametrize("server", ["sync", "gthread", "uvicorn"], indirect=True)
on_gunicorn = pytest.mark.parametrize("server", ["sync", "gthread"], indirect=True)
on_gthread = pytest.mark.parametrize("server", ["gthread"], indirect=True)
on_uvicorn = pytest.mark.parametrize("server", ["uvicorn"], indirect=True)
on_each_alias = pytest.mark.parametrize("using", ["default", "persistent", "pooled"])
# Each server, and each way to keep connections, in the pairs that people use.
PAIRS = [
    ("sync", "default"),
    ("sync", "persistent"),
    ("gthread", "persistent"),
    ("gthread", "pooled"),
    ("uvicorn", "default"),
    ("uvicorn", "pooled"),
]
on_each_pair = pytest.mark.parametrize(("server", "using"), PAIRS, indirect=["server"])
on_each_pair_of_gunicorn = pytest.mark.parametrize(("server", "using"), PAIRS[:4], indirect=["server"])
both_ways = pytest.mark.parametrize("transactions", ["atomic", "plain"])


@pytest.fixture(scope="module")
def servers(django_db_setup: None) -> Iterator[dict[str, Any]]:
    """The servers that run, each started when it is first asked for, until the last test of the module."""
    with contextlib.ExitStack() as stack:
        started: dict[str, Any] = {"stack": stack}
        yield started
        for server in started.values():
            if server is not stack:
                server.send_signal(signal.SIGTERM)  # all at once


def start(servers: dict[str, Any], kind: str) -> WebServer:
    if kind not in servers:
        make: dict[str, Any] = {
            "sync": lambda: gunicorn("sync", workers=3),
            "gthread": lambda: gunicorn("gthread", workers=2, threads=4, worker_class="gthread"),
            "uvicorn": lambda: uvicorn("uvicorn"),
        }
        servers[kind] = servers["stack"].enter_context(make[kind]())
    server: WebServer = servers[kind]
    return server


@pytest.fixture
def server(request: pytest.FixtureRequest, servers: dict[str, Any], other: OtherSession) -> Iterator[WebServer]:
    server = start(servers, request.param)
    yield server
    server.forget_clients()
    assert server.unexpected(EXPECTED) == []


def key(name: str) -> LockKey:
    return lock_key(name)


def statuses(requests: list[Request]) -> list[int]:
    return sorted(answer.status for answer in answers(requests))


def sessions(other: OtherSession, server: WebServer, using: str, state: str = "%") -> int:
    """Count the sessions of a server on an alias."""
    count = other.one(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name = %s AND state LIKE %s",
        [f"{server.name}-{using}", state],
    )
    return int(count)


def wait_for_sessions(other: OtherSession, server: WebServer, using: str, count: int) -> None:
    wait_until(lambda: sessions(other, server, using) >= count, f"{count} sessions")


def rows(name: str) -> int:
    return int(Account.objects.filter(name=name).count())


def let_notice(server: WebServer, name: str) -> None:
    """Let a server of one loop see that clients have gone: what comes later is read later."""
    for _ in range(2):
        assert server.get(f"/default/plain/unlocked/here/{name}").status == 200


class TestSimultaneous:
    @on_each_pair_of_gunicorn
    @both_ways
    def test_the_next_free_number(
        self, server: WebServer, transactions: str, using: str, name: str, other: OtherSession
    ) -> None:
        """Case 83: the lock lasts until the COMMIT, or the next one reads what is not there yet."""
        requests = server.at_once(16, f"/{using}/{transactions}/waiting/number/{name}", "POST")
        server.wait_for(name, "read")
        wait_until(lambda: other.waiters(key(name)) >= SURELY_AT_ONCE[server.name] - 1, "waiters")
        server.open(name, "read")
        assert sorted(int(answer.body) for answer in answers(requests)) == list(range(1, 17))
        assert rows(name) == 16

    @on_gunicorn
    @both_ways
    def test_the_next_free_number_without_a_lock(
        self, server: WebServer, transactions: str, name: str, other: OtherSession
    ) -> None:
        count = SURELY_AT_ONCE[server.name]
        requests = server.at_once(count, f"/default/{transactions}/unlocked/number/{name}", "POST")
        server.wait_for(name, "read", count)
        server.open(name, "read")
        assert {answer.body for answer in answers(requests)} == {"1"}
        assert rows(name) == count

    @on_each
    @both_ways
    def test_those_who_wait_check_again(
        self, server: WebServer, transactions: str, name: str, other: OtherSession
    ) -> None:
        """Case 85."""
        requests = server.at_once(6, f"/default/{transactions}/waiting/once/{name}", "POST")
        server.wait_for(name, "read")
        wait_until(lambda: other.waiters(key(name)) >= SURELY_AT_ONCE[server.name] - 1, "waiters")
        server.open(name, "read")
        found = answers(requests)
        assert sorted(answer.status for answer in found) == [200] * 5 + [201]
        assert len({answer.body for answer in found}) == 1
        assert rows(name) == 1

    @on_each_pair
    @both_ways
    def test_those_who_do_not_wait_are_refused(
        self, server: WebServer, transactions: str, using: str, name: str, other: OtherSession
    ) -> None:
        requests = server.at_once(6, f"/{using}/{transactions}/refusing/once/{name}", "POST")
        server.wait_for(name, "read")
        assert [answer.status for answer in first_answers(requests, 5)] == [409] * 5
        server.open(name, "read")
        assert statuses(requests) == [201] + [409] * 5
        assert rows(name) == 1
        again = server.post(f"/{using}/{transactions}/refusing/once/{name}")
        assert again.status == 200

    @on_each
    @both_ways
    def test_without_a_lock(self, server: WebServer, transactions: str, name: str, other: OtherSession) -> None:
        count = SURELY_AT_ONCE[server.name]
        requests = server.at_once(count, f"/default/{transactions}/unlocked/once/{name}", "POST")
        server.wait_for(name, "read", count)
        server.open(name, "read")
        assert statuses(requests) == [201] * count
        assert rows(name) == count

    @on_gthread
    @on_each_alias
    def test_other_views_answer_meanwhile(self, server: WebServer, using: str, name: str, other: OtherSession) -> None:
        """Case 84."""
        holder = server.send(f"/{using}/plain/refusing/held/{name}", "POST")
        server.wait_for(name, "inside")
        refused = server.at_once(10, f"/{using}/plain/refusing/held/{name}", "POST", Accept="application/json")
        elsewhere = server.send(f"/{using}/plain/unlocked/here/{name}")
        assert [answer.status for answer in answers([*refused, elsewhere])] == [409] * 10 + [200]
        for answer in answers(refused):
            assert answer.headers["retry-after"] == "1"
            assert "detail" in json.loads(answer.body)
        server.open(name, "inside")
        assert holder.answer().body == "held"

    @on_each
    @both_ways
    def test_an_error(self, server: WebServer, transactions: str, name: str, other: OtherSession) -> None:
        for _ in range(4):
            assert server.post(f"/default/{transactions}/refusing/failing/{name}").status == 500
        assert rows(name) == (0 if transactions == "atomic" else 4)
        assert other.is_free(key(name))


class TestAClientThatGoesAway:
    @on_each_pair
    @both_ways
    def test_the_first_one_goes_on_without_it(
        self, server: WebServer, transactions: str, using: str, name: str, other: OtherSession
    ) -> None:
        """Case 85: the second is refused, and the third waits and finds what the first has made."""
        where = f"/{using}/{transactions}"
        first = server.send(f"{where}/waiting/once/{name}", "POST")
        server.wait_for(name, "read")
        first.go_away()
        assert server.post(f"{where}/refusing/once/{name}").status == 409
        third = server.send(f"{where}/waiting/once/{name}", "POST")
        other.wait_for_waiters(key(name))
        server.open(name, "read")
        assert third.answer().status == 200
        assert rows(name) == 1
        other.wait_until_free(key(name))

    @on_each
    @both_ways
    def test_while_it_waits(self, server: WebServer, transactions: str, name: str, other: OtherSession) -> None:
        """The server does not notice, or cannot stop a thread: the view runs for nobody, and frees the lock."""
        other.take(key(name))
        waiter = server.send(f"/default/{transactions}/waiting/once/{name}", "POST")
        other.wait_for_waiters(key(name))
        waiter.go_away()
        server.open(name, "read")
        other.drop(key(name))
        wait_until(lambda: rows(name) == 1, "a row")
        other.wait_until_free(key(name))

    @pytest.mark.parametrize("using", ["default", "persistent"])
    def test_a_stream_that_is_returned_to_nobody(self, using: str, name: str, other: OtherSession) -> None:
        """Under ASGI Django drops the response of a cancelled synchronous view, and does not close it."""
        with uvicorn("abandoning") as server:
            request = server.send(f"/{using}/plain/refusing/late/{name}")
            server.wait_for(name, "inside")
            request.go_away()
            let_notice(server, name)
            server.open(name, "inside")
            other.wait_until_free(key(name))

    def test_streams_that_are_returned_to_nobody_cost_no_place_in_a_pool(self, name: str, other: OtherSession) -> None:
        with uvicorn("abandoning") as server:
            for number in range(POOL_SIZE + 2):
                each = f"{name}-{number}"
                request = server.send(f"/pooled/plain/refusing/late/{each}")
                server.wait_for(each, "inside")
                request.go_away()
                let_notice(server, each)
                server.open(each, "inside")
                other.wait_until_free(key(each))


class TestStreams:
    @pytest.mark.parametrize(
        ("server", "view", "using"),
        [
            ("sync", "big", "default"),
            ("gthread", "big", "persistent"),
            ("gthread", "big", "pooled"),
            ("uvicorn", "big", "default"),
            ("uvicorn", "abig", "pooled"),
        ],
        indirect=["server"],
    )
    def test_a_client_that_reads_slowly(
        self, server: WebServer, view: str, using: str, name: str, other: OtherSession
    ) -> None:
        """Case 88."""
        path = f"/{using}/plain/refusing/{view}/{name}"
        first = server.send(path)
        first.read_until(b"xxx")
        assert server.get(path).status == 409
        assert other.holders(key(name)) == 1
        size, times = BIG
        assert len(first.answer().body) == size * times
        other.wait_until_free(key(name))
        second = server.send(path)
        second.read_until(b"xxx")
        second.go_away()
        other.wait_until_free(key(name))

    @pytest.mark.parametrize(
        ("server", "view", "using"),
        [
            ("sync", "streamed", "default"),
            ("gthread", "streamed", "persistent"),
            ("gthread", "streamed", "pooled"),
            ("uvicorn", "streamed", "default"),
            ("uvicorn", "astreamed", "pooled"),
        ],
        indirect=["server"],
    )
    def test_the_lock_lasts_to_the_last_byte(
        self, server: WebServer, view: str, using: str, name: str, other: OtherSession
    ) -> None:
        path = f"/{using}/plain/refusing/{view}/{name}"
        first = server.send(path)
        server.wait_for(name, "half")
        assert server.get(path).status == 409
        server.open(name, "half")
        assert first.answer().body == "begin 0\nend\n"
        other.wait_until_free(key(name))
        assert server.get(path).body == "begin 1\nend\n"
        other.wait_until_free(key(name))

    @pytest.mark.parametrize(
        ("server", "view", "using"),
        [
            ("sync", "endless", "default"),
            ("gthread", "endless", "persistent"),
            ("gthread", "endless", "pooled"),
            ("uvicorn", "aendless", "default"),
            ("uvicorn", "aendless", "pooled"),
        ],
        indirect=["server"],
    )
    def test_a_client_that_goes_away_half_way(
        self, server: WebServer, view: str, using: str, name: str, other: OtherSession
    ) -> None:
        """Case 88: the server finds out when it writes."""
        path = f"/{using}/plain/refusing/{view}/{name}"
        for _ in range(2):
            first = server.send(path)
            first.read_until(b"line")
            assert other.holders(key(name)) == 1
            first.go_away()
            other.wait_until_free(key(name))

    @on_uvicorn
    @on_each_alias
    def test_a_client_that_goes_away_while_a_synchronous_iterator_is_read(
        self, server: WebServer, using: str, name: str, other: OtherSession
    ) -> None:
        """Under ASGI Django reads all of it first, in a thread that nobody can stop: the lock lasts as long."""
        path = f"/{using}/plain/refusing/streamed/{name}"
        first = server.send(path)
        server.wait_for(name, "half")
        first.go_away()
        for _ in range(2):
            assert server.get(path).status == 409
        server.open(name, "half")
        other.wait_until_free(key(name))
        assert rows(name) == 1
        assert server.get(path).status == 200
        other.wait_until_free(key(name))

    @on_gunicorn
    def test_an_error(self, server: WebServer, name: str, other: OtherSession) -> None:
        first = server.send(f"/default/plain/refusing/broken/{name}")
        server.wait_for(name, "half")
        server.open(name, "half")
        assert first.read_all().endswith(b"begin\n")
        other.wait_until_free(key(name))
        wait_until(lambda: server.says("ZeroDivisionError: in the stream"), "the error in the log")

    @pytest.mark.parametrize("view", ["broken", "abroken"])
    def test_an_error_under_asgi(self, view: str, name: str, other: OtherSession) -> None:
        """Django does not close the response then, and sends no signal."""
        with uvicorn("failing") as server:
            first = server.send(f"/default/plain/refusing/{view}/{name}")
            server.wait_for(name, "half")
            server.open(name, "half")
            first.read_all()
            other.wait_until_free(key(name))
            wait_until(lambda: server.says("ZeroDivisionError: in the stream"), "the error in the log")

    @on_each
    def test_a_file(self, server: WebServer, name: str, other: OtherSession) -> None:
        """Where a server sends a file by itself, it closes another object than the response."""
        for _ in range(4):
            answer = server.get(f"/default/plain/refusing/file/{name}")
            assert answer.status == 200
            assert answer.body.endswith("]\n")
            other.wait_until_free(key(name))

    @on_each
    def test_only_the_head(self, server: WebServer, name: str, other: OtherSession) -> None:
        server.open(name, "half")
        for _ in range(4):
            answer = server.get(f"/default/plain/refusing/streamed/{name}", "HEAD")
            assert answer.status == 200
            other.wait_until_free(key(name))

    @on_each
    def test_a_transaction_ends_before_it(self, server: WebServer, name: str, other: OtherSession) -> None:
        path = f"/default/atomic/refusing/streamed/{name}"
        first = server.send(path)
        server.wait_for(name, "half")
        assert other.is_free(key(name))
        wait_until(lambda: server.says(f"RuntimeWarning: The lock '{name}' .* ends with the transaction"), "a warning")
        server.open(name, "half")
        assert first.answer().status == 200


class TestTasks:
    """Case 89, Case 95: asynchronous views."""

    @on_uvicorn
    @on_each_alias
    def test_none_is_lost(self, server: WebServer, using: str, name: str, other: OtherSession) -> None:
        account = Account.objects.create(name=name)
        requests = server.at_once(10, f"/{using}/plain/waiting/acount/{name}")
        server.wait_for(name, "read")
        wait_for_sessions(other, server, using, POOL_SIZE if using == "pooled" else 10)
        server.open(name, "read")
        assert sorted(int(answer.body) for answer in answers(requests)) == list(range(1, 11))
        account.refresh_from_db()
        assert account.balance == 10

    @on_uvicorn
    def test_without_a_lock(self, server: WebServer, name: str, other: OtherSession) -> None:
        account = Account.objects.create(name=name)
        requests = server.at_once(10, f"/default/plain/unlocked/acount/{name}")
        server.wait_for(name, "read", 10)
        server.open(name, "read")
        assert {answer.body for answer in answers(requests)} == {"1"}
        account.refresh_from_db()
        assert account.balance == 1

    @on_uvicorn
    @on_each_alias
    def test_refused(self, server: WebServer, using: str, name: str, other: OtherSession) -> None:
        Account.objects.create(name=name)
        requests = server.at_once(10, f"/{using}/plain/refusing/acount/{name}")
        server.wait_for(name, "read")
        assert [answer.status for answer in first_answers(requests, 9)] == [409] * 9
        server.open(name, "read")
        assert statuses(requests) == [200] + [409] * 9

    @on_uvicorn
    @on_each_alias
    def test_a_client_that_goes_away_while_the_view_awaits(
        self, server: WebServer, using: str, name: str, other: OtherSession
    ) -> None:
        path = f"/{using}/plain/waiting/aheld/{name}"
        first = server.send(path)
        server.wait_for(name, "inside")
        second = server.send(path)
        wait_for_sessions(other, server, using, 2)
        first.go_away()
        server.wait_for(name, "inside", 2)
        server.open(name, "inside")
        assert second.answer().body == "held"

    @on_uvicorn
    @on_each_alias
    def test_a_client_that_goes_away_while_it_waits(
        self, server: WebServer, using: str, name: str, other: OtherSession
    ) -> None:
        path = f"/{using}/plain/waiting/aheld/{name}"
        other.take(key(name))
        requests = server.at_once(POOL_SIZE, path)
        wait_for_sessions(other, server, using, POOL_SIZE)
        for request in requests:
            request.go_away()
        let_notice(server, name)
        last = server.send(path)
        if using == "default":
            wait_until(lambda: sessions(other, server, using) == 1, "the end of their sessions")
        server.open(name, "inside")
        other.drop(key(name))
        assert last.answer().body == "held"
        assert len(server.arrivals(name, "inside")) == 1


class TestWorkers:
    @on_gunicorn
    @both_ways
    def test_killed_in_a_view(self, server: WebServer, transactions: str, name: str, other: OtherSession) -> None:
        path = f"/default/{transactions}/refusing/once/{name}"
        first = server.send(path, "POST")
        [pid] = server.wait_for(name, "read")
        assert server.post(path).status == 409
        os.kill(pid, signal.SIGKILL)
        assert first.read_all() == b""
        other.wait_until_free(key(name))
        server.open(name, "read")
        assert server.post(path).status == 201

    @on_gunicorn
    def test_killed_in_a_stream(self, server: WebServer, name: str, other: OtherSession) -> None:
        """Case 88."""
        path = f"/default/plain/refusing/streamed/{name}"
        first = server.send(path)
        [pid] = server.wait_for(name, "half")
        os.kill(pid, signal.SIGKILL)
        assert first.read_all().endswith(b"begin 0\n")
        other.wait_until_free(key(name))
        server.open(name, "half")
        assert server.get(path).body == "begin 0\nend\n"
        other.wait_until_free(key(name))

    @on_gunicorn
    @both_ways
    def test_a_graceful_restart(self, server: WebServer, transactions: str, name: str, other: OtherSession) -> None:
        """The old worker goes on to the end of its request, and keeps the lock; the new ones are refused it."""
        path = f"/default/{transactions}/refusing/once/{name}"
        first = server.send(path, "POST")
        server.wait_for(name, "read")
        before = server.workers()
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: len(server.workers() - before) == {"sync": 3, "gthread": 2}[server.name], "new workers")
        assert server.post(path).status == 409
        server.open(name, "read")
        assert first.answer().status == 201
        assert server.post(path).status == 200
        assert rows(name) == 1
        assert other.is_free(key(name))

    @pytest.mark.slow
    def test_the_time_of_a_worker_is_over(self, name: str, other: OtherSession) -> None:
        """gunicorn ends a worker that seems to hang, in a view or in a wait, by an exit in the middle of it."""
        waited_for = f"{name}-other"
        other.take(key(waited_for))
        with gunicorn("hasty", workers=2, timeout=2) as server:
            holder = server.send(f"/persistent/plain/refusing/held/{name}", "POST")
            waiter = server.send(f"/persistent/plain/waiting/held/{waited_for}", "POST")
            server.wait_for(name, "inside")
            other.wait_for_waiters(key(waited_for))
            other.wait_until_free(key(name))
            wait_until(lambda: other.waiters(key(waited_for)) == 0, "the end of the waiter")
            holder.read_all()
            waiter.read_all()
            other.drop(key(waited_for))
            for each in (name, waited_for):
                server.open(each, "inside")
                assert server.post(f"/persistent/plain/refusing/held/{each}").body == "held"


class TestRestFramework:
    @on_each
    def test_a_locked_action(self, server: WebServer, name: str, other: OtherSession) -> None:
        path = f"/orders/{name}/pay"
        requests = server.at_once(6, path, "POST", **{"X-User": "ann"})
        server.wait_for(name, "read")
        assert [answer.status for answer in first_answers(requests, 5)] == [409] * 5
        assert server.post(path).status == 401
        assert json.loads(server.get(f"/orders/{name}", **{"X-User": "ann"}).body) == {"paid": False}
        server.open(name, "read")
        found = sorted(answers(requests), key=lambda answer: answer.status)
        assert [answer.status for answer in found] == [201] + [409] * 5
        assert json.loads(found[0].body) == {"paid": True, "scope": "transaction"}
        assert {answer.headers["content-type"] for answer in found} == {"application/json"}
        assert rows(name) == 1

    @on_each
    def test_one_that_waits(self, server: WebServer, name: str, other: OtherSession) -> None:
        requests = server.at_once(6, f"/patient/{name}/pay", "POST", **{"X-User": "ann"})
        server.wait_for(name, "read")
        wait_until(lambda: other.waiters(lock_key("order", name)) >= SURELY_AT_ONCE[server.name] - 1, "waiters")
        server.open(name, "read")
        assert statuses(requests) == [200] * 5 + [201]
        assert rows(name) == 1


class TestConnections:
    @on_each_pair
    def test_after_a_storm(self, server: WebServer, using: str, name: str, other: OtherSession) -> None:
        server.open(name, "read")
        server.open(name, "half")
        requests = []
        for kind in ("waiting", "refusing"):
            for way in ("atomic", "plain"):
                for view in ("number", "failing", "here"):
                    requests += server.at_once(2, f"/{using}/{way}/{kind}/{view}/{name}", "POST")
            requests += server.at_once(2, f"/{using}/plain/{kind}/streamed/{name}")
        for request in requests[::5]:
            request.go_away()
        left = [request for index, request in enumerate(requests) if index % 5]
        assert set(statuses(left)) <= {200, 409, 500}
        other.wait_until_free(key(name))
        wait_until(lambda: sessions(other, server, using, "idle in transaction%") == 0, "the end of transactions")
        if (server.name, using) == ("uvicorn", "persistent"):
            return  # each request has a thread of its own, whose connections stay until Python collects them
        most = 0 if using == "default" else POOL_SIZE if server.name == "uvicorn" else CAPACITY[server.name]
        wait_until(lambda: sessions(other, server, using) <= most, f"at most {most} sessions")
