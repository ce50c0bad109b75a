"""A page in the browser of all tests, and a server of its own for each."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.conftest import open_browser
from tests.page.fake_server import Double, Fake, serving
from tests.patience import PATIENCE_SECONDS

PATIENCE_MILLISECONDS = 1000 * PATIENCE_SECONDS
expect.set_options(timeout=PATIENCE_MILLISECONDS)


@dataclass
class Chat:
    """A page that is open, and the double behind it."""

    page: Page
    fake: Fake
    url: str
    problems: list[str]

    def send(self, text: str) -> None:
        """Ask with the keyboard."""
        self.page.get_by_role("textbox", name="Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> None:
        """Ask, and wait for the whole answer."""
        answers = self.page.locator("article.answer").count()
        self.send(text)
        expect(self.page.locator("article.answer")).to_have_count(answers + 1)
        self.settled()

    def settled(self) -> None:
        """Wait until nothing is under way, and what came is drawn: the page draws once a frame."""
        expect(self.page.locator("#send")).to_have_text("Send")
        self.page.evaluate("new Promise(requestAnimationFrame)")

    def press(self, name: str) -> None:
        """Press the last button called so."""
        self.page.get_by_role("button", name=name).last.click()


@pytest.fixture(scope="session")
def double() -> Iterator[Double]:
    """The server, whose fake each test replaces."""
    with serving() as double:
        yield double


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One for the folder: it takes longer to start than most tests."""
    yield from open_browser()


@pytest.fixture(scope="module", autouse=True)
def no_event_loop() -> None:
    """The browser has one, which runs from module to module."""


@pytest.fixture(scope="module")
def context(browser) -> Iterator[BrowserContext]:
    """One profile for all tests of a module: it keeps the modules of the page, and nothing else."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    yield context
    context.close()


@pytest.fixture
def fake() -> Fake:
    """The double, to be told what to do before or while the page is open."""
    return Fake()


@pytest.fixture
def chat(context, double, fake) -> Iterator[Chat]:
    """The chat page with nothing stored; fails where it logs an error."""
    double.fake = fake
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if "Content Security" in said.text else None,
    )
    page.goto(f"{double.url}/page/icon.svg")
    page.evaluate("localStorage.clear()")
    page.goto(double.url)
    yield Chat(page, fake, double.url, problems)
    page.close()
    assert problems == []
