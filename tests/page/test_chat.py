"""The chat page in a real browser, against a double of the server."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.page.fake_server import MARKDOWN, THINKING

pytestmark = pytest.mark.browser


def test_markdown_is_rendered_and_its_code_is_highlighted_and_copied(chat):
    chat.fake.answers["Go"] = MARKDOWN
    chat.ask("Go")
    answer = chat.page.locator("article.answer")
    expect(answer.locator("h2")).to_have_text("Merging")
    expect(answer.locator("em")).to_have_text("words")
    expect(answer.locator("td.align-right")).to_have_text("2")
    expect(answer.locator("pre .hljs-keyword").first).to_have_text("def")
    expect(answer.locator("li")).to_have_count(2)
    assert answer.locator("a").get_attribute("rel") == "noopener noreferrer nofollow"
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.press("Copy this code")
    expect(chat.page.get_by_role("button", name="Copy this code")).to_have_text("Copied")
    code = MARKDOWN.partition("```python\n")[2].partition("```")[0]
    assert chat.page.evaluate("navigator.clipboard.readText()") == code


def test_blocks_that_are_done_stay_the_same_nodes_while_more_comes(chat):
    chat.fake.answers["Go"] = "First paragraph.\n\n" + "more words " * 60
    chat.fake.delay = 0.005
    chat.send("Go")
    second = chat.page.locator("article.answer .block").nth(1)
    expect(second).to_contain_text("more")
    chat.page.evaluate("document.querySelector('.answer .block').dataset.seen = 'yes'")
    chat.settled()
    assert chat.page.locator("article.answer .block").first.get_attribute("data-seen") == "yes"
    assert second.get_attribute("data-seen") is None


def test_stop_keeps_what_came(chat):
    chat.fake.answers["Go"] = "word " * 500
    chat.fake.delay = 0.1
    chat.send("Go")
    expect(chat.page.locator("article.answer")).to_contain_text("word")
    chat.page.keyboard.press("Escape")
    chat.settled()
    answer = chat.page.locator("article.answer")
    expect(answer).to_contain_text("Stopped")
    assert 0 < answer.inner_text().count("word") < 500


def test_regenerate_asks_the_same_with_another_seed(chat):
    """At temperature 0 it says that nothing changes."""
    chat.ask("Go")
    chat.press("Regenerate")
    expect(chat.page.locator("article.answer")).to_have_count(1)
    chat.settled()
    first, second = chat.fake.asked
    assert first["messages"] == second["messages"] == [{"role": "user", "content": "Go"}]
    assert first["seed"] != second["seed"]
    expect(chat.page.locator("#banner")).to_be_hidden()
    chat.press("Settings")
    chat.page.get_by_label("Temperature").fill("0")
    chat.press("Regenerate")
    expect(chat.page.locator("#banner")).to_contain_text("raise it in Settings")
    chat.settled()


def test_edit_forgets_what_came_after(chat):
    chat.ask("One")
    chat.ask("Two")
    chat.page.locator("article.user").first.hover()
    chat.page.get_by_role("button", name="Edit").first.click()
    editor = chat.page.get_by_role("textbox", name="Edit your message")
    editor.fill("Three")
    editor.press("Enter")
    expect(chat.page.locator("article.user")).to_have_count(1)
    expect(chat.page.locator("article.answer")).to_contain_text("You said Three")
    chat.settled()
    assert chat.fake.asked[-1]["messages"] == [{"role": "user", "content": "Three"}]


def test_conversations_survive_a_reload_and_can_be_deleted(chat):
    chat.ask("First talk")
    chat.press("New chat")
    chat.ask("Second talk")
    chat.page.reload()
    rows = chat.page.locator("#sessions .choose")
    expect(rows).to_have_text(["Second talk", "First talk"])
    rows.last.click()
    expect(chat.page.locator("article.answer")).to_contain_text("You said First talk")
    remove = chat.page.get_by_role("button", name="Delete First talk")
    remove.click()
    expect(rows).to_have_count(2)
    remove.click()
    expect(rows).to_have_text(["Second talk"])
    expect(chat.page.locator("#empty")).to_be_visible()


def test_a_reload_returns_to_the_conversation_and_its_address_is_a_link(chat):
    chat.ask("First talk")
    expect(chat.page).to_have_url(re.compile("#chat="))
    first = chat.page.url
    chat.page.reload()
    expect(chat.page.locator("article.answer")).to_contain_text("You said First talk")
    chat.press("New chat")
    expect(chat.page).not_to_have_url(re.compile("#chat="))
    chat.ask("Second talk")
    expect(chat.page).not_to_have_url(first)
    chat.page.go_back()
    expect(chat.page.locator("article.answer")).to_contain_text("You said First talk")
    expect(chat.page).to_have_url(first)


def test_an_address_of_another_browser_is_told(chat):
    chat.page.goto(f"{chat.url}#chat=ffff")
    chat.page.reload()
    expect(chat.page.locator("#banner")).to_contain_text("does not have the conversation")
    expect(chat.page.locator("#empty")).to_be_visible()


def test_garbage_in_the_storage_is_survived(chat):
    chat.page.evaluate(
        """() => { localStorage['zinc.session.x'] = '{"id":"x","messages":[1]}';
                   localStorage['zinc.session.y'] = '{';
                   localStorage['zinc.settings'] = '{"values":null,"seed":"no"}'; }"""
    )
    chat.page.reload()
    chat.ask("Go")
    expect(chat.page.locator("#sessions .choose")).to_have_text(["Go"])


def test_system_prompt_and_sampling_are_sent(chat):
    chat.press("Settings")
    chat.page.get_by_label("System prompt").fill("Be brief.")
    chat.page.get_by_label("Temperature").fill("0.5")
    chat.page.get_by_label("Top k").fill("7")
    chat.page.get_by_label("Thinking").select_option("off")
    chat.ask("Go")
    (asked,) = chat.fake.asked
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (asked["temperature"], asked["top_k"]) == (0.5, 7)
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert "top_p" not in asked


def test_numbers_out_of_range_are_not_sent(chat):
    chat.press("Settings")
    chat.page.get_by_label("Temperature").fill("9")
    chat.ask("Go")
    assert "temperature" not in chat.fake.asked[0]


def test_speed_and_context_are_shown(chat):
    chat.fake.answers["Go"] = "word " * 40
    chat.fake.delay = 0.005
    chat.ask("Go")
    speed = chat.page.locator("article.answer .speed")
    expect(speed).to_contain_text("tokens/s")
    expect(speed).to_contain_text("first token")
    expect(speed).to_contain_text("50 tokens")
    expect(chat.page.locator("#context-text")).to_have_text("1,024 / 4,096")
    assert chat.page.locator("#context-meter").get_attribute("value") is not None


def test_replay_says_where_the_text_first_differs(chat):
    chat.fake.answers["Go"] = "same start"
    chat.fake.drift = True
    chat.ask("Go")
    chat.press("Replay: same bits")
    verdict = chat.page.locator(".verdict.differs")
    expect(verdict).to_contain_text(f"character {len('same start again ') + 1}.")
    expect(verdict.locator("mark")).to_have_text(["1", "2"])


def test_what_was_stopped_is_replayed_as_far_as_it_goes(chat):
    chat.fake.answers["Go"] = "word " * 400
    chat.fake.delay = 0.1
    chat.send("Go")
    expect(chat.page.locator("article.answer")).to_contain_text("word")
    chat.page.keyboard.press("Escape")
    chat.settled()
    chat.press("Replay: same bits")
    expect(chat.page.locator(".verdict.same")).to_contain_text("Identical.")


def test_a_locked_seed_is_used_for_every_answer(chat):
    chat.ask("One")
    seed = chat.fake.asked[0]["seed"]
    chat.press(f"Seed {seed}")
    expect(chat.page.get_by_label("Lock the seed")).to_be_checked()
    chat.ask("Two")
    chat.page.reload()
    chat.ask("Three")
    assert [asked["seed"] for asked in chat.fake.asked] == [seed] * 3


def test_thinking_is_folded_and_not_sent_back(chat):
    chat.fake.answers["Go"] = THINKING
    chat.ask("Go")
    answer = chat.page.locator("article.answer")
    expect(answer.locator("summary")).to_have_text("Thoughts")
    expect(answer.get_by_text("two and two")).to_be_hidden()
    expect(answer.locator("strong")).to_have_text("4")
    answer.locator("summary").click()
    expect(answer.get_by_text("two and two")).to_be_visible()
    chat.ask("More")
    assert chat.fake.asked[1]["messages"][1]["content"] == "The answer is **4**."


def test_the_probability_of_a_token_is_shown(chat):
    chat.press("Settings")
    chat.page.get_by_label("Keep the probability").check()
    chat.ask("Go")
    chat.press("Tokens")
    chat.page.locator(".token").nth(1).hover()
    expect(chat.page.locator(".token-card")).to_contain_text("77.9 %")
    expect(chat.page.locator(".token-card")).to_contain_text("else")
    chat.press("Replay: same bits")
    expect(chat.page.locator(".verdict.same")).to_contain_text("probabilities")
    first, second = chat.fake.asked
    assert first == second


def test_another_model_is_asked_and_remembered(chat):
    picker = chat.page.get_by_role("combobox", name="Model")
    picker.select_option("other")
    expect(chat.page.locator(".badge")).to_have_text("opencl")
    chat.page.reload()
    expect(picker).to_have_value("other")
    chat.ask("Go")
    assert chat.fake.asked[0]["model"] == "other"


def test_export(chat, tmp_path):
    """Once there is a message."""
    export = chat.page.get_by_role("combobox", name="Export this conversation")
    expect(export).to_be_hidden()
    chat.ask("Go")
    for form in ("markdown", "json"):
        with chat.page.expect_download() as download:
            export.select_option(form)
        download.value.save_as(tmp_path / form)
        assert "You said Go" in (tmp_path / form).read_text()
    told = json.loads((tmp_path / "json").read_text())
    assert told["messages"][0] == {"role": "user", "content": "Go"}
    chat.press("New chat")
    expect(export).to_be_hidden()


def test_shift_enter_breaks_the_line(chat):
    box = chat.page.get_by_role("textbox", name="Message", exact=True)
    box.press_sequentially("a")
    box.press("Shift+Enter")
    box.press_sequentially("b")
    box.press("Enter")
    chat.settled()
    expect(chat.page.locator(".bubble")).to_have_text("a\nb")
    assert chat.fake.asked[0]["messages"][0]["content"] == "a\nb"


def test_dark_mode_is_kept(chat):
    background = "getComputedStyle(document.body).backgroundColor"
    light = chat.page.evaluate(background)
    chat.press("Switch between light and dark")
    dark = chat.page.evaluate(background)
    assert dark != light
    chat.page.reload()
    assert chat.page.evaluate(background) == dark


def test_a_narrow_page_never_scrolls_sideways(chat):
    chat.page.set_viewport_size({"width": 360, "height": 640})
    chat.fake.answers["Go"] = MARKDOWN + "\n" + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n"
    chat.ask("Go")
    assert chat.page.evaluate("document.documentElement.scrollWidth") == 360
    expect(chat.page.get_by_role("button", name="New chat")).to_be_hidden()
    chat.press("Conversations")
    expect(chat.page.get_by_role("button", name="New chat")).to_be_visible()


def test_every_control_has_a_name(chat):
    chat.ask("Go")
    chat.press("Settings")
    nameless = chat.page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea')].filter(
             (one) => !one.textContent.trim() && !one.getAttribute('aria-label') &&
                      !one.labels?.length).map((one) => one.outerHTML)"""
    )
    assert nameless == []
