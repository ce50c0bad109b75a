"""A newcomer serves the model: page, requests, proofs, users, and the end of it."""

import json
import os
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.paths import ROOT
from tests.patience import PATIENCE_SECONDS
from tests.walk.conftest import MODEL, Newcomer
from tests.walk.pages import page_requests

pytestmark = pytest.mark.walk
QUESTION = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 24}
PAGE = re.compile(r"chat page: (\S+)/$")
WIDTHS = (390, 1280)
REQUESTS = [asked for asked in page_requests() if "ORG" not in str(asked.body)]
"""Those that need no model of the hub."""


@dataclass(frozen=True)
class Served:
    """A server that runs, and who started it."""

    newcomer: Newcomer
    url: str
    lines: tuple[str, ...]

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON that the server answers."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


@pytest.fixture(scope="module")
def served(newcomer) -> Iterator[Served]:
    """``zinc-rt serve`` until it names its page; ended by ``zinc-rt stop``."""
    newcomer.zinc("model", "use", f"./{MODEL}")
    words = ("serve", "--port", "0", "--context", "1K", "--alias", "my-model")
    process = newcomer.start("zinc-rt", *words, stdout=os.open(os.devnull, os.O_WRONLY))
    lines: list[str] = []
    assert process.stderr is not None
    found = None
    while found is None:
        line = process.stderr.readline()
        assert line, "".join(lines)
        lines.append(line.rstrip("\n"))
        found = PAGE.search(lines[-1])
    try:
        yield Served(newcomer, found[1], tuple(lines))
    finally:
        done = newcomer.run("zinc-rt", "stop")
        process.stderr.close()
        assert (done.returncode, process.wait(PATIENCE_SECONDS)) == (0, 0)


@pytest.fixture(params=WIDTHS)
def page(browser, request) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": request.param, "height": 844})
    page.set_default_timeout(60_000)
    # The page draws a seed for every answer.
    page.add_init_script("crypto.getRandomValues = (bytes) => bytes.fill(7)")
    yield page
    page.close()


def test_the_log_says_how_to_go_on(served):
    text = "\n".join(served.lines)
    assert f"listening on {served.url}" in text
    assert "sampling, where a request names none: temperature 0.7" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("asked", REQUESTS, ids=lambda asked: f"{asked.page} {asked.route}")
def test_requests_of_the_pages_are_answered(served, asked):
    assert "error" not in served.ask(asked.route, asked.body)


def test_the_pages_have_requests():
    assert {asked.page for asked in REQUESTS} >= {"README.md", "serving.md", "receipts.md"}
    assert len(REQUESTS) > 3


def test_an_answer_is_verified(served):
    """A request and its answer: identical, and different once a character is changed."""
    home = served.newcomer.home
    (body,) = (asked.body for asked in REQUESTS if asked.page == "README.md")
    answer = served.ask("/v1/chat/completions", body)
    assert answer["x_zinc"]["sampling_defaults"]["temperature"] == 0.7
    request, response = home / "asked.json", home / "answered.json"
    request.write_text(json.dumps(body))
    response.write_text(json.dumps(answer))
    files = (request.name, response.name, "--context", "1K")
    assert served.newcomer.zinc("verify", *files) == "identical\n"
    answer["choices"][0]["message"]["content"] += "!"
    response.write_text(json.dumps(answer))
    done = served.newcomer.run("zinc-rt", "verify", *files)
    assert done.returncode == 1
    assert done.stdout.startswith("different: ")


def test_the_lines_by_which_the_readme_verifies(served):
    """As they are typed, but for the server's address and the size of its context."""
    page = (ROOT / "README.md").read_text("utf-8")
    typed = [line.strip() for line in re.findall(r"^ {4}\$ (.*)$", page, re.MULTILINE)]
    assert len(typed) == 4
    done = [
        served.newcomer.run(
            *("bash", "-euo", "pipefail", "-c"),
            line.replace("localhost:8080", served.url.removeprefix("http://")),
            ZINC_RT_CONTEXT="1K",
        )
        for line in typed
    ]
    assert [one.returncode for one in done] == [0, 0, 0, 1], done
    assert done[2].stdout == "identical\n"
    assert done[3].stdout.startswith("different: choices[0].message.content: character 0: '?")


def test_one_model_has_several_names(served):
    listed = served.ask("/v1/models")["data"][0]
    assert listed["x_zinc"]["sampling"]["temperature"] == 0.7
    for name in (listed["id"], MODEL.removesuffix(".gguf"), "my-model"):
        assert served.ask("/v1/chat/completions", {**QUESTION, "model": name})["choices"]


def test_the_terminal_talks_to_it(served):
    newcomer = served.newcomer
    said = newcomer.zinc("chat", "--server", served.url, "-n", "8", given="Hello\n")
    assert said
    assert served.url in newcomer.zinc("ps")


def test_users_get_keys(served):
    """A file of tenants that does not exist yet is made by the first command."""
    newcomer = served.newcomer
    words = ("--tenants", "tenants.toml")
    key = newcomer.zinc("tenants", "add", "alice", *words)
    assert len(key.split()) == 1
    assert "alice" in newcomer.zinc("tenants", "list", *words)
    assert "alice" in newcomer.zinc("tenants", "check", "tenants.toml")


@pytest.mark.browser
def test_a_page_answers(served, page):
    """An answer, the same conversation after a reload, and no sideways scrolling."""
    page.goto(served.url)
    expect(page.locator("#model")).to_have_value(MODEL.removesuffix(".gguf"))
    page.evaluate("localStorage.clear()")
    box = page.get_by_role("textbox", name="Message", exact=True)
    box.fill("Why?")
    page.keyboard.press("Enter")
    answer = page.locator("article.answer")
    expect(answer).to_contain_text("first token", timeout=1000 * PATIENCE_SECONDS)
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_have_text("Send")
    text = page.locator("article.answer .prose").last.inner_text()
    assert "#chat=" in page.url
    page.reload()
    expect(page.locator("article.answer .prose").last).to_have_text(text, use_inner_text=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="Settings").first.click()
    expect(page.locator("#temperature")).to_have_attribute("placeholder", "default: 0.7")
