"""Sessions of 30 turns as coding agents send them: every turn is answered, and what was computed
for the turns before is found."""

from collections.abc import Iterator
from typing import Any

import pytest

from harness.serve.run import Running
from tests.serve import speaking_models
from tests.serve.agent_bodies import TURNS, Body, claude_code, codex, opencode
from tests.serve.http import Http
from tests.serve.speaking_models import speaking_model
from tests.serve.test_peers import objects_of

CONTEXT = 16384
PAGE = 16


@pytest.fixture(scope="module", params=["Qwen-Qwen3-0.6B", "Qwen3.5-4B"])
def agents(request, serve, tmp_path_factory) -> Iterator[Running]:
    """A server with room for long sessions, of a template that takes several system messages and
    of one that takes one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speaking_models, "CONTEXT", CONTEXT)
        path = speaking_model(tmp_path_factory.mktemp("agents"), request.param)
    with serve(path=path, context=CONTEXT, slots=1) as server:
        yield server


def counts_of_responses(events: list[Any]) -> tuple[int, int]:
    usage = events[-1]["response"]["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def counts_of_messages(events: list[Any]) -> tuple[int, int]:
    usage = events[0]["message"]["usage"]
    read, made = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + read + made, read


def counts_of_chat(events: list[Any]) -> tuple[int, int]:
    usage = events[-1]["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("/v1/responses", codex, counts_of_responses),
        ("/v1/messages?beta=true", claude_code, counts_of_messages),
        ("/v1/chat/completions", opencode, counts_of_chat),
    ],
    ids=["codex", "claude code", "opencode"],
)
def test_a_session_of_thirty_turns(agents, path, body, counts):
    """All but the end of what the turn before computed is found: the last page, and what its
    template writes only behind the last turn."""
    http, before = Http(agents.url), 0
    for turn in range(TURNS):
        reply = http.post(path, body(turn))
        assert reply.status == 200, (turn, reply.body[:500])
        tokens, cached = counts(objects_of(reply))
        assert tokens > before
        if turn:
            assert cached >= before - 6 * PAGE, (turn, before, cached)
        before = tokens


def test_a_digest_of_the_body_is_not_read(hermes):
    """However the system text holds it; in a turn of the user's it is text."""
    http, header, brief = Http(hermes.url), "x-anthropic-billing-header: cch=1a2b3;", "Be brief."
    turns: list[Body] = [{"role": "user", "content": "a"}]

    def count(system: object, messages: list[Body] = turns) -> int:
        body = {"model": "tiny", "messages": messages, "system": system}
        if messages is turns and system != brief:
            told = http.post("/v1/messages", body | {"max_tokens": 1}).json["x_zinc"]
            assert told["ignored"] == ["system (x-anthropic-billing-header)"]
        return int(http.post("/v1/messages/count_tokens", body).json["input_tokens"])

    line, block = f"{header}\n\n{brief}", {"type": "text", "text": header}
    glued = [f"{header[:-1]}{end}{brief}" for end in ("; ", ";", " ", ";\t")]
    named = ("cc-version", "cc.entry", "x-a-b")
    glued += [f"{header} {name}=2.1.9-b; c=1;{brief}" for name in named]
    bare = f"x-anthropic-billing-header: none\n{brief}"
    for system in (line, [block, block | {"text": brief}], [block | {"text": line}], *glued, bare):
        assert count(system) == count(brief)
    assert count([block]) == count(header) == count("", [*turns]) < count(brief)
    assert count(brief, [{"role": "user", "content": header}]) > count(brief)
    last = {"role": "system", "content": [block, block | {"text": "b"}]}
    assert count(brief, [*turns, last]) == count(brief, [*turns, {**last, "content": "b"}])
    assert count(brief, [*turns, {**last, "content": header}]) == count(brief)
    body = {"model": "tiny", "max_tokens": 1, "messages": [{**last, "content": header}]}
    assert http.post("/v1/messages", body).status == 400


def test_a_digest_behind_an_answer_begins_another(hermes):
    """The client's last turn was not the assistant's, so nothing of it is continued."""
    said: list[Body] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def count(messages: list[Body], **how: bool) -> int:
        body = {"model": "tiny", "messages": messages, **how}
        path = "/tokenize" if how else "/v1/messages/count_tokens"
        return int(Http(hermes.url).post(path, body).json["count" if how else "input_tokens"])

    digest = {"role": "system", "content": "x-anthropic-billing-header: cch=1a2b3;"}
    blocks = [{"type": "text", "text": digest["content"]}]
    begun = count(said, add_generation_prompt=True, enable_thinking=False)
    for last in (digest, {**digest, "content": blocks}, {**digest, "content": ""}):
        assert count([*said, last]) == begun > count(said)
