"""Everything on the pages can be read: contrast of 4.5 to 1, and names that are not cut."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.conftest import Chat
from tests.page.fake_server import MARKDOWN, THINKING, Fake
from tests.page.test_models import GB, model

pytestmark = pytest.mark.browser
LEAST = 4.5
LONG_NAME = "smollm2-135m-instruct"
FAINT = """(least) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = (top, below) => {
    const part = top[3] / 255;
    return [0, 1, 2].map((n) => top[n] * part + below[n] * (1 - part)).concat(255);
  };
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) {
      layers.unshift(rgba(getComputedStyle(at).backgroundColor));
    }
    return layers.reduce((below, top) => over(top, below), [255, 255, 255, 255]);
  };
  const light = ([r, g, b]) => [r, g, b].map((one) => {
    const part = one / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }).reduce((sum, part, n) => sum + part * [0.2126, 0.7152, 0.0722][n], 0);
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const found = [];
  const check = (node, style, text) => {
    const below = behind(node);
    const value = ratio(over(rgba(style.color), below), below);
    if (value < least) found.push([value.toFixed(2), node.tagName, node.className, text]);
  };
  for (const node of document.querySelectorAll("body *")) {
    const said = [...node.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data);
    const text = said.join("").trim();
    if (text && node.checkVisibility() && node.tagName !== "OPTION") {
      check(node, getComputedStyle(node), text.slice(0, 30));
    }
    if (node.placeholder) check(node, getComputedStyle(node, "::placeholder"), node.placeholder);
  }
  return found;
}"""


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
def test_all_text_stands_out(chat: Chat, theme: str) -> None:
    chat.page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    assert faint(chat) == []
    fill(chat)
    assert faint(chat) == []
    chat.press("Models")
    expect(chat.page.locator("#managed li")).to_have_count(3)
    assert faint(chat) == []


def test_faint_text_would_be_found(chat: Chat) -> None:
    chat.page.evaluate("document.querySelector('#empty h1').style.color = '#999'")
    (found,) = faint(chat)
    assert found[1] == "H1"


def test_models_tell_size_memory_and_whether_they_fit(chat: Chat) -> None:
    chat.press("Models")
    rows = chat.page.locator("#managed li")
    expect(rows.filter(has_text="large")).to_contain_text("20.0 GB · takes about 21.0 GB of memory")
    expect(rows.filter(has_text="large")).to_contain_text(
        "Does not fit: the server has 2.0 GB free"
    )
    expect(rows.filter(has_text="other")).not_to_contain_text("Does not fit")
    expect(rows.filter(has_text="tiny")).not_to_contain_text("Does not fit")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_name_of_the_model_is_not_cut(chat: Chat, width: int) -> None:
    chat.page.set_viewport_size({"width": width, "height": 844})
    room, need = chat.page.evaluate(
        """(name) => {
          const select = document.querySelector('#model');
          select.replaceChildren(new Option(name));
          const style = getComputedStyle(select);
          const text = document.createElement('canvas').getContext('2d');
          text.font = style.font;
          const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
          return [select.clientWidth - padding, text.measureText(name).width];
        }""",
        LONG_NAME,
    )
    assert need <= room
    assert chat.page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [390, 700, 800, 1024, 1280])
@pytest.mark.parametrize("settings", [False, True])
def test_nothing_in_the_header_covers_anything(chat: Chat, width: int, settings: bool) -> None:
    """Also beside the settings, which take part of the page's width."""
    chat.page.set_viewport_size({"width": width, "height": 844})
    chat.ask("Hello")
    if settings:
        chat.press("Settings")
    wrong = chat.page.evaluate(
        """(name) => {
          document.querySelector('#model').replaceChildren(new Option(name));
          const header = document.querySelector('header').getBoundingClientRect();
          const boxes = [...document.querySelectorAll('header > *')]
            .map((one) => [one.id, one.getBoundingClientRect()])
            .filter(([, box]) => box.width > 1 && box.height > 1);
          const outside = boxes.filter(([, box]) => box.left < header.left - 1
            || box.right > header.right + 1);
          const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 1 && b.top < a.bottom - 1;
          const covered = boxes.filter(([, a], at) =>
            boxes.some(([, b], other) => other > at && meet(a, b)));
          return [outside.map(([id]) => id), covered.map(([id]) => id)];
        }""",
        LONG_NAME,
    )
    assert wrong == [[], []]
