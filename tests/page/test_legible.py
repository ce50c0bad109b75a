"""Everything on the pages can be read: contrast of 4.5 to 1, and names that are not cut."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.conftest import Chat
from tests.page.fake_server import MARKDOWN, THINKING, Fake
from tests.page.test_models import GB, model

pytestmark = pytest.mark.browser
LEAST = 4.5
LONG_NAME = "smollm2-135m-instruct"
FAINT = Path(__file__).with_name("faint.js").read_text()


def faint(chat: Chat) -> list[Any]:
    """The visible texts with less contrast, each with its ratio."""
    found: list[Any] = chat.page.evaluate(FAINT, LEAST)
    return found


@pytest.fixture
def fake() -> Fake:
    """A server with models of every state, and answers with every kind of text."""
    large = model("large", size_bytes=20 * GB, memory_bytes=21 * GB, quant="Q4_K_M")
    used = model("tiny", installed=True, active=True, memory_bytes=30 * GB)
    small = model("other", installed=True, memory_bytes=GB)
    return Fake(
        managed=[used, small, large], memory=2 * GB, answers={"Code": MARKDOWN, "Think": THINKING}
    )


def fill(chat: Chat) -> None:
    """A conversation that shows all there is to show."""
    chat.ask("Code")
    chat.press("Settings")
    chat.page.get_by_label("Keep the probability of every token").check()
    chat.ask("Think")
    chat.page.locator(".thinking summary").last.click()
    chat.fake.finish = "length"
    chat.ask("Long")
    chat.press("Tokens")
    chat.press("Replay: same bits")
    expect(chat.page.locator(".verdict")).to_contain_text("Identical.")
    chat.settled()
    chat.fake.refusal = "no"
    chat.ask("Fail")
    chat.page.locator("article.user").last.hover()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_stands_out(chat, theme):
    chat.page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    assert faint(chat) == []
    fill(chat)
    assert faint(chat) == []
    chat.press("Models")
    expect(chat.page.locator("#managed li")).to_have_count(3)
    assert faint(chat) == []


def test_faint_text_would_be_found(chat):
    chat.page.evaluate("document.querySelector('#empty h1').style.color = '#999'")
    (found,) = faint(chat)
    assert found[1] == "H1"


def test_models_tell_size_memory_and_whether_they_fit(chat):
    chat.press("Models")
    rows = chat.page.locator("#managed li")
    expect(rows.filter(has_text="large")).to_contain_text("20.0 GB · takes about 21.0 GB of memory")
    expect(rows.filter(has_text="large")).to_contain_text(
        "Does not fit: the server has 2.0 GB free"
    )
    expect(rows.filter(has_text="other")).not_to_contain_text("Does not fit")
    expect(rows.filter(has_text="tiny")).not_to_contain_text("Does not fit")


@pytest.mark.parametrize("settings", [False, True])
def test_nothing_in_the_header_is_covered_or_cut(chat, settings):
    """Also beside the settings, which take part of the page's width."""
    chat.ask("Hello")
    for width in (390, 700, 800, 1024, 1280):
        chat.page.set_viewport_size({"width": width, "height": 844})
        if settings and width == 390:
            chat.press("Settings")
        outside, covered, room, need = chat.page.evaluate(HEADER, LONG_NAME)
        assert (outside, covered) == ([], []), width
        if not settings:
            assert need <= room, width
            assert chat.page.evaluate("document.documentElement.scrollWidth") == width


HEADER = Path(__file__).with_name("header.js").read_text()
"""What sticks out of the header, what is covered; room of the name of the model, and its width."""
