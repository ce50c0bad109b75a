"""Fields that the server does not know: misspelt ones, ones it cannot honour, and all others."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.serve.anthropic.wire import MessagesRequest
from harness.serve.errors import ApiError
from harness.serve.wire import ChatRequest, CompletionRequest
from harness.serve.wire_fields import MAX_UNKNOWN, served_fields
from tests.serve.http import Http
from tests.serve.streams import data_of, lines_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2, "seed": 1}
BIG_CLIENTS = {
    "stream_options": {"include_obfuscation": False}, "modalities": ["text"], "verbosity": "low",
    "prediction": {"type": "content", "content": "x"}, "best_of": 1,
    "prompt_cache_retention": "24h", "reasoning_effort": "high", "client_metadata": {"a": "b"},
    "keep_alive": "5m", "cache_prompt": True, "web_search_options": {}, "store": True,
}  # fmt: skip
FOREIGN_NAMES = (
    *("top_a", "tfs_z", "typical_p", "mirostat", "mirostat_tau", "dry_base", "xtc_threshold"),
    *("length_penalty", "skip_special_tokens", "spaces_between_special_tokens"),
    *("add_special_tokens", "n_probs", "n_keep", "samplers", "t_max_predict_ms", "return_tokens"),
    "priority",
    *("speed", "options", "raw", "images", "template", "thinking", "betas", "request_id"),
    "documents",
)


def test_what_big_clients_send_is_taken(http):
    """What changes nothing is named, in the answer and in a header."""
    reply = http.post(CHAT, {**ASKED, **BIG_CLIENTS, "stream": True})
    assert reply.status == 200
    plain = http.post(CHAT, ASKED).json
    ignored = set(reply.headers["X-Zinc-Ignored"].split(", "))
    assert ignored == {
        *("verbosity", "prediction", "prompt_cache_retention", "client_metadata", "keep_alive"),
        *("cache_prompt", "web_search_options", "reasoning_effort", "store"),
        "stream_options.include_obfuscation",
    }
    chunks = data_of(lines_of(reply.body))
    assert set(chunks[0]["x_zinc"]["ignored"]) == ignored
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert said == plain["choices"][0]["message"]["content"]
    assert "ignored" not in plain["x_zinc"]


def test_what_is_asked_for_and_is_so_is_not_named(http):
    reply = http.post(CHAT, {**ASKED, "store": False})
    assert reply.status == 200
    assert "X-Zinc-Ignored" not in reply.headers


def test_every_misspelt_and_unserved_field_is_named_at_once(http):
    wrong = {"temprature": 1, "top_q": 1, "maxTokens": 3, "audio": {}, "best_of": 2, "keep": 1}
    error = http.post(CHAT, {**ASKED, **wrong}).error
    assert error["code"] == "unknown_parameter"
    assert error["param"] == "temprature"
    for name in ("temprature", "top_q", "maxTokens", "audio", "best_of"):
        assert name in error["message"]
    for meant in ("temperature?", "top_p or top_k?", "max_tokens or min_tokens?"):
        assert meant in error["message"]
    assert "keep" not in error["message"]


def test_an_object_of_the_only_type_may_lack_its_tag():
    ignored: list[str] = []
    system = [{"text": "a", "colour": "red", "cache_control": None}]
    served = served_fields({"system": system}, MessagesRequest, ignored)
    assert served == {"system": [{"text": "a", "cache_control": None}]}
    assert ignored == ["system[].colour"]


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_fields_of_other_servers_are_nobodys_misspelling(name):
    kinds = (ChatRequest, CompletionRequest)
    unknowing = [kind for kind in kinds if name not in kind.__struct_fields__]
    assert unknowing
    for kind in unknowing:
        ignored: list[str] = []
        assert name not in served_fields({name: 1}, kind, ignored)
        assert ignored == [name]


@given(st.data())
def test_one_wrong_character_is_a_misspelling(data):
    fields = [name for name in ChatRequest.__struct_fields__ if len(name) > 6]
    name = data.draw(st.sampled_from(fields))
    at = data.draw(st.integers(0, len(name) - 1))
    written = data.draw(st.sampled_from([name[:at] + name[at + 1 :], name[:at] + "q" + name[at:]]))
    with pytest.raises(ApiError, match=name):
        served_fields({written: 1}, ChatRequest, [])


def test_many_unknown_fields_are_refused():
    few = {f"xx{n}xx{n}": n for n in range(MAX_UNKNOWN)}
    served_fields(few, ChatRequest, [])
    with pytest.raises(ApiError, match="unknown fields"):
        served_fields(few | {"one_more": 1}, ChatRequest, [])


def test_a_name_cannot_leave_its_header(http):
    reply = http.post(CHAT, {**ASKED, "x\r\nSet-Cookie: a=b": 1, "漢": 1})
    assert reply.status == 200
    assert "Set-Cookie" not in reply.headers
    assert reply.headers["X-Zinc-Ignored"] == "x%0D%0ASet-Cookie%3A%20a%3Db, %E6%BC%A2"


def test_all_can_be_refused(serve):
    with serve(reject_unknown=True) as server:
        http = Http(server.url)
        error = http.post(CHAT, {**ASKED, "keep_alive": 1, "verbosity": "low", "top_q": 1}).error
        assert error["code"] == "unknown_parameter"
        for name in ("keep_alive", "verbosity", "top_q"):
            assert name in error["message"]
        reply = http.post(CHAT, {**ASKED, "keep_alive": None, "ignore_eos": None})
        assert reply.status == 200


def test_null_is_absent_for_every_field(http):
    for path, body in ((CHAT, ASKED), (COMPLETIONS, {"prompt": "a", "max_tokens": 1})):
        kind = ChatRequest if path == CHAT else CompletionRequest
        nulls = dict.fromkeys(kind.__struct_fields__) | body
        assert http.post(path, nulls | {"stream_options": None}).status == 200
    missing = http.post(CHAT, {"messages": None}).error
    assert missing["param"] == "messages"


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**64])
def test_a_seed_has_a_stated_range(http, seed):
    for path, body in ((CHAT, ASKED), (RESPONSES, {"input": "a", "max_output_tokens": 1})):
        error = http.post(path, {**body, "seed": seed}).error
        assert error["param"] == "seed"
        assert (
            str(2**63) in error["message"]
            or str(2**63 - 1) in error["message"]
            or "int" in (error["message"])
        )
        for allowed in (2**63 - 1, -(2**63)):
            assert http.post(path, {**body, "seed": allowed}).status == 200


def test_hosted_tools_are_left_out_with_a_note(hermes):
    """The functions stay, and a choice among no tools goes."""
    http = Http(hermes.url)
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    hosted = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]
    own = {"type": "function", "function": function}
    body = {**ASKED, "tool_choice": "auto"}
    reply = http.post(CHAT, {**body, "tools": [*hosted, own]})
    notes = ["tools[0] (web_search)", "tools[1] (namespace)"]
    assert reply.json["x_zinc"]["ignored"] == notes
    assert http.post(CHAT, {**body, "tools": hosted}).json["x_zinc"]["ignored"] == notes
    alone = http.post(CHAT, {**body, "tools": [own]}).json
    assert reply.json["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    asked = {"input": "hello", "max_output_tokens": 2, "tools": [*hosted, {"type": "custom"}]}
    reply = http.post(RESPONSES, {**asked, "reasoning": {"summary": "auto", "effort": "low"}})
    notes = ["tools[0] (web_search)", "tools[2] (custom)", "n (namespace)", "reasoning.summary"]
    assert reply.json["x_zinc"]["ignored"] == notes
    forced = http.post(CHAT, {**body, "tools": hosted, "tool_choice": "required"})
    assert forced.error["param"] == "tool_choice"


def tool_of(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_a_choice_of_allowed_tools_offers_those(hermes):
    """In the form of chat completions and in that of responses."""
    http = Http(hermes.url)
    looks, asks = tool_of("look"), tool_of("ask")
    seed = {**ASKED, "enable_thinking": False, "max_tokens": 80}
    only = http.post(CHAT, {**seed, "tools": [looks], "tool_choice": "required"}).json
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    chosen = http.post(CHAT, {**seed, "tools": [asks, looks], "tool_choice": choice}).json
    assert chosen["choices"] == only["choices"]
    assert chosen["usage"]["prompt_tokens"] == only["usage"]["prompt_tokens"]
    flat = [{**tool["function"], "type": "function"} for tool in (asks, looks)]
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "mode": mode, "tools": [flat[1]]}
        body = {"input": "hello", "max_output_tokens": 5, "tools": flat, "tool_choice": choice}
        answer = http.post(RESPONSES, body).json
        assert [tool["name"] for tool in answer["tools"]] == ["look"]
        assert answer["tool_choice"] == mode


def test_names_of_llama_cpp_mean_what_they_say(http):
    asked = {"prompt": "abc", "temperature": 0, "ignore_eos": True}
    limited = http.post(COMPLETIONS, {**asked, "n_predict": 5}).json
    assert limited["usage"]["completion_tokens"] == 5
    whole = http.post(COMPLETIONS, {**asked, "n_predict": -1}).json
    assert whole["usage"]["completion_tokens"] > 100
    chat = http.post(CHAT, {"messages": MESSAGES, "ignore_eos": True, "n_predict": 3}).json
    assert chat["usage"]["completion_tokens"] == 3
    texts = [
        http.post(COMPLETIONS, {**asked, "max_tokens": 24, name: 1.8}).json["choices"][0]["text"]
        for name in ("repeat_penalty", "repetition_penalty", "min_p")
        if name != "min_p"
    ]
    assert texts[0] == texts[1]


def test_stop_tokens_end_an_answer(http):
    """Before their text; what came before them is the same, streamed too."""
    asked = {"prompt": "abc", "max_tokens": 24, "seed": 3, "ignore_eos": True, "logprobs": 0}
    whole = http.post(COMPLETIONS, {**asked, "temperature": 1.0}).json["choices"][0]
    tokens = whole["logprobs"]["tokens"]
    ids = [http.post("/tokenize", {"prompt": text}).json["tokens"] for text in tokens]
    at = next(n for n in range(3, 24) if len(ids[n]) == 1 and tokens[n] not in tokens[:n])
    stop = {**asked, "temperature": 1.0, "stop_token_ids": ids[at]}
    cut = http.post(COMPLETIONS, stop).json
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["text"] == "".join(tokens[:at])
    assert cut["usage"]["completion_tokens"] == at + 1
    lines = data_of(lines_of(http.post(COMPLETIONS, {**stop, "stream": True}).body))
    assert "".join(one["choices"][0]["text"] for one in lines) == "".join(tokens[:at])
