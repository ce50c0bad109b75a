"""Packages that agents are written with, unchanged: pydantic-ai and langchain-openai."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, SecretStr

from harness.serve.run import Running
from tests.late_module import LateModule

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.long
"""They send what OpenAI's own client sends, and take two seconds and more to import."""
messages = LateModule("langchain_core.messages")
pydantic_ai = LateModule("pydantic_ai")
models = LateModule("pydantic_ai.models.openai")
SETTINGS = {
    "max_tokens": 300,
    "seed": 7,
    "extra_body": {"enable_thinking": False},
    "parallel_tool_calls": False,
}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    sunny: bool


async def with_provider(server: Running, work: Callable[[OpenAIProvider], Awaitable[None]]) -> None:
    """Do ``work`` with a provider whose connections are closed after it."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        provider = LateModule("pydantic_ai.providers.openai").OpenAIProvider(openai_client=client)
        await work(provider)


def langchain(server: Running, **fields: Any) -> ChatOpenAI:
    chat: ChatOpenAI = LateModule("langchain_openai").ChatOpenAI(
        model="tiny",
        base_url=f"{server.url}/v1",
        api_key=SecretStr("unused"),
        max_retries=0,
        max_completion_tokens=300,
        **fields,
    )
    return chat


def test_pydantic_ai_gets_objects(hermes):
    """By a tool that the model must call, and by a schema of the answer."""

    async def ask(provider: OpenAIProvider) -> None:
        model = models.OpenAIChatModel("tiny", provider=provider)
        for output in (Weather, pydantic_ai.NativeOutput(Weather)):
            agent: Agent[None, Weather] = pydantic_ai.Agent(
                model, output_type=output, model_settings=SETTINGS
            )
            result = await agent.run("How is it in Oslo?")
            assert result.output.city in ("Oslo", "Rome")

    asyncio.run(with_provider(hermes, ask))


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_goes_on_with_its_history(hermes, kind):
    """By chat completions and by responses: the second prompt holds the first and its answer."""
    tokens: list[int] = []

    async def ask(provider: OpenAIProvider) -> None:
        model = getattr(models, kind)("tiny", provider=provider)
        agent = pydantic_ai.Agent(model, model_settings={"max_tokens": 12})
        first = await agent.run("Hello")
        second = await agent.run("And?", message_history=first.all_messages())
        tokens.extend(one.response.usage.input_tokens for one in (first, second))

    asyncio.run(with_provider(hermes, ask))
    assert tokens[1] > tokens[0] > 0


def test_langchain_answers_and_streams(hermes):
    chat = langchain(hermes, extra_body={"enable_thinking": False}, temperature=0.0)
    whole = chat.invoke([messages.HumanMessage("Hello")])
    parts = list(chat.stream([messages.HumanMessage("Hello")]))
    assert "".join(str(part.content) for part in parts) == whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["input_tokens"] > 0


def test_langchain_gets_objects_and_calls(hermes):
    chat = langchain(hermes, extra_body={"enable_thinking": False}, seed=7)
    for method in ("json_schema", "function_calling"):
        answer = chat.with_structured_output(Weather, method=method).invoke("How is it in Oslo?")
        assert isinstance(answer, Weather)
    caller = chat.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False)
    question = messages.HumanMessage("How is it?")
    calls = (caller.invoke([question], seed=seed) for seed in range(20))
    call = next(one for one in calls if isinstance(one, messages.AIMessage) and one.tool_calls)
    (made,) = call.tool_calls
    assert made["name"] == "Weather"
    result = messages.ToolMessage("sunny", tool_call_id=made["id"])
    assert isinstance(chat.invoke([question, call, result]), messages.AIMessage)


def test_langchain_continues_stored_responses(hermes):
    chat = langchain(hermes, use_responses_api=True, use_previous_response_id=True)
    first = chat.invoke([messages.HumanMessage("Hello")], max_completion_tokens=8)
    second = chat.invoke([messages.HumanMessage("Hello"), first, messages.HumanMessage("And?")])
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    assert second.response_metadata["id"] != first.response_metadata["id"]
