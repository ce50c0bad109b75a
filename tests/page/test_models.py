"""Fetching, choosing and deleting models on the page; tool calls, folded."""

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.fake_server import Fake

pytestmark = pytest.mark.browser

GB = 10**9


def model(name: str, **facts: Any) -> dict[str, Any]:
    known = {"size_bytes": GB, "source": "pypi", "installed": False, "active": False, "pull": None}
    return {"id": name, **known, **facts}


class TestManager:
    """A server that tells what it has and could have."""

    @pytest.fixture
    def fake(self) -> Fake:
        return Fake(
            managed=[
                model("tiny", installed=True, active=True, parameters="0.6 B", quant="Q4_K_M"),
                model("other", installed=True, size_bytes=320_000_000),
                model("large"),
            ],
            progress=[
                {"model": "large", "status": "looking", "completed": 0, "total": None},
                {"model": "large", "status": "downloading", "completed": GB // 4, "total": GB},
                {"model": "large", "status": "done", "completed": GB, "total": GB},
            ],
        )

    def test_a_model_is_fetched_with_its_progress_and_used(self, chat):
        chat.press("Models")
        row = chat.page.locator("#managed li").filter(has_text="large")
        row.get_by_role("button", name="Fetch").click()
        expect(row).to_contain_text("downloading, 250 MB of 1.0 GB")
        assert row.get_by_role("progressbar").get_attribute("value") == "0.25"
        chat.fake.fetched.set()
        row.get_by_role("button", name="Use").click()
        expect(row).to_contain_text("answers")
        chat.page.keyboard.press("Escape")
        expect(chat.page.get_by_role("dialog")).to_be_hidden()

    def test_what_goes_wrong_is_said(self, chat):
        chat.fake.progress = [{"error": {"message": "the disk is full"}}]
        chat.press("Models")
        chat.page.get_by_label("Fetch another").fill("hf.co/org/repo")
        chat.page.keyboard.press("Enter")
        expect(chat.page.locator("#models-problem")).to_contain_text(
            "hf.co/org/repo: The disk is full"
        )
        expect(chat.page.locator("#managed li")).to_have_count(3)

    def test_the_second_click_deletes_unless_the_model_answers(self, chat):
        expect(chat.page.locator("#badges .badge")).to_have_text(["cpu", "interactive"])
        chat.press("Models")
        row = chat.page.locator("#managed li").filter(has_text="other")
        row.get_by_role("button", name="Delete").click()
        row.get_by_role("button", name="Delete?").click()
        expect(row.get_by_role("button", name="Fetch")).to_be_visible()
        row = chat.page.locator("#managed li").filter(has_text="tiny")
        expect(row).to_contain_text("0.6 B · Q4_K_M · 1.0 GB")
        expect(row.get_by_role("button")).to_have_count(0)


def test_a_server_that_manages_no_models_has_no_such_button(chat):
    expect(chat.page.get_by_role("combobox", name="Model")).to_have_value("tiny")
    expect(chat.page.get_by_role("button", name="Models")).to_be_hidden()


def test_tool_calls_are_shown_folded(chat):
    """Their arguments come in pieces, and are laid out when they are whole."""
    chat.fake.calls = [
        {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": '}},
        {"index": 0, "function": {"arguments": '"<b>Oslo</b>"}'}},
        {"index": 1, "id": "call_2", "function": {"name": "time", "arguments": "{}"}},
    ]
    chat.ask("Go")
    calls = chat.page.locator("details.call")
    expect(calls).to_have_count(2)
    expect(calls.first.locator("pre")).to_be_hidden()
    calls.first.locator("summary").click()
    expect(calls.first.locator("summary")).to_have_text("Calls weather")
    expect(calls.first.locator("pre")).to_have_text('{\n  "city": "<b>Oslo</b>"\n}')
    expect(chat.page.locator("article.answer")).to_contain_text("You said Go")


def test_everything_of_the_head_is_on_a_narrow_screen(chat):
    chat.fake.managed = [model("tiny", installed=True, active=True)]
    chat.page.set_viewport_size({"width": 360, "height": 700})
    chat.page.reload()
    expect(chat.page.get_by_role("button", name="Models")).to_be_visible()
    chat.ask("Go")
    for control in ("Conversations", "Models", "Settings"):
        box = chat.page.get_by_role("button", name=control, exact=True).bounding_box()
        assert box is not None
        assert 0 <= box["x"] < box["x"] + box["width"] <= 360
