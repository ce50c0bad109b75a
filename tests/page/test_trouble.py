"""What the page says when the server is busy, closed, gone or breaks off."""

import pytest
from playwright.sync_api import expect

from tests.page.conftest import Chat
from tests.page.fake_server import CONTEXT, CUT_CHARACTERS, Fake

pytestmark = pytest.mark.browser
LOOKS = "**/v1/models"
NOTING = """() => {
    window.noted = new Set();
    const note = () => document.querySelectorAll(".problem").forEach(
        (problem) => window.noted.add(problem.textContent));
    new MutationObserver(note).observe(
        document.body, {subtree: true, childList: true, characterData: true});
}"""


def test_a_busy_server_is_asked_again_when_it_said(chat):
    """What it says meanwhile is noted by the page, which shows it for a second only."""
    chat.page.evaluate(NOTING)
    chat.fake.busy = 2
    chat.send("Go")
    expect(chat.page.locator("article.answer")).to_contain_text("You said Go")
    chat.settled()
    expect(chat.page.locator(".problem")).to_have_count(0)
    assert "The queue is full. Trying again in 1 s." in chat.page.evaluate("[...window.noted]")
    assert len(chat.fake.asked) == 3


def test_waiting_for_a_busy_server_can_be_stopped(chat):
    chat.fake.busy = 100
    chat.send("Go")
    expect(chat.page.locator(".problem")).to_contain_text("The queue is full.")
    chat.page.keyboard.press("Escape")
    chat.settled()
    chat.fake.busy = 0
    chat.press("Try again")
    expect(chat.page.locator("article.answer")).to_contain_text("You said Go")


def test_a_stream_that_breaks_off_again_and_again_is_told_and_what_came_is_kept(chat):
    chat.fake.cut = True
    chat.ask("Go")
    expect(chat.page.locator(".problem")).to_contain_text("ended before the answer did")
    expect(chat.page.locator("article.answer .prose").last).to_contain_text("You said")
    chat.fake.cut = False
    chat.press("Try again")
    expect(chat.page.locator("article.answer")).to_contain_text("You said Go with seed")


def broken_off(chat: Chat) -> None:
    """An answer that was cut, and all that came of it is shown; the page does not see that the
    server is back before its looks for it are let through."""
    expect(chat.page.get_by_role("combobox", name="Model")).to_have_value("tiny")
    chat.page.route(LOOKS, lambda route: route.abort())
    chat.fake.cut = True
    chat.send("Go")
    expect(chat.page.locator(".problem")).to_contain_text("as soon as the server is back")
    came = chat.fake.answer_to(chat.fake.asked[-1])[:CUT_CHARACTERS]
    expect(chat.page.locator("article.answer .prose").last).to_have_text(came.strip())


def test_an_answer_goes_on_by_itself_when_the_server_is_back(chat):
    """The same question with the same seed, which gives what was shown and the rest."""
    broken_off(chat)
    shown = chat.page.locator("article.answer .prose").last.inner_text()
    chat.fake.cut = False
    chat.page.unroute(LOOKS)
    chat.settled()
    expect(chat.page.locator(".problem")).to_have_count(0)
    seed = chat.fake.asked[0]["seed"]
    whole = f"You said Go with seed {seed}"
    assert whole.startswith(shown)
    assert shown != whole
    expect(chat.page.locator("article.answer .prose").last).to_have_text(whole)
    assert {asked["seed"] for asked in chat.fake.asked} == {seed}


def test_an_answer_that_goes_on_is_not_called_broken(chat):
    """What is said of the server goes before the text grows beyond what was shown."""
    chat.fake.answers["Go"] = " ".join(map(str, range(200)))
    broken_off(chat)
    chat.page.evaluate(
        """() => {
          const prose = () => [...document.querySelectorAll('article.answer .prose')].at(-1);
          const shown = prose().textContent.length;
          window.states = [];
          new MutationObserver(() => {
            const problem = document.querySelector('.problem');
            if (prose().textContent.length > shown) window.states.push(problem?.textContent ?? '');
          }).observe(document.body, { childList: true, characterData: true, subtree: true });
        }"""
    )
    chat.fake.cut = False
    chat.page.unroute(LOOKS)
    chat.settled()
    expect(chat.page.locator("article.answer .prose").last).to_contain_text("199")
    states = chat.page.evaluate("window.states")
    assert states
    assert set(states) == {""}


def test_an_answer_that_cannot_go_on_says_why(chat):
    broken_off(chat)
    chat.fake.answers["Go"] = "Something else"
    chat.fake.cut = False
    chat.page.unroute(LOOKS)
    expect(chat.page.locator(".problem")).to_contain_text("gives another answer now")
    chat.settled()


def test_waiting_for_a_server_can_be_stopped(chat):
    chat.page.route("**/v1/**", lambda route: route.abort())
    chat.send("Go")
    expect(chat.page.locator(".problem")).to_contain_text("as soon as the server is back")
    chat.page.keyboard.press("Escape")
    chat.settled()
    chat.page.unroute("**/v1/**")
    chat.press("Try again")
    expect(chat.page.locator("article.answer")).to_contain_text("You said Go")


def test_a_turn_that_failed_is_not_part_of_the_next_prompt(chat):
    chat.ask("One")
    chat.fake.refusal = "no"
    chat.ask("Two")
    expect(chat.page.locator(".problem")).to_contain_text("No.")
    expect(chat.page.locator("article.answer").last).to_contain_text("does not see this turn")
    chat.fake.refusal = ""
    chat.ask("Three")
    texts = [message["content"] for message in chat.fake.asked[-1]["messages"]]
    assert (texts[0], texts[-1], len(texts)) == ("One", "Three", 3)


class TestFullContext:
    """Conversations that are longer than the model's context."""

    def test_the_oldest_turns_can_be_forgotten(self, chat):
        for text in ("One", "Two", "Three"):
            chat.ask(text)
        chat.fake.max_messages = 5
        chat.ask("Four")
        expect(chat.page.locator(".problem")).to_contain_text("too long")
        chat.press("Forget the oldest turns")
        expect(chat.page.locator("article.answer").last).to_contain_text("You said Four")
        chat.settled()
        texts = [message["content"] for message in chat.fake.asked[-1]["messages"]]
        assert (texts[0], texts[-1], len(texts)) == ("Three", "Four", 3)
        expect(chat.page.locator(".forgotten")).to_have_count(1)
        chat.page.reload()
        expect(chat.page.locator(".forgotten + article")).to_contain_text("Three")
        chat.press("Replay: same bits")
        expect(chat.page.locator(".verdict")).to_contain_text("Identical.")

    def test_a_new_chat_is_offered(self, chat):
        chat.fake.max_messages = 0
        chat.ask("One")
        chat.press("Forget the oldest turns")
        expect(chat.page.locator("#banner")).to_contain_text("This message alone is longer")
        chat.page.locator(".problem").get_by_role("button", name="New chat").click()
        expect(chat.page.locator("#empty")).to_be_visible()

    def test_an_answer_that_filled_it_says_so(self, chat):
        """Not one that is cut by another limit."""
        chat.fake.finish = "length"
        chat.ask("One")
        expect(chat.page.locator("article.answer")).to_contain_text("Cut by the length limit")
        expect(chat.page.locator(".problem")).to_have_count(0)
        chat.press("New chat")
        chat.fake.used = CONTEXT
        chat.ask("One")
        expect(chat.page.locator("article.answer")).to_contain_text("Cut by the length limit")
        expect(chat.page.locator(".problem")).to_contain_text("The context is full")


def test_a_server_that_cannot_be_reached(chat):
    expect(chat.page.get_by_role("combobox", name="Model")).to_have_value("tiny")
    chat.page.route("**/v1/**", lambda route: route.abort())
    chat.send("Go")
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

    def test_it_is_asked_for_until_it_is_right(self, chat):
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
