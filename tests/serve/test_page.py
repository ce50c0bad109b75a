"""The pages on the real server: what the double of their own tests is held to."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from harness.serve.keys import new_key
from tests.serve.tenants import write_tenants

SEED = 1081735943
pytestmark = pytest.mark.browser


@pytest.fixture
def page(browser, server) -> Iterator[Page]:
    """The chat page; fails where the server or the policy refuses something."""
    context = browser.new_context()
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.goto(server.url)
    yield page
    context.close()
    assert problems == []


def ask(page: Page) -> None:
    """Ask with a seed that is known to give a few words."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer").fill("24")
    page.get_by_label("Temperature").fill("0.9")
    page.get_by_label("Seed", exact=True).fill(str(SEED))
    page.get_by_label("Keep the probability").check()
    page.get_by_role("textbox", name="Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")


def test_an_answer_is_replayed_to_the_same_bits(page):
    expect(page.get_by_role("combobox", name="Model")).to_have_value("tiny")
    ask(page)
    page.get_by_role("button", name="Replay: same bits").click()
    verdict = page.locator(".verdict.same")
    said = rf"Identical\. All [1-9]\d* characters and [1-9]\d* probabilities, seed {SEED}"
    expect(verdict).to_contain_text(re.compile(said))
    expect(page.locator("#context-text")).to_contain_text("/ 256")


def test_the_operator_sees_the_tenant(page, server):
    ask(page)
    expect(page.get_by_role("button", name="Replay: same bits")).to_be_visible()
    page.goto(f"{server.url}/operator")
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#tenants tbody tr")).to_have_count(1)
    slots = page.locator("figure").filter(has_text="Requests in slots").locator("output")
    expect(slots).to_have_text("0 of 4")
    pages = page.locator("figure").filter(has_text="KV pages").locator("output")
    expect(pages).to_contain_text("% used")


def test_the_page_asks_for_the_key_itself(browser, serve, tmp_path):
    """The browser never does, and the key stays in the storage of the tab."""
    key = new_key()
    with serve(tenants=write_tenants(tmp_path, {"a": key})) as server:
        context = browser.new_context()
        page = context.new_page()
        response = page.goto(server.url)
        assert response is not None
        assert response.status == 200
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        ask(page)
        expect(page.locator("#send")).to_have_text("Send")
        expect(page.locator("article.answer .speed")).to_contain_text("tokens")
        stored = "key => [sessionStorage, localStorage].map(s => Object.values(s).includes(key))"
        assert page.evaluate(stored, key) == [True, False]
        page.reload()
        expect(page.get_by_role("combobox", name="Model")).to_have_value("tiny")
        context.close()
