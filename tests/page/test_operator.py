"""The operator page in a real browser, against canned metrics."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.page.fake_server import Fake

pytestmark = pytest.mark.browser


def metrics(step: int, tenant: str = "local") -> str:
    """What a server says that has generated 60 tokens more each time."""
    who = f'tenant="{tenant}",qos="interactive"'
    model = 'model_name="tiny"'
    return f"""# HELP zinc_rt:num_requests_running Requests that have a slot.
# TYPE zinc_rt:num_requests_running gauge
zinc_rt:num_requests_running{{{model}}} 3.0
zinc_rt:num_requests_waiting{{{model}}} 5.0
zinc_rt:kv_pages{{{model},state="used"}} 30.0
zinc_rt:kv_pages{{{model},state="cached"}} 10.0
zinc_rt:kv_pages{{{model},state="free"}} 60.0
zinc_rt:engine_steps_total{{{model}}} {step * 20}.0
zinc_rt:prefix_cache_queries_total{{{model}}} {step * 100}.0
zinc_rt:prefix_cache_hits_total{{{model}}} {step * 25}.0
zinc_rt:generation_tokens_total{{{who}}} {step * 60}.0
zinc_rt:prompt_tokens_total{{{who}}} {step * 100}.0
zinc_rt:request_success_total{{{who},finished_reason="stop"}} 4.0
zinc_rt:request_success_total{{{who},finished_reason="length"}} 1.0
zinc_rt:tenant_slots{{{who}}} 2.0
zinc_rt:tenant_pages{{{who}}} 17.0
zinc_rt:tenant_live{{{who}}} 4.0
zinc_rt:inter_token_latency_seconds_sum {step * 0.6}
zinc_rt:inter_token_latency_seconds_count {step * 60}.0
zinc_rt:inter_token_latency_seconds_bucket{{le="+Inf"}} {step * 60}.0
"""


@pytest.fixture
def fake() -> Fake:
    return Fake(metrics=[metrics(1), metrics(2), metrics(3)])


@pytest.fixture
def operator(browser, double, fake) -> Iterator[Page]:
    """The page with a clock the tests move; fails where it logs an error."""
    double.fake = fake
    # A profile of its own: all pages of one have the same clock.
    context = browser.new_context()
    page = context.new_page()
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{double.url}/operator")
    yield page
    context.close()
    assert problems == []


def test_charts_show_what_the_metrics_say(operator):
    expect(operator.locator("#state")).to_have_text("live")
    says = {"Requests in slots": "3 of 8", "Queue": "5 waiting", "KV pages": "30 % used"}
    for title, text in says.items():
        chart = operator.locator("figure").filter(has_text=title)
        expect(chart.locator("output")).to_have_text(text)
        assert chart.locator("svg").get_attribute("aria-label") == f"{title}: {text}"
    # A rate needs two looks.
    rates = operator.locator("figure").filter(has_text="Tokens per second").locator("output")
    expect(rates).to_have_text("–")
    operator.clock.run_for(2100)
    expect(rates).to_contain_text("/s")
    between = operator.locator("figure").filter(has_text="found in the cache").locator("output")
    expect(between).to_have_text("25 %")
    drawn = operator.locator("figure").filter(has_text="Queue").locator("path")
    assert "L" in (drawn.get_attribute("d") or "")


def test_tenants_are_listed(operator):
    cells = operator.locator("#tenants tbody tr").locator("td")
    expect(cells).to_have_text(["local", "interactive", "100", "60", "0", "", "2", "17", "4", "5"])
    line = cells.nth(5).locator("path")
    assert line.get_attribute("d") == ""
    operator.clock.run_for(2100)
    expect(cells.nth(3)).to_have_text("120")
    operator.clock.run_for(2100)
    expect(cells.nth(5).locator("path")).to_have_attribute("d", re.compile(r"^M.*L"))


def test_a_counter_that_fell_is_no_negative_rate(operator, fake):
    expect(operator.locator("#state")).to_have_text("live")
    fake.metrics[:] = [metrics(0)]
    operator.clock.run_for(2100)
    rates = operator.locator("figure").filter(has_text="Tokens per second").locator("output")
    expect(operator.locator("#tenants td").nth(3)).to_have_text("0")
    expect(rates).to_have_text("–")


class TestHostileName:
    """A tenant's name is text."""

    @pytest.fixture
    def fake(self) -> Fake:
        return Fake(metrics=[metrics(1, r"<img src=x onerror='window.hit=1'> \"quoted\" {a}")])

    def test_it_is_shown_as_it_is(self, operator):
        name = operator.locator("#tenants td").first
        expect(name).to_have_text("<img src=x onerror='window.hit=1'> \"quoted\" {a}")
        assert operator.evaluate("window.hit") is None


class TestNobody:
    """A server that nobody has asked for anything."""

    @pytest.fixture
    def fake(self) -> Fake:
        return Fake(metrics=["zinc_rt:num_requests_running 0.0\n"])

    def test_it_says_so(self, operator):
        expect(operator.locator("#state")).to_have_text("live")
        expect(operator.locator("#no-tenants")).to_be_visible()
        queue = operator.locator("figure").filter(has_text="Queue")
        expect(queue.locator("output")).to_have_text("–")


class TestKey:
    """Metrics that need a key."""

    @pytest.fixture
    def fake(self) -> Fake:
        return Fake(key="right", metrics=[metrics(1)])

    def test_it_is_asked_for(self, operator):
        operator.get_by_label("API key").fill("right")
        operator.keyboard.press("Enter")
        expect(operator.locator("#state")).to_have_text("live")


def test_a_server_that_went_away_is_told_and_waited_for(operator):
    expect(operator.locator("#state")).to_have_text("live")
    operator.route("**/metrics", lambda route: route.abort())
    operator.clock.run_for(2100)
    expect(operator.locator("#banner")).to_contain_text("cannot be reached")
    operator.unroute("**/metrics")
    operator.clock.run_for(2100)
    expect(operator.locator("#banner")).to_be_hidden()
