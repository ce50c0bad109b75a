"""Who asks for more than is theirs gets 429, while others are served; 503 is for all."""

import threading
from collections.abc import Callable, Iterator

import openai
import pytest
from openai import OpenAI

from harness.serve.keys import new_key
from harness.serve.run import Running
from reference.engine import Engine
from tests.patience import wait_until
from tests.serve.calling import client_waits
from tests.serve.engine_child import statistics_of
from tests.serve.http import Http, Reply, bearer
from tests.serve.tenants import write_tenants
from tests.serve.test_connections import COMPLETIONS

GREEDY, OTHER, THIRD = new_key(), new_key(), new_key()
DEPTH = 3
BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "seed": 1}


@pytest.fixture(scope="module")
def keyed(serve, tmp_path_factory) -> Iterator[Running]:
    keys = {"greedy": GREEDY, "other": OTHER, "third": THIRD}
    path = write_tenants(tmp_path_factory.mktemp("quotas"), keys, greedy={"max_waiting": 1})
    with serve(queue_depth=DEPTH, tenants=path) as server:
        yield server


@pytest.fixture
def held(keyed, monkeypatch) -> Iterator[threading.Event]:
    """Nobody is admitted before the event is set."""
    begin, step = threading.Event(), Engine.step

    def held_step(engine: Engine) -> object:
        return step(engine) if begin.wait(0.01) else []

    monkeypatch.setattr(Engine, "step", held_step)
    yield begin
    begin.set()
    wait_until(lambda: waiting(keyed) == 0)


def waiting(server: Running) -> int:
    return server.service.model.driver.call(statistics_of).waiting


def asking(server: Running, key: str) -> Callable[[], Reply]:
    """A request that is under way; its answer."""
    before, replies = waiting(server), list[Reply]()
    http = Http(server.url)
    thread = threading.Thread(
        target=lambda: replies.append(http.post(COMPLETIONS, BODY, **bearer(key)))
    )
    thread.start()
    wait_until(lambda: waiting(server) == before + 1)

    def answer() -> Reply:
        thread.join()
        return replies[0]

    return answer


def test_beyond_ones_own_line_is_429_and_beyond_all_places_503(keyed, held):
    http = Http(keyed.url)
    before = rejected(http)
    answers = [asking(keyed, GREEDY)]
    mine = http.post(COMPLETIONS, BODY, **bearer(GREEDY))
    assert (mine.status, mine.error["code"]) == (429, "tenant_queue_full")
    assert mine.error["type"] == "rate_limit_error"
    assert (mine.headers["Retry-After"], mine.headers["x-should-retry"]) == ("1", "true")
    answers.append(asking(keyed, OTHER))
    # Of three places one is left: the line of one of several may not be longer than that.
    its = http.post(COMPLETIONS, BODY, **bearer(OTHER))
    assert its.status == 429
    answers.append(asking(keyed, THIRD))
    for key, status in ((GREEDY, 429), (OTHER, 503), (THIRD, 503)):
        full = http.post(COMPLETIONS, BODY, **bearer(key))
        assert full.status == status
        assert full.headers["Retry-After"] == "1"
    held.set()
    assert [answer().status for answer in answers] == [200, 200, 200]
    assert rejected(http) == before + 2


def rejected(http: Http) -> int:
    """How many requests of the greedy one were refused."""
    return http.get("/v1/tenants/1/usage", **bearer(GREEDY)).json["total"]["rejected"]


def test_openais_client_waits_and_asks_again(keyed, held, monkeypatch):
    """As long as it is told to, and then it is answered; without retries it has its own error."""
    first = asking(keyed, GREEDY)
    with OpenAI(base_url=f"{keyed.url}/v1", api_key=GREEDY, max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**BODY)
        assert refused.value.code == "tenant_queue_full"
        told = float(refused.value.response.headers["Retry-After"])
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        held.set()
        assert first().status == 200

    client_waits(monkeypatch, wait)
    with OpenAI(base_url=f"{keyed.url}/v1", api_key=GREEDY, max_retries=2) as client:
        text = client.completions.create(**BODY).choices[0].text
    assert text == first().json["choices"][0]["text"]
    assert waited == [told]


def test_what_could_never_wait_at_once_is_a_bad_request(keyed):
    """Asking again would not help, so nobody is told to."""
    http = Http(keyed.url)
    for key, n, most in ((GREEDY, 2, 1), (OTHER, 3, 2)):
        refused = http.post(COMPLETIONS, {**BODY, "n": n}, **bearer(key))
        assert (refused.status, refused.error["param"]) == (400, "n")
        assert f"above {most}," in refused.error["message"]
        assert http.post(COMPLETIONS, {**BODY, "n": most}, **bearer(key)).status == 200
