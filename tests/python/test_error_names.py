"""Errors of the Python API name what its callers gave: an argument, a sampling parameter, or one
text of ``texts`` and one prompt of ``prompts``."""

import asyncio
import dataclasses
import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contract.errors import PromptTooLong, RequestError
from tests.python.conftest import CONTEXT
from zinc_rt import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
HALF, LONG = "\ud800", "x " * 500
BAD_PROMPTS: tuple[Any, ...] = (HALF, "", LONG, [1, 999_999], [1] * (CONTEXT + 1), None)
BAD_PARAMETERS = (
    SamplingParams(logit_bias={999_999: 1.0}),
    SamplingParams(stop_token_ids=[999_999]),
    SamplingParams(log_probabilities=21),
    SamplingParams(logprobs=21),
    SamplingParams(lora={"none": 1.0}),
    SamplingParams(repeat_last_n=100, repeat_penalty=2.0),
    SamplingParams(stop=["x" * 10_000]),
    SamplingParams(force_tokens=[999_999]),
    SamplingParams(force_tokens=[1] * CONTEXT),
)
BAD_MESSAGES: tuple[Any, ...] = (
    *(HALF, [{"role": "nobody", "content": "x"}], [{"role": "user"}], [1], None),
    [{"role": "user", "content": HALF}],
)
OF_PROMPTS = ("generate", "completed", "stream")
OF_CONVERSATIONS = ("chat", "stream_chat")
OF_TEXTS = ("score", "embed", "hidden_states")
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *((name, (bad,), {}) for name in (*OF_PROMPTS, *OF_TEXTS, "logits") for bad in BAD_PROMPTS),
    *(
        (name, ("a", bad), {})
        for name in (*OF_PROMPTS, *OF_CONVERSATIONS)
        for bad in BAD_PARAMETERS
    ),
    *((name, (bad,), {}) for name in (*OF_CONVERSATIONS, "encode_chat") for bad in BAD_MESSAGES),
    *((name, (LONG,), {}) for name in OF_CONVERSATIONS),
    *((name, ([None],), {}) for name in (*OF_PROMPTS, *OF_TEXTS, *OF_CONVERSATIONS)),
    *(("chat", ("a",), {name: 7}) for name in ("tools", "tool_choice", "response_format")),
    *(("score", ("abc",), {"start": start}) for start in (-1, 0, 99, [1, 2], "x")),
    *(("score", ("abc",), {"top": top}) for top in (-1, 21, "x", 1.5)),
    *(("score", ("abc",), {"experts": True}), ("embed", ("a",), {"dimensions": 10**6})),
    *(("tokenize", (HALF,), {}), ("tokenize", (7,), {}), ("detokenize", ([999_999],), {})),
]


def called(name: str, call: Callable[..., Any], given: tuple[Any, ...], named: Any) -> list[Any]:
    """The errors of a call: raised, or of its results."""
    try:
        found = call(*given, **named)
        if name.startswith("stream"):
            for _ in found:
                pass
        results = [] if found is None else list(found)
    except (RequestError, TypeError) as error:
        return [error]
    return [error for one in results if (error := getattr(one, "error", None)) is not None]


@pytest.mark.parametrize(("name", "given", "named"), CALLS)
def test_errors_name_what_was_given(llm: LLM, name: str, given: Any, named: Any) -> None:
    call = getattr(llm, name)
    known = {*inspect.signature(call).parameters}
    if "parameters" in known:
        known |= {field.name for field in dataclasses.fields(SamplingParams)}
    known |= {one.removesuffix("s") for one in known & {"texts", "prompts"}}
    errors = called(name, call, given, named)
    assert errors
    for error in errors:
        if isinstance(error, RequestError):
            assert error.field.partition("[")[0].partition(".")[0] in known, error
            assert str(error) == f"{error.field}: {error.problem}"


def test_so_do_those_of_asynchronous_streams(llm: LLM) -> None:
    async def heard(messages: Any) -> None:
        async for _ in llm.stream_chat(messages):
            pass

    with suppress(TypeError), pytest.raises(RequestError) as told:
        asyncio.run(heard(LONG))
    assert told.value.field == "messages"


def test_a_renamed_error_keeps_where_it_was_raised(llm: LLM) -> None:
    """For whoever looks for the rule that refused the value."""
    with pytest.raises(RequestError) as refused:
        llm.logits(HALF)
    assert refused.value.field == "prompt"
    assert Path(refused.traceback[-1].path).is_relative_to(ROOT / "reference")
    error = PromptTooLong("prompt", "9 tokens", 8)
    renamed = error.renamed({"prompt": "text"})
    assert (type(renamed), renamed.field, error.field) == (PromptTooLong, "text", "prompt")
