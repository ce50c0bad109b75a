"""Answers of a server, replayed by the command line."""

import re
from typing import Any

import numpy as np
import pytest

from contract.types import Request, SamplingParams
from harness.cli.main import main
from harness.digest import logits_digest
from harness.serve.keys import new_key
from tests.held_steps import hold_steps
from tests.patience import PATIENCE_SECONDS
from tests.serve.conftest import CONTEXT
from tests.serve.http import Http, bearer, closing_after, posted, unchunked
from tests.serve.tenants import write_tenants
from tests.serve.test_connections import heard_until

CHAT = {
    "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "logprobs": True,
    "top_logprobs": 2, "n": 2,
}  # fmt: skip
RESPONSE = {"input": "hello", "max_output_tokens": 8, "logits_digest": True}
COMPLETION = {
    "prompt": "abc", "max_tokens": 8, "seed": 5, "temperature": 0.7, "logprobs": 1,
    "logits_digest": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/completions", {**COMPLETION, "echo": True}),
        ("/v1/completions", {**COMPLETION, "seed": -1}),
        ("/v1/responses", RESPONSE),
        ("/v1/embeddings", {"input": ["hello", "you"], "encoding_format": "base64"}),
        ("/v1/score", {"input": ["hello", "you"], "start": [1, 2], "top": 2}),
    ],
)
def test_an_answer_is_replayed(http, verify, path, body):
    """By an engine of other sizes, whole and streamed; where the request names no seed, from the
    one that was drawn."""
    answer = http.post(path, body).json
    assert verify(body, answer)[:2] == (0, "identical\n")
    if "input" in body and path != "/v1/responses":
        return
    streamed = http.post(path, {**body, "stream": True, "logits_digest": False}).body
    asked = {**body, "stream": True, "logits_digest": False}
    assert verify(asked, streamed)[:2] == (0, "identical\n")


@pytest.mark.parametrize("window", [8, 100])
def test_penalties_look_back_as_far_as_on_the_server(serve, verify, window):
    """Not as far as where the answer is verified."""
    body = {"prompt": "to be or not to be, ", "max_tokens": 90, "presence_penalty": 1.5}
    body |= {"temperature": 0, "ignore_eos": True}
    with serve(repeat_last_n=window) as server:
        answer = Http(server.url).post("/v1/completions", body).json
    assert verify(body, answer)[:2] == (0, "identical\n")
    del answer["x_zinc"]["sampling_defaults"]["repeat_last_n"]
    assert verify(body, answer)[0] == 1


@pytest.mark.parametrize(
    ("path", "body", "limits"),
    [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 4000}, {"context": 64}),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 400, "min_tokens": 99},
            {"max_context": 64},
        ),
        ("/v1/chat/completions", {"messages": CHAT["messages"], "seed": 3}, {"max_kv_pages": 4}),
        ("/v1/responses", RESPONSE | {"max_output_tokens": 4000}, {"max_context": 64}),
    ],
)
def test_an_answer_ends_where_the_context_of_the_server_or_a_quota_did(
    serve, verify, tmp_path, tiny_model_path, path, body, limits
):
    """Not where that of the verifier does; the receipt alike, wholly and by a sample."""
    key, quotas = new_key(), {name: n for name, n in limits.items() if name != "context"}
    tenants = write_tenants(tmp_path, {"one": key}, one=quotas) if quotas else None
    folder, size = tmp_path / "receipts", limits.get("context", CONTEXT)
    with serve(context=size, tenants=tenants, receipts=folder) as server:
        http = Http(server.url)
        asked = body if "messages" in body else body | {"ignore_eos": True}
        answer = http.post(path, asked, **bearer(key)).json
        receipt = http.get(f"/v1/receipts/{answer['id']}", **bearer(key)).body
    assert answer["usage"]["total_tokens"] <= 64
    assert verify(asked, answer)[:2] == (0, "identical\n")
    (tmp_path / "receipt.json").write_bytes(receipt)
    words = ["verify", str(tmp_path / "receipt.json"), "--model", str(tiny_model_path)]
    for more in ([], ["--sample", "2"]):
        assert main([*words, "--tier", "cpu", "--context", "128", *more]) == 0


def test_the_digest_is_that_of_the_logits(server, http):
    """The same for an engine that was asked directly; with another prompt another."""
    model = server.service.model
    prompt = tuple(model.tokenizer.encode("a prompt of several pages " * 3))
    body = {**COMPLETION, "prompt": list(prompt), "ignore_eos": True}
    told = http.post("/v1/completions", body).json["x_zinc"]["logits_sha256"]
    rows: dict[int, Any] = {}

    def keep(first: int, chunk: Any) -> None:
        rows.update(enumerate(chunk, first))

    sampling = SamplingParams(temperature=0.7, seed=5)
    request = Request(model.driver.new_id(), prompt, 8, sampling, ignore_end=True)
    stream = model.driver.submit([request], {request.id: keep})
    tokens = 0
    while tokens < 8:
        tokens += len(stream.take(PATIENCE_SECONDS))
    assert sorted(rows) == list(range(len(prompt) - 1, len(prompt) + 7))
    assert told == [logits_digest(np.stack([rows[position] for position in sorted(rows)]))]
    other = http.post("/v1/completions", {**body, "prompt": list(prompt[1:])}).json
    assert other["x_zinc"]["logits_sha256"] != told


def test_a_changed_answer_is_found(http, verify):
    """Negative control: a character, a log-probability, the seed, the model."""
    answer = http.post("/v1/completions", COMPLETION).json
    choice = answer["choices"][0]
    text = {**choice, "text": choice["text"][:-1] + "#"}
    assert verify(COMPLETION, {**answer, "choices": [text]})[:2][0] == 1
    logprobs = choice["logprobs"]
    values = [*logprobs["token_logprobs"][:-1], logprobs["token_logprobs"][-1] * (1 + 2**-20)]
    changed = {**choice, "logprobs": {**logprobs, "token_logprobs": values}}
    code, out, _ = verify(COMPLETION, {**answer, "choices": [changed]})
    assert (code, "choices[0].logprobs.token_logprobs[7]" in out) == (1, True)
    assert verify({**COMPLETION, "seed": 6}, answer)[0] == 1
    extra = {**answer["x_zinc"], "logits_sha256": ["0" * 64]}
    code, out, _ = verify(COMPLETION, {**answer, "x_zinc": extra})
    assert (code, "logits_sha256[0]" in out) == (1, True)
    code, out, _ = verify(COMPLETION, {**answer, "system_fingerprint": "exact-0"})
    assert (code, "system_fingerprint" in out) == (1, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/responses", RESPONSE),
        ("/v1/embeddings", {"input": "hello"}),
    ],
)
def test_a_changed_count_is_found(http, verify, path, body):
    """By its name, in a stream too, but that of the cache, which another engine need not have."""
    answer = http.post(path, body).json
    usage = answer["usage"]
    name = next(name for name, value in usage.items() if isinstance(value, int))
    code, out, _ = verify(body, {**answer, "usage": usage | {name: usage[name] + 1}})
    assert (code, f"usage.{name}" in out) == (1, True)
    if "prompt_tokens_details" in usage:
        details = usage["prompt_tokens_details"] | {"cached_tokens": 77}
        other = {**answer, "usage": usage | {"prompt_tokens_details": details}}
        assert verify(body, other)[0] == 0
    if path in ("/v1/chat/completions", "/v1/completions"):
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        lines = http.post(path, asked).body
        assert verify(asked, lines)[0] == 0
        (counted,) = re.findall(rb'"completion_tokens":\d+', lines)
        assert verify(asked, lines.replace(counted, b'"completion_tokens":99'))[0] == 1


MESSAGE: dict[str, Any] = {
    "model": "claude-x",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Why?"}],
    "metadata": {"user_id": "u"},
}


def test_an_anthropic_message_is_replayed(http, verify):
    """Whole and streamed, whatever the client calls the model; a change of either is found."""
    asked = {**MESSAGE, "model": "tiny"}
    answer = http.post("/v1/messages", asked).json
    assert verify(MESSAGE, answer)[:2] == (0, "identical\n")
    streamed = http.post("/v1/messages", {**asked, "stream": True}).body
    assert verify({**MESSAGE, "stream": True}, streamed)[:2] == (0, "identical\n")
    (block,) = answer["content"]
    for changed, place in (
        ({"content": [{**block, "text": block["text"] + "#"}]}, "content[0].text"),
        ({"stop_reason": "refusal"}, "stop_reason"),
        ({"usage": answer["usage"] | {"output_tokens": 99}}, "usage.output_tokens"),
        ({"system_fingerprint": "exact-0"}, "system_fingerprint"),
    ):
        code, out, _ = verify(MESSAGE, {**answer, **changed})
        assert (code, place in out) == (1, True)
    lines = streamed.split(b"\n\n")
    at = next(n for n, line in enumerate(lines) if b"text_delta" in line)
    assert verify(MESSAGE, b"\n\n".join([*lines[:at], *lines[at + 1 :]]))[0] == 1
    assert verify(MESSAGE, b"\n\n".join(lines[:-2]))[0] == 2


def test_a_changed_vector_or_item_is_found(http, verify):
    """Negative control of the other routes."""
    asked = {"input": "hello"}
    answer = http.post("/v1/embeddings", asked).json
    answer["data"][0]["embedding"][3] *= 1 + 2**-20
    code, out, _ = verify(asked, answer)
    assert (code, "data[0].embedding[3]" in out) == (1, True)
    answer = http.post("/v1/responses", RESPONSE).json
    item = answer["output"][0]
    item["content"][0]["text"] += "#"
    code, out, _ = verify(RESPONSE, answer)
    assert (code, "output[0].content[0].text: character" in out) == (1, True)
    del answer["output"][0]
    code, out, _ = verify(RESPONSE, answer)
    assert (code, "output[0]: nothing then" in out) == (1, True)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
def test_a_missing_event_is_found(http, verify, monkeypatch, path, body):
    """Negative control of what a stream tells. Steps wait for what the ones before them said: else
    one event may have all tokens, and none would be between the first and the last."""
    asked = {**body, "stream": True, "logits_digest": False}
    of_the_first_choice = b'"index":0'
    steps, heard = hold_steps(monkeypatch, 3), b""
    with http.connected() as connection:
        connection.sendall(closing_after(posted(path, asked)))
        for _ in range(2):
            heard += heard_until(connection, of_the_first_choice)
            steps.allow(1)
        steps.allow()
        heard += b"".join(iter(lambda: connection.recv(65536), b""))
    lines = unchunked(heard).split(b"\n\n")
    _, at, *others = (n for n, line in enumerate(lines) if of_the_first_choice in line)
    assert others
    code, out, _ = verify(asked, b"\n\n".join([*lines[:at], *lines[at + 1 :]]))
    assert (code, out.startswith("different: choices[")) == (1, True)


def test_a_stream_that_is_not_whole_is_an_error(http, verify):
    """Cut, failed, or told otherwise piece by piece than at its end."""
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/responses", RESPONSE),
    ):
        asked = {**body, "stream": True}
        streamed = http.post(path, asked).body
        end = streamed.rstrip().rfind(b"\n\n")
        for broken in (streamed[:end], b'data: {"error":{}}\n\ndata: [DONE]\n\n', b": ping\n\n"):
            code, _, error = verify(asked, broken)
            assert code == 2
            assert "response.json" in error
    changed = streamed.replace(b'"delta":"', b'"delta":"#', 1)
    code, _, error = verify({**RESPONSE, "stream": True}, changed)
    assert (code, "output[0] is not what" in error) == (2, True)


def test_a_difference_is_a_line_that_can_be_read(http, verify):
    answer = http.post("/v1/completions", COMPLETION).json
    more = {**answer, "choices": [*answer["choices"], {"text": "a" * 5000}]}
    code, out, _ = verify(COMPLETION, more)
    assert (code, len(out) < 500, "choices[1]" in out) == (1, True, True)


def test_what_cannot_be_verified_is_an_error(http, verify):
    answer = http.post("/v1/completions", COMPLETION).json
    for request, response, says in (
        ([], answer, "no JSON object"),
        ({**COMPLETION, "top_q": 1}, answer, "top_q"),
        (COMPLETION, {**answer, "choices": []}, "no choices"),
        ({"prompt": "abc"}, {**answer, "x_zinc": None}, "names a seed"),
        ({"prompt": "abc", "seed": -1}, {**answer, "x_zinc": {"seed": 2**64 - 1}}, "no request"),
    ):
        code, _, error = verify(request, response)
        assert (code, says in error) == (2, True), error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/embed", {"model": "tiny", "input": "hello"}),
        ("/api/embeddings", {"model": "tiny", "prompt": "hello"}),
        ("/v1/completions", COMPLETION),
    ],
)
def test_an_answer_without_fingerprint_is_not_called_different(http, verify, path, body):
    """Ollama's vectors have none: nobody can tell what computed them."""
    answer = http.post(path, body).answer
    answer.pop("system_fingerprint", None)
    for response in (answer, {**answer, "system_fingerprint": None}):
        code, out, error = verify(body, response)
        assert (code, out, "cannot be verified: it names no" in error) == (2, "", True), error
