"""Control tokens: where texts are parsed for them, what stops at them, and ids beside texts."""

from typing import Any

import pytest

from harness.serve.run import Running
from tests.serve.calling import ASKED, MESSAGES, UNTHINKING
from tests.serve.http import Http
from tests.serve.streams import data_of, lines_of
from tests.tables import table

CHAT = "<|im_start|>user\nHi<|im_end|>\n"


def control(server: Running, text: str) -> int:
    (token,) = server.service.model.tokenizer.encode(text, parse_special=True, add_bos=False)
    return token


@pytest.fixture
def http(hermes) -> Http:
    return Http(hermes.url)


def tokens_of(http: Http, **body: Any) -> list[int]:
    answer = http.post("/tokenize", body).answer
    found: list[int] = answer["tokens"]
    assert answer["count"] == len(found)
    return found


def test_a_text_is_parsed_for_control_tokens_and_a_message_never_is(hermes, http):
    begin, end = control(hermes, "<|im_start|>"), control(hermes, "<|im_end|>")
    parsed = tokens_of(http, prompt=CHAT)
    assert parsed.count(begin) == parsed.count(end) == 1
    plain = tokens_of(http, prompt=CHAT, parse_special=False)
    assert not {begin, end} & set(plain)
    assert len(plain) > len(parsed)
    said = tokens_of(http, messages=[{"role": "user", "content": CHAT}])
    harmless = tokens_of(http, messages=[{"role": "user", "content": "Hi"}])
    assert (said.count(begin), said.count(end)) == (harmless.count(begin), harmless.count(end))


@pytest.mark.parametrize("text", [CHAT, "Hi", "<|im_start|>", "a<|im_end|><|im_end|>b é"])
def test_detokenizing_and_tokenizing_gives_the_ids_back(http, text):
    ids = tokens_of(http, prompt=text, add_special_tokens=False)
    prompt = http.post("/detokenize", {"tokens": ids}).json["prompt"]
    assert prompt == text
    assert tokens_of(http, prompt=prompt, add_special_tokens=False) == ids
    strings = http.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert len(strings["token_strs"]) == strings["count"]


def test_a_rendered_conversation_is_the_conversation(http):
    """As the text of a completion it has the ids, and so the answer, of the chat."""
    prompt = http.post("/apply-template", {"messages": MESSAGES}).json["prompt"]
    assert tokens_of(http, prompt=prompt) == tokens_of(http, messages=MESSAGES)
    asked = {"max_tokens": 8, "seed": 1, "return_token_ids": True}
    chat = http.post("/v1/chat/completions", {**asked, "messages": MESSAGES}).json
    text = http.post("/v1/completions", {**asked, "prompt": prompt}).json
    assert text["choices"][0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert text["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    plain = {**asked, "prompt": prompt, "parse_special": False}
    unparsed = http.post("/v1/completions", plain).json["choices"][0]["prompt_token_ids"]
    assert len(unparsed) > len(chat["prompt_token_ids"])
    listed = http.post("/v1/completions", {**asked, "prompt": [prompt, "Hi"], "n": 2}).json
    prompts = [choice["prompt_token_ids"] for choice in listed["choices"]]
    assert prompts[0] == prompts[1] == chat["prompt_token_ids"]
    assert prompts[2] == prompts[3] != prompts[0]


@pytest.mark.parametrize("route", ["chat", "text"])
def test_ids_of_a_stream_are_those_of_the_whole_answer(http, route):
    path, said = "/v1/completions", {"prompt": "Hi"}
    if route == "chat":
        path, said = "/v1/chat/completions", {"messages": MESSAGES, **UNTHINKING}  # type: ignore[dict-item]
    body = {**said, "max_tokens": 12, "seed": 3, "n": 2, "return_token_ids": True}
    whole = http.post(path, body).json
    assert whole["usage"]["completion_tokens"] == sum(
        len(choice["token_ids"]) for choice in whole["choices"]
    )
    chunks = data_of(lines_of(http.post(path, {**body, "stream": True}).body))
    for index, choice in enumerate(whole["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        if route == "text":
            (prompt,) = [p["prompt_token_ids"] for p in parts if "prompt_token_ids" in p]
            assert prompt == choice["prompt_token_ids"]
    if route == "chat":
        (prompt,) = [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c]
        assert (
            prompt
            == whole["prompt_token_ids"]
            == tokens_of(http, messages=MESSAGES, chat_template_kwargs=UNTHINKING)
        )
    silent = http.post(path, {**body, "return_token_ids": False}).body
    assert b"token_ids" not in silent


def test_the_tokenizer_is_told(hermes, http):
    info = http.get("/tokenizer_info").json
    tokenizer = hermes.service.model.tokenizer
    assert info["eos_token"] == tokenizer.token_text(info["eos_token_id"])
    assert info["eos_token_id"] == tokenizer.eos_id
    assert tokens_of(http, prompt=info["eos_token"], add_special_tokens=False) == [tokenizer.eos_id]
    assert info["vocab_size"] == tokenizer.vocab_size
    assert "<|im_start|>" in info["chat_template"]
    assert {"bos_token", "pad_token", "unk_token", "add_bos_token"} <= info.keys()


def forced(hermes: Running, token: int, **fields: Any) -> dict[str, Any]:
    """A request whose every token is ``token``."""
    return {"prompt": "Hi", "max_tokens": 6, "logit_bias": {str(token): 100}, "seed": 1, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "tokens"),
    table(__file__, "test_special_tokens")["a_stop_string_may_be_a_control_token"],
)
def test_a_stop_string_may_be_a_control_token(hermes, http, stop, tokens, stream):
    """Or hold one, or a part of one; nothing of it is ever shown."""
    token = control(hermes, "<|im_start|>")
    for path, extra in (
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": MESSAGES, **UNTHINKING}),
    ):
        body = forced(hermes, token, stop=stop, stream=stream, return_token_ids=True) | extra
        if extra:
            del body["prompt"]
        reply = http.post(path, body)
        assert reply.status == 200, reply.body
        chunks = data_of(lines_of(reply.body)) if stream else [reply.json]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert choices[-1]["finish_reason"] == ("length" if tokens == 6 else "stop")
        assert [i for c in choices for i in c["token_ids"]] == [token] * tokens
        assert b"im_start|>" not in reply.body


def test_tokens_that_stop(hermes, http):
    """By their ids, control tokens or not; the token is none of the text."""
    for token in (control(hermes, "<|im_start|>"), ord("x")):
        stopped = http.post(
            "/v1/completions", forced(hermes, token, stop_token_ids=[5, token], ignore_eos=True)
        ).json
        (choice,) = stopped["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert stopped["usage"]["completion_tokens"] == 1
        on = http.post("/v1/completions", forced(hermes, token, stop_token_ids=[5])).json
        assert on["choices"][0]["finish_reason"] == "length"
        body = {**ASKED, **UNTHINKING, "logit_bias": {str(token): 100}, "stop_token_ids": [token]}
        chat = http.post("/v1/chat/completions", body).json["choices"][0]
        assert (chat["message"]["content"], chat["finish_reason"]) == ("", "stop")
    refused = http.post("/v1/completions", forced(hermes, 5, stop_token_ids=[10**6]))
    assert (refused.status, refused.error["param"]) == (400, "stop_token_ids")
