"""The server tests of llama.cpp, vLLM and Ollama as requests: each passes, is refused by design, or
is about something that is not there. Other requests with what is right, and refusals by route."""

import json
from typing import Any

import pytest

from harness.serve.run import Running
from tests.serve.http import Http, Reply
from tests.serve.peers import ABSENT, PASS, REFUSED, Row, found, rows_of


def answer_of(server: Running, row: Row) -> Reply:
    method, _, path = row.path.rpartition(" ")
    http = Http(server.url)
    if not method:
        return http.post(path, row.body)
    body = None if row.body is None else json.dumps(row.body).encode()
    return http.send(method, path, body, {"Content-Type": "application/json"})


def objects_of(reply: Reply) -> Any:
    """The answer, or the list of the objects of a stream; None for what is no JSON."""
    kind = reply.headers["Content-Type"] or ""
    if kind.startswith("text/event-stream"):
        data = (line[6:] for line in reply.body.split(b"\n") if line.startswith(b"data: "))
        return [json.loads(one) for one in data if one != b"[DONE]"]
    if kind.startswith("application/x-ndjson"):
        return [json.loads(line) for line in reply.body.splitlines()]
    return reply.json if kind.startswith("application/json") and reply.body else None


def check(server: Running, row: Row) -> None:
    """Raise AssertionError where a row is not what becomes of its request."""
    assert (row.verdict == PASS) == (not row.why), row.test
    assert row.status >= 400 or row.verdict != REFUSED, row.test
    if not row.path:
        assert row.verdict == ABSENT, row.test
        return
    reply = answer_of(server, row)
    assert reply.status == row.status, (row.test, row.body, reply.status, reply.body[:500])
    answer = objects_of(reply)
    for place, expected in row.has.items():
        try:
            value = found(answer, place)
        except (KeyError, IndexError, TypeError):
            pytest.fail(f"{row.test}: nothing at {place} of {str(answer)[:500]}")
        same = value == expected
        if isinstance(expected, str) and expected.startswith("~"):
            same = expected[1:] in value
        assert expected is ... or same, (row.test, place, value)


@pytest.mark.parametrize("peer", ["llama", "vllm", "ollama", "others", "refusals"])
def test_what_becomes_of_the_tests_of_peers(hermes, peer):
    problems = []
    for row in rows_of(peer):
        try:
            check(hermes, row)
        except (AssertionError, pytest.fail.Exception) as problem:
            problems.append(str(problem).splitlines()[0])
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "row",
    [
        Row("a", path="GET /health", status=404),
        Row("a", path="GET /health", has={"nothing": ...}),
        Row("a", path="GET /health", has={"status": "ill"}),
        Row("a", path="GET /health", has={"status": "~ill"}),
        Row("a", why="no verdict"),
        Row("a", REFUSED, "GET /health", why="it is answered"),
    ],
    ids=str,
)
def test_a_row_that_is_wrong_is_noticed(hermes, row):
    """Negative control."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(hermes, row)
