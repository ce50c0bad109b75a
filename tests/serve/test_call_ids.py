"""Results of calls without the id of their call."""

from typing import Any

import pytest

from harness.serve.chat import turns_of
from harness.serve.errors import ApiError
from harness.serve.ollama.parse import _messages
from harness.serve.ollama.wire import OllamaChatRequest
from harness.serve.wire import ChatRequest, converted
from tests.tables import table


def called(*names: str) -> dict[str, Any]:
    calls = [
        {"id": f"{name}{index}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for index, name in enumerate(names)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize(
    ("results", "ids"), table(__file__, "test_call_ids")["a_result_is_of_the_first_call_that_waits"]
)
def test_a_result_is_of_the_first_call_that_waits(results, ids):
    """By its name where it has one; an earlier turn's calls wait no more."""
    told = [{"role": "tool", "content": "a", **result} for result in results]
    turns = [called("h"), called("f", "g"), *told]
    messages = converted({"messages": turns}, ChatRequest).messages
    if ids is None:
        with pytest.raises(ApiError, match="tool_call_id"):
            turns_of(messages)
    else:
        assert [turn["tool_call_id"] for turn in turns_of(messages)[2:]] == ids


@pytest.mark.parametrize(
    ("results", "ids"),
    [
        ([{"tool_call_id": "f0"}, {}], ["f0", "g1"]),
        ([{"tool_call_id": "g1"}, {"tool_name": "f"}], ["g1", "f0"]),
        ([{}, {}], ["f0", "g1"]),
    ],
)
def test_ollama_gives_a_result_to_a_call_that_has_none(results, ids):
    """Also where an earlier result names its call."""
    calls = [{"id": f"{name}{i}", "function": {"name": name}} for i, name in enumerate("fg")]
    told = [{"role": "tool", "content": "a", **result} for result in results]
    turns = [{"role": "assistant", "content": "", "tool_calls": calls}, *told]
    messages = converted({"model": "m", "messages": turns}, OllamaChatRequest).messages
    assert [turn["tool_call_id"] for turn in list(_messages(messages))[1:]] == ids
