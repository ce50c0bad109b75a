"""Bodies and names made to cost much, to lead elsewhere, or to learn what is others'."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.types import Request
from harness.host.structured.schema_tree import referenced
from harness.serve import strict_json, wire
from harness.serve.keys import key_digest, new_key
from reference.model.tokenizer import Tokenizer
from tests.patience import PATIENCE_SECONDS
from tests.serve.conftest import CONTEXT
from tests.serve.http import JSON, Http, bearer
from tests.serve.tenants import write_tenants
from tests.serve.test_connections import COMPLETIONS, LONG

CHAT = "/v1/chat/completions"
TRAVERSALS = (
    *("../../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd"),
    *("....//....//etc/passwd", "/etc/passwd", "..\\..\\etc\\passwd", "%00/etc/passwd"),
    *("tiny/../../etc/passwd", "tiny%0d%0aX: y", "file:///etc/passwd"),
)


def chat_of(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}]}


def never(*_: object, **__: object) -> None:
    """Takes the place of what must not be called: the client would hear 500."""
    raise AssertionError("called")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, lambda text: {"prompt": text}),
        (COMPLETIONS, lambda text: {"prompt": ["abc", text]}),
        (CHAT, chat_of),
        ("/tokenize", lambda text: {"prompt": text}),
        ("/tokenize", chat_of),
    ],
)
def test_a_text_no_context_holds_is_not_tokenized(server, http, monkeypatch, path, body):
    """Its bytes are more than the longest tokens of a whole context have."""
    longest = server.service.model.tokenizer.longest_token
    text = "a" * (CONTEXT * longest + 1)
    monkeypatch.setattr(Tokenizer, "encode_spans", never)
    reply = http.post(path, body(text))  # type: ignore[operator]
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"


def test_no_token_stands_for_more_than_the_longest(server):
    tokenizer = server.service.model.tokenizer
    lengths = [len(tokenizer.token_bytes(n, special=True)) for n in range(tokenizer.vocab_size)]
    assert max(lengths) <= tokenizer.longest_token
    assert tokenizer.longest_token < 4 * max(lengths)


def test_too_many_prompts_are_refused_before_the_first_is_read(http, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", never)
    for body in ({"prompt": ["a"] * 100_000}, {"prompt": [[1]] * 100_000}):
        assert http.post(COMPLETIONS, body).error["param"] == "prompt"


def test_many_biases_are_refused(http):
    body = {"prompt": "a", "logit_bias": {str(number): 1 for number in range(60_000)}}
    assert http.post(COMPLETIONS, body).error["param"] == "logit_bias"


class ComparedName(str):
    """A name that counts how often it is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        ComparedName.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_name_that_stands_twice_is_found_in_linear_time():
    """The two last names of an object are the same one."""
    numbers = [*range(2000), 1999]
    with pytest.raises(strict_json.BadJson, match="'a1999' twice"):
        strict_json._distinct([(ComparedName(f"a{number}"), 0) for number in numbers])
    assert 0 < ComparedName.compared < 10 * len(numbers)


def test_a_reference_to_a_number_of_thousands_of_digits_leads_nowhere():
    """Python does not read such a number; a shorter one names an entry."""
    root = {"anyOf": [{"const": 1}, {"const": 2}]}
    assert referenced("#/anyOf/" + "1" * 5000, root) is True
    assert referenced("#/anyOf/2", root) is True
    assert referenced("#/anyOf/1", root) == {"const": 2}


def test_long_bodies_are_parsed_one_at_a_time(http, monkeypatch):
    """Objects of a body take many times its bytes; short ones pass meanwhile."""
    now, most = 0, 0
    counting, two = threading.Lock(), threading.Event()
    loads = strict_json.loads

    def counted(body: bytes, **options: bool) -> object:
        nonlocal now, most
        with counting:
            now += 1
            most = max(most, now)
            if now == 2:
                two.set()
        if len(body) < strict_json.LONG_BYTES:
            two.wait(PATIENCE_SECONDS)
        value = loads(body, **options)
        with counting:
            now -= 1
        return value

    monkeypatch.setattr(wire, "loads", counted)

    def send(length: int) -> str:
        body = json.dumps({"tokens": [], "token": "a" * length}).encode()
        param: str = http.send("POST", "/detokenize", body, JSON).error["param"]
        return param

    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(send, [strict_json.LONG_BYTES] * 8)) == {"token"}
        assert most == 1
        assert set(clients.map(send, [1] * 8)) == {"token"}
        assert two.is_set()


@pytest.mark.parametrize("name", TRAVERSALS)
def test_no_name_leads_out_of_where_it_belongs(http, name, tmp_path):
    """Neither of a model, nor a tenant, nor a file of the page; as it is and in a body."""
    for path in (f"/v1/models/{name}", f"/v1/tenants/{name}/usage", f"/page/{name}", f"/{name}"):
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = http.raw(request.encode())
        assert answer.split(b" ")[1] in (b"400", b"404"), path
        assert b"root:" not in answer
    for body in ({"prompt": "a", "model": name}, {"tokens": [1], "model": name}):
        reply = http.post(COMPLETIONS if "prompt" in body else "/detokenize", body)
        assert reply.error["code"] == "model_not_found"


def test_control_characters_of_a_name_make_no_header(http):
    reply = http.send("GET", "/v1/models/a%0d%0aSet-Cookie:%20x=y", None, {})
    assert reply.status == 404
    assert "Set-Cookie" not in reply.headers


def test_one_learns_from_the_prefix_cache_only_what_is_ones_own(serve, tmp_path):
    """A tenant finds its own prompt again; to another the same prompt is new, and says so."""
    keys = [new_key(), new_key()]
    path = write_tenants(tmp_path, {"one": keys[0], "other": keys[1]})
    body = {"prompt": list(range(40, 120)), "max_tokens": 1}
    with serve(tenants=path) as server:
        http = Http(server.url)
        cached = [
            http.post(COMPLETIONS, body, **bearer(key)).json["usage"]["prompt_tokens_details"]
            for key in (keys[0], keys[0], keys[1], keys[1])
        ]
        counts = [details["cached_tokens"] for details in cached]
    assert counts[0] == counts[2] == 0
    assert counts[1] == counts[3] > 0


def test_no_refusal_tells_where_anything_lies(serve, tiny_model_path, tmp_path, caplog):
    """No path, no address of an object, no key: neither to the client nor in the log."""
    key = new_key()
    path = write_tenants(tmp_path, {"a": key})
    secret = "zrt-a-key-nobody-has"
    with caplog.at_level("DEBUG"), serve(tenants=path) as server:
        http = Http(server.url)
        replies = [
            http.post(COMPLETIONS, {"prompt": "a", "model": "b"}, **bearer(key)),
            http.post(COMPLETIONS, {"prompt": "a", "top_q": 1}, **bearer(key)),
            http.post(COMPLETIONS, {"prompt": list(range(9999))}, **bearer(key)),
            http.post(CHAT, {"messages": [{"role": "assistant", "content": "a"}]}, **bearer(key)),
            http.post("/detokenize", {"tokens": [2**40]}, **bearer(key)),
            http.get("/nowhere", **bearer(key)),
            http.get("/metrics", **bearer(key)),
            http.get("/v1/models", **bearer(secret)),
            http.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **bearer(key)),
        ]
    assert {reply.status for reply in replies} > {400, 401, 403, 404}
    told = b"".join(reply.body for reply in replies).decode()
    for hidden in (str(tmp_path), str(tiny_model_path.parent), "Traceback", " object at 0x"):
        assert hidden not in told
    for hidden in (key, secret, key_digest(key), key_digest(secret)):
        assert hidden not in told + caplog.text


def test_whenever_it_is_cancelled_its_pages_come_back_at_once(server, cancellations):
    """While it waits for its slot, reads its prompt, and at each of its tokens."""
    driver = server.service.model.driver
    for taken in range(-1, 12):
        one = Request(driver.new_id(), tuple(range(40, 240)), 16, ignore_end=True)
        stream = driver.submit([one])
        heard = 0
        while heard <= taken:
            heard += len(stream.take(PATIENCE_SECONDS))
        stream.cancel()
        driver.call(lambda engine: None)
        now = cancellations.after[-1]
        assert now.steps - cancellations.posted_at[-1] <= 1
        assert now.running == now.waiting == 0
        assert now.free_pages + now.cached_pages == now.pages


def test_text_is_answered_while_a_long_one_is_refused(http):
    """Negative control of the bound on length: a text within it is read as ever."""
    assert http.post("/tokenize", {"prompt": "a" * 300}).json["count"] > CONTEXT / 4
    assert http.post(COMPLETIONS, {**LONG, "max_tokens": 1}).status == 200
