"""The viewer in headless Chromium: what pages do, what they don't do, and what people without a mouse can do."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from viewed import HOSTILE, hostile_run, made, write_run, write_training

from commands import Osmosis
from osmosis_ai.records import Failure
from osmosis_ai.rollout.server.serve import address_of, open_socket
from osmosis_ai.testing import Gate, Reply, Request, ScriptedEndpoint, text
from osmosis_ai.training.record import MetricsLine
from osmosis_ai.viewer.server import make_viewer
from osmosis_ai.viewer.stores import Stores
from running import running
from waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Without these, Chromium asks the network for updates at every start.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
LIVE = "#connection:text-is('live')"
BROKEN = Failure("model", "connection refused", "connection")
PICTURE = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
PICTURES = [
    *((name, 1280, "light") for name in ("runs", "run", "row", "compare", "compare-row", "training")),
    ("run", 400, "dark"),
]
SCREENSHOTS = os.environ.get("SCREENSHOTS")
"""A folder for the pictures of the documents; without it none are made."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="Playwright isn't installed; make test-browser installs it")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; on Debian: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Viewed:
    """A viewer, and a browser that looks at it and keeps what went wrong."""

    def __init__(self, context: BrowserContext, address: str, token: str, stop: Callable[[], None]) -> None:
        self.context = context
        self.stop = stop
        self.address = address
        self.wrong: list[str] = []
        context.on("request", self._requested)
        self.page = self.new_page()
        self.page.goto(f"{address}/?token={token}")

    def new_page(self) -> Page:
        page = self.context.new_page()
        page.on("console", lambda message: self.wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: (self.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        return page

    def go(self, path: str) -> Page:
        self.page.goto(self.address + path)
        return self.page

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:")):
            self.wrong.append(f"asked for {request.url}")


@contextmanager
def served(*roots: Path, port: int = 0) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Serve these repositories in a thread; give address, token and what stops it."""
    with open_socket("127.0.0.1", port) as listener:
        server, token = make_viewer(Stores([(root, root / ".osmosis") for root in roots]), listener, "127.0.0.1")
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join()

        try:
            yield address_of(listener), token, stop
        finally:
            stop()


@contextmanager
def viewed(browser: Browser, *roots: Path, expected: tuple[str, ...] = (), **options: Any) -> Iterator[Viewed]:
    """A browser with the viewer of these repositories open; errors other than the `expected` fail the test."""
    with served(*roots) as (address, token, stop):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(PATIENCE * 1000)
        found = Viewed(context, address, token, stop)
        try:
            yield found
        finally:
            context.close()
    assert [wrong for wrong in found.wrong if not any(each in wrong for each in expected)] == []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of two runs on one dataset, the second with a row that flipped, one that failed, and a picture."""
    root = tmp_path_factory.mktemp("browser") / "shop"
    root.mkdir()
    before = [made(index, attempt) for index in range(30) for attempt in range(3)]
    after = [made(index, attempt, score=(index + attempt) % 4 / 3) for index in range(30) for attempt in range(3)]
    after[3] = made(1, 0, score=None)
    after[12] = made(4, 0, failure=BROKEN)
    part = {"type": "image_url", "image_url": {"url": PICTURE}}
    after[0][0].messages[1]["content"] = [{"type": "text", "text": "What is in this picture?"}, part]
    after[6][0].messages[2]["tool_calls"][0]["function"]["arguments"] = '{"a": 9, "b": 2}'
    for rollouts in (before, after):
        write_run(root, rollouts, n=3)
    lines = [line for step in range(1, 41) for line in step_lines(step)]
    write_training(root, lines=lines, status="finished", step=40, total_steps=40, reward=0.8)
    return root


def step_lines(step: int) -> list[MetricsLine]:
    """The figures of a training run's step, as they come."""
    reward = 0.5 - math.cos(step / 12) / 3 + step % 5 / 40
    shown = {"reward": reward, "groups_with_variance": 1 - step % 3 / 8, "turns": 2.0}
    lines = [MetricsLine(step, "rollouts", shown, 1.0), MetricsLine(step, "trainer", {"loss": -reward / 50}, 1.0)]
    return lines if step % 10 else [*lines, MetricsLine(step, "evaluation", {"reward": reward - 0.05}, 1.0)]


@pytest.fixture(scope="module")
def shop(browser: Browser, root: Path) -> Iterator[Viewed]:
    """A browser with the viewer of that repository open, for all tests that leave it as it is."""
    with viewed(browser, root) as seen:
        yield seen


@pytest.fixture
def seen(shop: Viewed) -> Iterator[Viewed]:
    """The same; errors fail the test in which they happen."""
    yield shop
    assert shop.wrong == []


def runs_of(root: Path) -> list[str]:
    from osmosis_ai.store.browsing import Browser as Runs

    return [run.id for run in Runs(root / ".osmosis" / "runs.db").list_runs()]


def screens(root: Path) -> dict[str, str]:
    after, before = runs_of(root)
    return {
        "runs": "/",
        "run": f"/runs/shop/{after}",
        "row": f"/runs/shop/{after}/rows/2?status=not-passed",
        "compare": f"/compare/shop/{before}/{after}",
        "compare-row": f"/compare/shop/{before}/{after}/rows/2",
        "training": "/training/shop/first",
        "no-match": f"/runs/shop/{after}?q=nothing+like+it",
    }


# Colours don't depend on the width, nor the layout on colours.
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_every_screen_is_accessible_and_fits(browser: Browser, root: Path, width: int, scheme: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with viewed(browser, root, color_scheme=scheme, viewport={"width": width, "height": 900}) as seen:
        for name, path in screens(root).items():
            page = seen.go(path)
            page.wait_for_selector(LIVE)
            found = [
                each for each in Axe().run(page).response["violations"] if each["impact"] in ("serious", "critical")
            ]
            told = [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found]
            assert told == [], f"{name}, {scheme}, {width} pixels"
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{name} is {wide} pixels too wide at {width}"
            if SCREENSHOTS and (name, width, scheme) in PICTURES:
                page.screenshot(path=Path(SCREENSHOTS) / f"viewer-{name}-{scheme}.png")


def test_everything_is_reached_by_keys(seen: Viewed, root: Path) -> None:
    after, before = runs_of(root)
    page = seen.go(f"/runs/shop/{after}")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rows/1*")
    page.keyboard.press("j")
    page.wait_for_url("**/rows/2*")
    page.keyboard.press("k")
    page.wait_for_url("**/rows/1*")
    page.keyboard.press("]")
    page.wait_for_url("**attempt=1*")
    page.keyboard.press("[")
    page.wait_for_url("**attempt=0*")
    page.keyboard.press("f")
    page.wait_for_url("**/rows/2*")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("j")
    page.keyboard.press("Escape")
    assert "/rows/2" in page.url
    page.keyboard.press("u")
    page.wait_for_url(f"**/runs/shop/{after}*")
    page.keyboard.press("/")
    page.keyboard.type("is 7 +")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=is+7*")
    assert page.locator("#window tr[data-row]").count() == 1
    # Empty fields aren't in the address.
    assert page.url.endswith("?q=is+7+%2B")
    seen.go(f"/compare/shop/{before}/{after}").keyboard.press("x")
    page.wait_for_url("**/rows/*")
    first = page.url
    page.keyboard.press("x")
    page.wait_for_url(lambda url: url != first and "/rows/" in url)


def test_verdicts_are_given_by_keys(browser: Browser, tmp_path: Path) -> None:
    root = tmp_path / "shop"
    root.mkdir()
    run = write_run(root, [made(0), made(1)])
    with viewed(browser, root) as seen:
        page = seen.go(f"/runs/shop/{run}/rows/0?status=no-verdict")
        page.keyboard.press("1")
        page.wait_for_selector("#verdict [aria-pressed=true] >> text=good")
        page.keyboard.press("n")
        page.keyboard.type("0 is a key, but not here")
        page.keyboard.press("Escape")
        page.keyboard.press("0")
        page.wait_for_selector("#verdict [aria-pressed=true] >> text=bad")
        assert page.input_value("#note") == "0 is a key, but not here"
        # The next one without a verdict.
        page.keyboard.press("j")
        page.wait_for_url("**/rows/1*")
        page.keyboard.press("1")
        page.wait_for_selector("#verdict [aria-pressed=true] >> text=good")
        page.click("text=take back")
        page.wait_for_selector("#verdict:not(:has([aria-pressed=true]))")
        assert "1 verdict, 0 good, 1 bad" in seen.go(f"/runs/shop/{run}").inner_text("#verdicts")


def test_the_key_of_flips_says_what_it_needs(seen: Viewed, root: Path) -> None:
    after, before = runs_of(root)
    page = seen.go(f"/runs/shop/{after}/rows/0")
    page.keyboard.press("x")
    assert "choose a run to compare with" in page.inner_text("#told")
    page.select_option("select[name=against]", before)
    page.wait_for_url(f"**against={before}")
    page.keyboard.press("x")
    page.wait_for_url(f"**/rows/1?against={before}")
    page.click(f"text={before}")
    page.wait_for_url(f"**/compare/shop/{after}/{before}/rows/1")


def test_two_ticked_runs_are_compared(seen: Viewed, root: Path) -> None:
    after, before = runs_of(root)
    page = seen.go("/")
    page.check(f"#tick-shop-{before}")
    assert "second" in page.inner_text("#compare-ticked")
    page.check(f"#tick-shop-{after}")
    page.click("#compare-ticked a")
    page.wait_for_url(f"**/compare/shop/{before}/{after}")


def test_a_comparison_begins_at_the_first_difference(seen: Viewed, root: Path) -> None:
    after, before = runs_of(root)
    page = seen.new_page()
    page.set_viewport_size({"width": 800, "height": 300})
    page.goto(f"{seen.address}/compare/shop/{before}/{after}/rows/2")
    eventually(lambda: page.evaluate("""() => {
        const at = document.getElementById('first-divergence').getBoundingClientRect();
        return at.top >= 0 && at.bottom <= innerHeight;
    }"""))  # fmt: skip
    page.close()


def test_a_picture_is_loaded_when_it_is_opened(seen: Viewed, root: Path) -> None:
    after, _ = runs_of(root)
    page = seen.go(f"/runs/shop/{after}/rows/0")
    assert not page.locator("img").is_visible()
    page.click(".image summary")
    eventually(lambda: page.evaluate("document.querySelector('img').naturalWidth") == 1)


def test_hostile_texts_do_nothing(browser: Browser, tmp_path: Path) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    runs = [hostile_run(root, hostile) for hostile in HOSTILE]
    with viewed(browser, root) as seen:
        paths = [(f"/runs/repo/{run}", f"/runs/repo/{run}/rows/0", f"/compare/repo/{run}/{run}/rows/1") for run in runs]
        for path in ("/", *chain(*paths)):
            page = seen.go(path)
            page.wait_for_selector(LIVE)
            page.evaluate("() => document.querySelectorAll('details').forEach((each) => (each.open = true))")
            assert page.locator("script").count() == 1
            assert seen.wrong == []


def test_a_long_run_scrolls_with_few_rows_in_the_page(browser: Browser, tmp_path: Path) -> None:
    root = tmp_path / "large"
    root.mkdir()
    write_run(root, [made(index) for index in range(3000)])
    with viewed(browser, root) as seen:
        page = seen.go("/runs/large/latest")
        page.wait_for_selector("#figures table")
        for part in (0.5, 0.98, 0.2, 1.0):
            page.evaluate(SCROLL, part)
            at = "document.getElementById('window').scrollTop / 30"
            eventually(lambda at=at: _shows(page, int(page.evaluate(at)) + 3))
            assert page.locator("#window tr").count() <= 400
        assert page.locator("#window tr[data-row] >> nth=-1").locator("a >> nth=0").inner_text() == "2999"


SCROLL = "part => { const box = document.getElementById('window'); box.scrollTop = box.scrollHeight * part; }"


def _shows(page: Page, row: int) -> bool:
    """Return True if a row is where it can be seen."""
    found = page.locator(f"#window tr[data-row$='/rows/{row}']")
    if found.count() != 1:
        return False
    box, frame = found.bounding_box(), page.locator("#window").bounding_box()
    return bool(box and frame and frame["y"] <= box["y"] <= frame["y"] + frame["height"])


def test_a_run_is_followed_while_it_goes_on_is_killed_and_is_resumed(browser: Browser, repo: Path) -> None:
    gates = {"1 + 2": Gate(), "3 + 4": Gate(), "5 + 6": Gate()}

    def answer(request: Request) -> Reply:
        asked = str(request.messages[-1]["content"])
        return next((text("3").after(gate) for sum_, gate in gates.items() if sum_ in asked), text("ready"))

    with ScriptedEndpoint(answer).run_in_thread() as endpoint, viewed(browser, repo) as seen:
        arguments = ["eval", "--model", "m", "--base-url", endpoint.url, "--workers", "1"]
        page = seen.go("/runs/repo/latest")
        assert "No run yet" in page.inner_text("h1")
        with running(*arguments, cwd=repo) as command:
            page.wait_for_selector(".status.running")
            gates["1 + 2"].open()
            page.wait_for_selector("#window tr[data-row]")
            assert "1 of 3" in page.inner_text("#head")
            page.wait_for_selector("#in-flight td:text-is('the model (turn 1)')")
            # What someone typed or opened meanwhile stays.
            page.fill("#search", "half a wo")
            gates["3 + 4"].open()
            page.wait_for_selector("#window tr[data-row] >> nth=1")
            assert page.input_value("#search") == "half a wo"
            os.kill(command.process.pid, signal.SIGKILL)
            page.wait_for_selector(".status.killed")
            eventually(lambda: not command.descendants())
        gates["5 + 6"].open()
        with running(*arguments, "--resume", cwd=repo) as command:
            command.wait()
        page.wait_for_selector(".status.finished")
        assert page.locator("#in-flight").is_hidden()
        page.wait_for_selector("#window tr[data-row] >> nth=2")


def test_a_training_run_is_followed(browser: Browser, tmp_path: Path) -> None:
    root = tmp_path / "shop"
    root.mkdir()
    record = write_training(root)
    with viewed(browser, root) as seen, record.locked():
        page = seen.go("/training/shop/first")
        page.wait_for_selector(".status.running")
        for step in (1, 2):
            for line in step_lines(step):
                record.add(line)
            page.wait_for_selector(f"#charts svg >> nth=0 >> a >> nth={step - 1}")
        page.click("#charts summary")
        record.write(replace(record.read(), status="finished"))
        page.wait_for_selector(".status.finished")
        # What someone opened meanwhile stays.
        assert page.get_attribute("#charts details", "open") is not None


def test_a_page_says_when_its_viewer_has_ended(browser: Browser, root: Path) -> None:
    with ExitStack() as stack:
        seen = stack.enter_context(viewed(browser, root, expected=("ERR_", "403")))
        page = seen.go("/")
        page.wait_for_selector(LIVE)
        seen.stop()
        page.wait_for_selector("#connection:text-is('not connected, trying again')")
        # Another viewer listens there now, with another token.
        with served(root, port=int(seen.address.rpartition(":")[2])):
            page.wait_for_selector("#connection:text-is('the viewer has ended')")


def test_the_page_of_a_file_works_from_disk_without_a_network(browser: Browser, root: Path, osmosis: Osmosis) -> None:
    after, before = runs_of(root)
    with ThreadPoolExecutor() as thread:
        # In a thread of its own, because Playwright runs a loop in this one.
        file = root / "page.html"
        written = thread.submit(osmosis, "view", after, "--html", file, "--against", before, cwd=root).result()
    assert written.code == 0, written.stderr
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.on("console", lambda message: asked.append(message.text))
    page.goto(file.as_uri())
    assert page.locator("#row-2-1").is_hidden()
    page.click("a[href='#row-2-1']")
    assert page.locator("#row-2-1").is_visible()
    assert "What is 2 + 2?" in page.inner_text("#row-2-1")
    page.click("#row-2-1 >> text=all rows")
    page.click("a[href='#change-2']")
    assert page.locator("#change-2 ins").first.is_visible()
    page.goto(f"{file.as_uri()}#row-0-0")
    page.click("#row-0-0 .image summary")
    eventually(lambda: page.evaluate("document.querySelector('#row-0-0 img').naturalWidth") == 1)
    assert [url for url in asked if not url.startswith((file.as_uri(), "data:"))] == []
    context.close()


def test_hidden_pages_hold_no_connection_and_catch_up(browser: Browser, tmp_path: Path) -> None:
    root = tmp_path / "shop"
    root.mkdir()
    write_run(root, [made(0)])
    with viewed(browser, root) as seen:
        page = seen.go("/")
        page.wait_for_selector(LIVE)
        page.evaluate(HIDE, True)
        write_run(root, [made(0)])
        # More pages than a browser has connections to one server.
        for _ in range(7):
            other = seen.new_page()
            other.goto(f"{seen.address}/")
            other.wait_for_selector(LIVE)
            other.evaluate(HIDE, True)
        assert page.locator("tr[data-row]").count() == 1
        page.evaluate(HIDE, False)
        page.wait_for_selector("tr[data-row] >> nth=1")


HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_pages_work_without_the_script(browser: Browser, root: Path) -> None:
    after, _ = runs_of(root)
    with viewed(browser, root, java_script_enabled=False) as seen:
        page = seen.go(f"/runs/shop/{after}")
        page.select_option("select[name=status]", "not-passed")
        page.click("text=Filter")
        page.wait_for_url(re.compile("status=not-passed"))
        page.click("#window tr[data-row] th a >> nth=0")
        assert page.locator(".conversation").is_visible()
        page.click("#verdict button[value='1'] >> nth=0")
        page.wait_for_selector("#verdict [aria-pressed=true] >> text=good")
