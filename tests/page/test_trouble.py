"""What the page says when the server is busy, closed, gone or breaks off."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.page.conftest import Chat
from tests.page.fake_server import Fake

pytestmark = pytest.mark.browser


def test_a_busy_server_is_asked_again_when_it_said(chat: Chat) -> None:
    chat.fake.busy = 2
    chat.send("Go")
    expect(chat.page.locator(".problem")).to_have_text("The queue is full. Trying again in 1 s.")
    expect(chat.page.locator("article.answer")).to_contain_text("You said Go")
    chat.settled()
    expect(chat.page.locator(".problem")).to_have_count(0)
    assert len(chat.fake.asked) == 3


def test_waiting_for_a_busy_server_can_be_stopped(chat: Chat) -> None:
    chat.fake.busy = 100
    chat.send("Go")
    expect(chat.page.locator(".problem")).to_contain_text("The queue is full.")
    chat.page.keyboard.press("Escape")
    chat.settled()
    chat.fake.busy = 0
    chat.press("Try again")
    expect(chat.page.locator("article.answer")).to_contain_text("You said Go")


def test_a_stream_that_breaks_off_is_told_and_what_came_is_kept(chat: Chat) -> None:
    chat.fake.cut = True
    chat.ask("Go")
    expect(chat.page.locator(".problem")).to_contain_text("ended before the answer did")
    expect(chat.page.locator("article.answer .prose").last).to_contain_text("You said")
    chat.fake.cut = False
    chat.press("Try again")
    expect(chat.page.locator("article.answer")).to_contain_text("You said Go with seed")


def test_a_server_that_cannot_be_reached(chat: Chat) -> None:
    expect(chat.page.get_by_role("combobox", name="Model")).to_have_value("tiny")
    chat.page.route("**/v1/**", lambda route: route.abort())
    chat.ask("Go")
    expect(chat.page.locator(".problem")).to_contain_text("cannot be reached")
    chat.page.reload()
    expect(chat.page.locator("#banner")).to_contain_text("cannot be reached")
    chat.page.unroute("**/v1/**")
    expect(chat.page.locator("#banner")).to_be_hidden()
    expect(chat.page.get_by_role("combobox", name="Model")).to_have_value("tiny")


class TestKey:
    """A server that wants one."""

    @pytest.fixture
    def fake(self) -> Fake:
        return Fake(key="right")

    def test_it_is_asked_for_until_it_is_right(self, chat: Chat) -> None:
        dialog = chat.page.get_by_role("dialog")
        expect(dialog).to_contain_text("This server needs a key.")
        chat.page.get_by_label("API key").fill("wrong")
        chat.page.keyboard.press("Enter")
        expect(chat.page.get_by_label("API key")).to_have_value("")
        chat.page.get_by_label("API key").fill("right")
        chat.press("Use this key")
        expect(dialog).to_be_hidden()
        chat.ask("Go")
        expect(chat.page.locator("article.answer")).to_contain_text("You said Go")
        assert chat.page.evaluate("localStorage['zinc.key']") is None
        assert chat.page.evaluate("JSON.stringify(localStorage)").count("right") == 0
