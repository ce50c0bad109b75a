"""What clients ask of models that speak as real families do, and how they read it.

The weights are random: what they write is what a grammar makes them write, or what a bias does."""

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel

from harness.serve.run import Running

WEATHER = {
    "name": "get_weather",
    "description": "The weather of the coming days.",
    "parameters": {"type": "object",
                   "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]},
                                  "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                   "required": ["city"], "additionalProperties": False},
}  # fmt: skip
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
TIME["parameters"]["additionalProperties"] = False  # type: ignore[index]
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, TIME)]
PARAMETERS = {one["name"]: one["parameters"] for one in (WEATHER, TIME)}
MESSAGES = [{"role": "user", "content": "How warm is it?"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 150}
CALLING = {**ASKED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
UNTHINKING = {"enable_thinking": False}
ENUM = {"enum": ["yes", "no"]}


class Weather(BaseModel):
    """What a client wants parsed."""

    city: Literal["Oslo", "Rome"]
    sunny: bool


def client_of(server: Running, retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=retries)


def client_waits(monkeypatch: pytest.MonkeyPatch, wait: Callable[[float], None]) -> None:
    """Has OpenAI's client call ``wait`` with the seconds before it asks again, instead of
    sleeping."""
    clock = SimpleNamespace(time=time.time, sleep=wait)
    monkeypatch.setattr("openai._base_client.time", clock)


def check_call(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), PARAMETERS[name])


def token_of(server: Running, mark: str) -> str:
    (token,) = server.service.model.tokenizer.encode(mark, add_bos=False)
    return str(token)
