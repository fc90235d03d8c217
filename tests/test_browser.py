"""The shop in a real browser, headless Chromium: several tabs, several people, and a server of several processes.

Nothing here waits for luck: the work of whoever comes first is held up, by a lock on the table that it writes to or by
a remote system that does not answer, until the others have had their answer.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import psycopg
import pytest

from tests.support import LIMIT, Thread, tool
from tests.test_shop import ADVISORY, SECONDS, Shop, new_shop, until
from tests.webserver import gunicorn, required

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Request, Response, Route

pytestmark = pytest.mark.slow

ACCOUNTS = "/admin/shop/account/"
CHANGE = "/admin/shop/account/1/change/"
PERIODIC = "/admin/django_advisory_lock/periodicrun/"
LOCKS = "/admin/django_advisory_lock/heldlock/"
MONTH = "/reports/2026-09/"
SEED = ("seed", "--accounts=5", "--orders=300")
SKIPPED = re.compile(r"Account 1 \(held by .*\) was skipped, because somebody else is working on it right now\.")
BUSY = "somebody else is working on this right now"
# What the console says of every answer that is an error.
CONFLICT = "the server responded with a status of 409"
TYPED = {
    "name": "Anna & <b>Co</b>",
    "email": "anna@example.com",
    "balance": "12.50",
    "synced_at_0": "2026-02-28",
    "synced_at_1": "23:59:58",
}


class Person:
    """One with a browser of his own: cookies, tabs, and what became of his requests, in any of the tabs."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.posts: list[str] = []
        self.conflicts: list[str] = []
        self.given_up: list[str] = []
        self.troubles: list[str] = []
        context.set_default_timeout(LIMIT * 1000)
        context.on("console", self._said)
        context.on("weberror", lambda error: self.troubles.append(str(error.error)))
        context.on("request", self._asked)
        context.on("requestfailed", self._failed)
        context.on("response", self._answered)

    def forget(self) -> None:
        for happened in (self.posts, self.conflicts, self.given_up):
            happened.clear()

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and CONFLICT not in message.text:
            self.troubles.append(f"{message.type}: {message.text} {message.location}")

    def _asked(self, request: Request) -> None:
        if request.method == "POST":
            self.posts.append(request.url)

    def _failed(self, request: Request) -> None:
        # A second click gives up the answer to the first one.
        is_given_up = request.method == "POST" and request.failure == "net::ERR_ABORTED"
        (self.given_up if is_given_up else self.troubles).append(f"{request.method} {request.url} {request.failure}")

    def _answered(self, response: Response) -> None:
        if response.status == 409:
            self.conflicts.append(response.url)
        elif response.status >= 400:
            self.troubles.append(f"{response.status} {response.request.method} {response.url}")

    def open(self, path: str) -> Page:
        """Open a page in a new tab."""
        page = self.context.new_page()
        response = page.goto(path)
        assert response is not None
        assert response.ok
        return page


class Site:
    """The shop as it is served, and the browser."""

    def __init__(self, shop: Shop, port: int, browser: Browser, password: str) -> None:
        self.shop = shop
        self.url = f"http://127.0.0.1:{port}"
        self.browser = browser
        self.password = password
        self.people: dict[str, Person] = {}

    @contextlib.contextmanager
    def person(self, name: str = "shop") -> Iterator[Person]:
        """Let somebody come, who logs in unless he did so before; nothing unexpected may go wrong."""
        if name not in self.people:
            self.people[name] = Person(self.browser.new_context(base_url=self.url))
            self.log_in(self.people[name], name)
        person = self.people[name]
        person.forget()
        yield person
        for page in person.context.pages:
            page.close()
        assert person.troubles == []

    def log_in(self, person: Person, name: str) -> None:
        page = person.open("/admin/")
        page.get_by_label("Username").fill(name)
        page.get_by_label("Password").fill(self.password)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("heading", name="Site administration").wait_for()

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """Let another process sync account 1, whose remote system does not answer; at the end the process is killed."""
        with self.shop.start("sync_accounts", "--limit=1", "--older-than=0", f"--delay={SECONDS}") as process:
            try:
                until(lambda: self.shop.ask(ADVISORY))
                yield
            finally:
                process.kill()
        until(lambda: self.shop.ask(ADVISORY) == [])

    def runs(self) -> list[str]:
        """Return what was worked at, and is done."""
        until(lambda: self.shop.ask("SELECT count(*) FROM shop_run WHERE finished_at IS NULL") == [0])
        subjects: list[str] = self.shop.ask("SELECT subject FROM shop_run ORDER BY subject")
        return subjects


@pytest.fixture(scope="module")
def served(django_db_setup: None) -> Iterator[Site]:
    required("playwright")
    chromium = tool("chromium", "chromium")
    from playwright.sync_api import sync_playwright

    with new_shop(accounts=5, orders=300) as shop:
        password = shop.run(*SEED).split("'")[-2]
        shop.connection.execute(
            "INSERT INTO auth_user (username, password, date_joined, is_superuser, is_staff, is_active, first_name,"
            " last_name, email) SELECT 'anna', password, now(), true, true, true, '', '', '' FROM auth_user"
        )
        variables = {"DATABASE_URL": shop.url, "PGAPPNAME": "web server", "SHOP_DEBUG": "0"}
        with (
            gunicorn("shop", "testproject.settings", variables, workers=3, worker_class="gthread", threads=4) as server,
            sync_playwright() as playwright,
            playwright.chromium.launch(executable_path=chromium) as browser,
        ):
            yield Site(shop, server.port, browser, password)


@pytest.fixture
def site(served: Site) -> Iterator[Site]:
    """Nothing is done yet; after the test no advisory lock may be left."""
    served.shop.reset()
    served.shop.connection.execute(
        "UPDATE shop_account SET name = 'Account ' || id, email = 'account' || id || '@example.com'"
    )
    yield served
    until(lambda: served.shop.ask(ADVISORY) == [])


def prepare(page: Page, action: str, name: str) -> Locator:
    """Select one object of a list and an action, and return the button that starts it."""
    page.get_by_label(f"Select this object for an action - {name}").check()
    page.locator("select[name=action]").first.select_option(label=action)
    return page.locator("button[name=index]").first


def press(button: Locator) -> None:
    """Click, and do not wait for what comes of it."""
    button.click(no_wait_after=True)


def messages(page: Page) -> list[str]:
    page.locator(".messagelist").wait_for()
    return page.locator(".messagelist li").all_inner_texts()


def tab_to(page: Page, element: Locator, key: str = "Tab") -> None:
    """Go on with the keyboard until an element has the focus."""
    for _ in range(60):
        page.keyboard.press(key)
        if element.evaluate("element => element === document.activeElement"):
            return
    pytest.fail(f"{element} cannot be reached with the key {key}.")


class TestActions:
    def test_second_click(self, site: Site) -> None:
        """The browser gives up the first answer, but the server goes on with the first request."""
        with site.person() as person:
            page = person.open(ACCOUNTS)
            button = prepare(page, "Sync now", "Account 1")
            box = button.bounding_box()
            assert box is not None
            with site.shop.table_held("shop_account") as wait_for:
                for _ in range(2):
                    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
                    wait_for()
                (said,) = messages(page)
                assert SKIPPED.fullmatch(said)
            assert site.runs() == ["1"]
            assert person.posts == [site.url + ACCOUNTS] * 2
            assert len(person.given_up) == 1

    def test_two_tabs(self, site: Site) -> None:
        with site.person() as person, site.person("anna") as anna:
            one, two, other = person.open(ACCOUNTS), person.open(ACCOUNTS), anna.open(ACCOUNTS)
            buttons = [prepare(page, "Sync now", "Account 1") for page in (one, two)]
            with site.shop.table_held("shop_account") as wait_for:
                press(buttons[0])
                wait_for()
                press(buttons[1])
                (said,) = messages(two)
                assert SKIPPED.fullmatch(said)
                press(prepare(other, "Sync now", "Account 2"))  # of which both are at work at the same time
                wait_for(2)
            assert messages(one) == ["Account 1 is synced."]
            assert messages(other) == ["Account 2 is synced."]
        assert site.runs() == ["1", "2"]

    def test_keyboard(self, site: Site) -> None:
        with site.person() as person:
            page = person.open(ACCOUNTS)
            tab_to(page, page.locator("select[name=action]").first)
            page.keyboard.type("Sync")
            tab_to(page, page.get_by_label("Select this object for an action - Account 1"))
            page.keyboard.press("Space")
            tab_to(page, page.locator("button[name=index]").first, "Shift+Tab")
            page.keyboard.press("Enter")
            assert messages(page) == ["Account 1 is synced."]
        assert site.runs() == ["1"]


class TestSaving:
    def fill(self, page: Page, email: str) -> None:
        for name, text in (TYPED | {"email": email}).items():
            page.locator(f"[name={name}]").fill(text)

    def filled(self, page: Page) -> dict[str, str]:
        return {name: page.locator(f"[name={name}]").input_value() for name in TYPED}

    def test_two_people_while_it_is_synced(self, site: Site) -> None:
        """Both forms come back as they were typed, each with a message, and can be saved when the sync is over."""
        with site.person() as shop, site.person("anna") as anna:
            pages = {"shop@example.com": shop.open(CHANGE), "anna@example.com": anna.open(CHANGE)}
            with site.syncing():
                for email, page in pages.items():
                    self.fill(page, email)
                    press(page.get_by_role("button", name="Save", exact=True))
                for email, page in pages.items():
                    error = page.locator(".errornote + .errorlist").inner_text()
                    assert BUSY in error
                    assert "manage.py sync_accounts" in error
                    assert self.filled(page) == TYPED | {"email": email}
            assert site.shop.ask("SELECT name, email FROM shop_account WHERE id = 1") == [
                ("Account 1", "account1@example.com")
            ]
            for email, page in pages.items():
                page.get_by_role("button", name="Save", exact=True).click()
                (message,) = messages(page)
                assert "was changed successfully" in message
                assert site.shop.ask("SELECT name, email FROM shop_account WHERE id = 1") == [(TYPED["name"], email)]
            assert shop.conflicts == anna.conflicts == [site.url + CHANGE]

    def test_delete_while_it_is_synced(self, site: Site) -> None:
        with site.person() as person:
            page = person.open(CHANGE)
            page.locator(".deletelink").click()  # a link, and from Django 6.1 on a button
            confirm = page.get_by_role("button", name="Yes")
            confirm.wait_for()
            with site.syncing():
                confirm.click()
                page.wait_for_url(f"**{CHANGE}")
                (message,) = messages(page)
                assert BUSY in message
                assert page.locator("[name=name]").input_value() == "Account 1"
        assert site.shop.ask("SELECT count(*) FROM shop_account") == [5]


class TestPeriodicRuns:
    def test_allow_the_next_run(self, site: Site) -> None:
        assert site.shop.run("prune_runs").startswith("Deleted")
        with site.person() as person:
            page = person.open(PERIODIC)
            rows = page.locator("#result_list tbody tr")
            assert "prune_runs" in rows.inner_text()
            assert "succeeded" in rows.inner_text()
            for name, query, count in (
                ("failed", "last_outcome__exact=failed", 0),
                ("succeeded", "last_outcome__exact=succeeded", 1),
                ("no success for three intervals", "silent=yes", 0),
            ):
                page.locator("#changelist-filter").get_by_role("link", name=name).click()
                page.wait_for_url(f"**{query}*")
                assert rows.count() == count
            page.goto(PERIODIC)
            name = rows.locator("th").inner_text()
            prepare(page, "Allow the next run now", name).click()
            assert messages(page) == [f"The next run of “{name}” may start now, whenever it comes."]
        assert site.shop.run("prune_runs").startswith("Deleted")
        assert site.runs() == ["all", "all"]


# Of every text below an element the contrast to what is behind it, and the text.
CONTRASTS = """element => {
    const read = color => (color.match(/[\\d.]+/g) || []).map(Number);
    const channel = value => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const behind = node => {
        const color = read(getComputedStyle(node).backgroundColor);
        return color[3] === 0 && node.parentElement ? behind(node.parentElement) : color;
    };
    const found = [];
    for (const node of element.querySelectorAll('*')) {
        const own = [...node.childNodes].filter(child => child.nodeType === Node.TEXT_NODE);
        const text = own.map(child => child.data).join('').trim();
        if (text && node.checkVisibility()) {
            const [a, b] = [light(read(getComputedStyle(node).color)), light(behind(node))];
            found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text]);
        }
    }
    return found;
}"""


class Sessions:
    """Sessions on the shop's database, which take locks and wait for them."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.opened: list[psycopg.Connection] = []
        self.threads: list[Thread[None]] = []

    def open(self, name: str) -> psycopg.Connection:
        raw = psycopg.connect(self.shop.url, autocommit=True, application_name=name)
        self.opened.append(raw)
        return raw

    def hold(self, name: str, number: int) -> psycopg.Connection:
        raw = self.open(name)
        raw.execute("SELECT pg_advisory_lock(%s)", [number])
        return raw

    def wait(self, name: str, number: int) -> psycopg.Connection:
        raw = self.open(name)
        self.threads.append(Thread(lambda: self._wait(raw, number)))
        until(
            lambda: self.shop.ask("SELECT granted FROM pg_locks WHERE pid = %s AND NOT granted", raw.info.backend_pid)
        )
        return raw

    def _wait(self, raw: psycopg.Connection, number: int) -> None:
        with contextlib.suppress(psycopg.OperationalError):
            raw.execute("SELECT pg_advisory_lock(%s)", [number])

    def close(self) -> None:
        pids = [raw.info.backend_pid for raw in self.opened if not raw.closed]
        self.shop.ask("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", pids)
        for thread in self.threads:
            thread.result()
        for raw in self.opened:
            raw.close()


class TestHeldLocks:
    @pytest.fixture
    def sessions(self, site: Site) -> Iterator[Sessions]:
        sessions = Sessions(site.shop)
        yield sessions
        sessions.close()

    def open(self, context: BrowserContext) -> Page:
        """Open the page, whose clock goes on by hand."""
        page = context.new_page()
        page.clock.install()
        page.goto(LOCKS)
        page.get_by_role("button", name="Pause").wait_for()
        return page

    def refresh(self, page: Page) -> None:
        with page.expect_response(lambda response: "table=1" in response.url):
            page.clock.run_for(5000)

    def row(self, page: Page, name: str) -> Locator:
        return page.locator("#held-locks tr[id]", has_text=name)

    def test_it_refreshes_itself(self, site: Site, sessions: Sessions) -> None:
        """The focus stays on the very element, whatever comes and goes around it, and so does the place of the page."""
        with site.person() as person:
            sessions.hold("middle", 5)
            page = self.open(person.context)
            end = self.row(page, "middle").get_by_role("link", name="End this session")
            end.focus()
            page.evaluate("document.activeElement.mark = 'the same'")
            first = sessions.hold("above", 3)
            self.refresh(page)
            self.row(page, "above").wait_for()
            sessions.wait("below", 5)
            self.refresh(page)
            self.row(page, "below").wait_for()
            assert self.row(page, "below").get_attribute("class") == "waiting"
            first.close()
            until(lambda: site.shop.ask(ADVISORY) != [] and len(site.shop.ask(ADVISORY)) == 2)
            self.refresh(page)
            self.row(page, "above").wait_for(state="detached")
            assert page.evaluate("document.activeElement.mark") == "the same"
            assert end.evaluate("element => element === document.activeElement")
            assert page.locator("#held-locks-status").inner_text() == "Refreshes itself every 5 seconds."

    def test_what_had_the_focus_is_gone(self, site: Site, sessions: Sessions) -> None:
        with site.person() as person:
            raw = sessions.hold("one", 5)
            page = self.open(person.context)
            self.row(page, "one").get_by_role("link").focus()
            raw.close()
            until(lambda: site.shop.ask(ADVISORY) == [])
            self.refresh(page)
            page.get_by_text("No advisory lock is held or waited for.").wait_for()
            assert page.evaluate("document.activeElement.id") == "held-locks"

    def test_pause(self, site: Site, sessions: Sessions) -> None:
        with site.person() as person:
            page = self.open(person.context)
            pause = page.locator("#held-locks-pause")
            tab_to(page, pause)
            page.keyboard.press("Enter")
            assert page.locator("#held-locks-status").inner_text() == "Paused."
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.clock.run_for(60_000)
            assert asked == []
            assert pause.inner_text() == "Go on"
            page.keyboard.press("Space")
            self.refresh(page)
            assert pause.inner_text() == "Pause"

    def test_while_nobody_looks(self, site: Site, sessions: Sessions) -> None:
        """A tab in the background asks for nothing, and at once when it is looked at again."""
        hide = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        hide += " document.dispatchEvent(new Event('visibilitychange')); }"
        with site.person() as person:
            page = self.open(person.context)
            page.evaluate(hide, True)
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.clock.run_for(60_000)
            assert asked == []
            sessions.hold("one", 5)
            page.evaluate(hide, False)
            self.row(page, "one").wait_for()
            self.refresh(page)

    @contextlib.contextmanager
    def browsing(self, site: Site, **options: Any) -> Iterator[BrowserContext]:
        """Give the same person another browser."""
        with site.person() as person:
            state = person.context.storage_state()
        with contextlib.closing(site.browser.new_context(base_url=site.url, storage_state=state, **options)) as context:
            context.set_default_timeout(LIMIT * 1000)
            yield context

    def test_logged_out(self, site: Site, sessions: Sessions) -> None:
        """It says that it is out of date, and goes on where it can again."""
        with self.browsing(site) as context:
            page = self.open(context)
            cookies = context.cookies()
            context.clear_cookies()
            page.clock.run_for(5000)
            page.get_by_role("status").get_by_text("Cannot be refreshed at the moment.").wait_for()
            context.add_cookies(cookies)  # type: ignore[arg-type]
            self.refresh(page)
            page.get_by_role("status").get_by_text("Refreshes itself every 5 seconds.").wait_for()

    def test_by_keyboard(self, site: Site, sessions: Sessions) -> None:
        """From the filter to whoever is in the way, and to its end."""
        with site.person() as person:
            sessions.hold("in the way", 5)
            sessions.wait("in the queue", 5)
            sessions.hold("somebody else", 6)
            page = person.open(LOCKS)
            tab_to(page, page.get_by_label("Filter", exact=True))
            page.keyboard.type("IN THE way")
            page.keyboard.press("Enter")
            page.wait_for_url("**q=IN+THE+way*")
            assert page.locator("#held-locks tr[id]").count() == 2
            tab_to(page, self.row(page, "in the queue").get_by_role("link").first)
            page.keyboard.press("Enter")
            assert "in the way" in page.locator(":target").inner_text()
            end = self.row(page, "in the way").get_by_role("link", name="End this session")
            tab_to(page, end)
            assert end.evaluate("link => getComputedStyle(link).outlineStyle") == "solid"
            page.keyboard.press("Enter")
            confirm = page.get_by_role("button", name="Yes, end this session")
            confirm.wait_for()
            assert "1 session waits for it." in page.locator("#content").inner_text()
            tab_to(page, confirm)
            page.keyboard.press("Enter")
            (said,) = messages(page)
            assert re.fullmatch(r"Session \d+ \(in the way\) has ended, and what it held is free\.", said)
            assert len(person.posts) == 1
        until(lambda: len(site.shop.ask(ADVISORY)) == 2)

    def test_without_scripts(self, site: Site, sessions: Sessions) -> None:
        sessions.hold("one", 5)
        with self.browsing(site, java_script_enabled=False) as context:
            page = context.new_page()
            page.goto(LOCKS)
            reload = page.locator("meta[http-equiv=refresh]")
            assert reload.get_attribute("content") == "30"
            assert not page.locator("#held-locks-pause").is_visible()
            page.get_by_role("link", name="Stop that").click()
            assert reload.count() == 0
            sessions.hold("two", 6)
            page.get_by_role("link", name="Refresh").click()
            self.row(page, "two").get_by_role("link", name="End this session").click()
            page.get_by_role("link", name="No, take me back").click()
            self.row(page, "two").get_by_role("link", name="End this session").click()
            page.get_by_role("button", name="Yes, end this session").click()
            assert "(two) has ended" in messages(page)[0]
            assert self.row(page, "two").count() == 0
            assert self.row(page, "one").count() == 1

    def test_a_strict_content_security_policy(self, site: Site, sessions: Sessions) -> None:
        """Nothing of the page is inline."""

        def restrict(route: Route) -> None:
            answer = route.fetch()
            policy = {"content-security-policy": "default-src 'self'; img-src 'self' data:"}
            route.fulfill(response=answer, headers=answer.headers | policy)

        with site.person() as person:
            person.context.route(f"**{LOCKS}*", restrict)
            page = self.open(person.context)
            sessions.hold("one", 5)
            self.refresh(page)
            self.row(page, "one").get_by_role("link", name="End this session").click()
            page.get_by_role("button", name="Yes, end this session").wait_for()
            person.context.unroute_all()

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_looks(self, scheme: Literal["light", "dark"], site: Site, sessions: Sessions) -> None:
        """Nothing scrolls sideways, all can be read, and on a phone what is to be touched is large enough."""
        with site.person() as person:
            sessions.hold("x" * 63, -(2**63))
            sessions.wait("y" * 63, -(2**63))
            page = person.context.new_page()
            page.emulate_media(color_scheme=scheme)
            page.goto(LOCKS)
            self.look(page)
            page.get_by_role("link", name="End this session").first.click()
            page.get_by_role("button", name="Yes").wait_for()
            self.look(page)

    def look(self, page: Page) -> None:
        for width in (1200, 375, 320):
            page.set_viewport_size({"width": width, "height": 700})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            contrasts = page.locator("#content").evaluate(CONTRASTS)
            assert len(contrasts) > 10
            assert [text for contrast, text in contrasts if contrast < 4.5] == []
            if width < 768:
                boxes = page.locator("#content").locator(".button, button, input:not([type=hidden])").all()
                assert len(boxes) > 1
                for box in (one.bounding_box() for one in boxes):
                    assert box is not None
                    assert min(box["width"], box["height"]) >= 44


class TestReports:
    def test_two_tabs(self, site: Site) -> None:
        with site.person() as person:
            one, two = tabs = [person.open(MONTH) for _ in range(2)]
            with site.shop.table_held("shop_monthlyreport") as wait_for:
                press(one.get_by_role("button", name="Generate"))
                wait_for()
                press(two.get_by_role("button", name="Generate"))
                assert two.get_by_role("alert").inner_text().startswith("Nothing was done.")
                again = two.get_by_role("button", name="Try again")
                again.wait_for()
            ready = [tab.get_by_text("The report of 2026-09 is ready") for tab in tabs]
            ready[0].wait_for()
            assert site.runs() == ["2026-09"]
            tab_to(two, again)
            assert again.evaluate("button => getComputedStyle(button).outlineStyle") == "solid"
            two.keyboard.press("Enter")
            ready[1].wait_for()
            assert person.conflicts == [site.url + MONTH]
        assert site.runs() == ["2026-09"] * 2

    def test_on_a_phone(self, site: Site) -> None:
        """No page scrolls sideways, and what is to be touched is large enough."""
        with site.person() as person:
            for path in ("/", MONTH, "/accounts/"):
                page = person.open(path)
                page.set_viewport_size({"width": 320, "height": 640})
                assert page.evaluate("document.documentElement.scrollWidth") <= 320
                for button in page.get_by_role("button").all():
                    box = button.bounding_box()
                    assert box is not None
                    assert min(box["width"], box["height"]) >= 44
