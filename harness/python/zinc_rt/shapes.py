"""Accepts arguments that may be one value or many: prompts, conversations, parameters. A wrong
argument raises a TypeError that names the right form."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast, overload

import numpy as np

from contract.errors import RequestError
from zinc_rt.parameters import SamplingParams

Prompt = str | Sequence[int]
"""A text or token ids. Text that looks like a control token stays text."""
Message = Mapping[str, object]
Conversation = str | Sequence[Message]
"""Messages, or the text of a user's one message."""
A_PROMPT = "give a text, a list of token ids, or a list of those"
A_CONVERSATION = 'give a text, or a list of messages such as {"role": "user", "content": "Hello"}'


OF_PROMPTS = {"text": "prompt"}
OF_TEXTS = {"prompt": "text"}
OF_SCORES = {**OF_TEXTS, "score_from": "start", "score_top": "top"}
OF_MESSAGES = {"text": "messages", "prompt": "messages"}
"""What callers of a method gave, by the name that errors of the tokenizer and the engine have."""


class WrongShape(RequestError, TypeError):
    """An argument of the wrong type. It is a TypeError, and a RequestError so that it can be the
    error of one prompt among many."""


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name what the caller gave; see ``RequestError.renamed``."""
    try:
        yield
    except RequestError as error:
        raise error.renamed(names) from None


def prompts_of(given: Prompt | Iterable[Prompt], name: str = "prompts") -> Iterable[Prompt]:
    """A list or iterable of prompts; a single prompt becomes a list of one."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, np.ndarray):
        given = cast(list[int], given.tolist())
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise wrong(name, given, A_PROMPT)
    if isinstance(given, Sequence) and given and _is_integer(given[0]):
        return [cast(Prompt, given)]
    return cast(Iterable[Prompt], given)


def token_ids(
    given: Sequence[int], name: str = "prompt", remedy: str = "give a text or a list of token ids"
) -> list[int]:
    """The token ids of a prompt that is not text."""
    try:
        if not isinstance(given, bytes | Mapping):
            return [operator.index(token) for token in given]
    except TypeError:
        pass
    raise wrong(name, given, remedy)


def conversations_of(given: Conversation | Iterable[Conversation]) -> Iterable[Sequence[Message]]:
    """A list or iterable of conversations; a single one becomes a list of one."""
    if isinstance(given, str):
        return [messages_of(given)]
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise wrong("messages", given, A_CONVERSATION)
    if isinstance(given, Sequence) and given and isinstance(given[0], Mapping):
        return [messages_of(cast(Sequence[Message], given))]
    many = map(messages_of, cast(Iterable[Conversation], given))
    return list(many) if isinstance(given, Sequence) else many


def messages_of(given: Conversation) -> Sequence[Message]:
    """The messages of one conversation."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise wrong("messages", given, A_CONVERSATION)
    for message in given:
        if not isinstance(message, Mapping):
            raise wrong("messages", message, 'give {"role": "user", "content": "Hello"}')
    return cast(Sequence[Message], given)


def check_parts(messages: Sequence[Message]) -> None:
    """Raise RequestError for a part of a message that is no text."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type", "text") != "text":
                problem = f"has a part of type {part['type']!r}; only text is understood"
                raise RequestError(f"messages[{index}].content", problem)


def parameters_of(parameters: Parameters, prompts: Iterable[Any]) -> Iterable[SamplingParams]:
    """The parameters of each prompt."""
    if parameters is None or isinstance(parameters, SamplingParams):
        return itertools.repeat(parameters or SamplingParams())
    if not isinstance(parameters, Sequence) or isinstance(parameters, str | bytes):
        raise wrong("parameters", parameters, "give SamplingParams(...), or a list of them")
    for one in parameters:
        parameters_for_one(one)
    if not isinstance(prompts, Sequence) or len(parameters) != len(prompts):
        raise RequestError("parameters", "are for all prompts, or one for each of a list of them")
    return parameters


One = SamplingParams | None
"""The parameters of a call for one prompt."""
Parameters = SamplingParams | Sequence[SamplingParams] | None
"""The parameters of a call: for all prompts, or one for each."""


@overload
def either(parameters: One, sampling_params: One) -> One: ...
@overload
def either(parameters: Parameters, sampling_params: Parameters) -> Parameters: ...
def either(parameters: Parameters, sampling_params: Parameters) -> Parameters:
    """The parameters, given by either name; the second is vLLM's. Raises TypeError if both are
    given."""
    if parameters is not None and sampling_params is not None:
        raise TypeError("sampling_params is another name of parameters; give one of them")
    return sampling_params if parameters is None else parameters


def parameters_for_one(parameters: SamplingParams | None) -> SamplingParams:
    """The parameters of a single prompt."""
    if parameters is not None and not isinstance(parameters, SamplingParams):
        raise wrong("parameters", parameters, "give SamplingParams(...)")
    return parameters or SamplingParams()


def starts_of(start: int | Sequence[int], prompts: Iterable[Any]) -> Iterable[int]:
    """The position of the first scored token for each prompt."""
    if isinstance(start, np.ndarray):
        start = cast(list[int], start.tolist())
    if _is_integer(start):
        return itertools.repeat(int(cast(int, start)))
    if not isinstance(start, Sequence) or not all(map(_is_integer, start)):
        raise wrong("start", start, "give a number of tokens, or one for each text of a list")
    if not isinstance(prompts, Sequence) or len(start) != len(prompts):
        raise RequestError("start", "is for all texts, or one for each of a list of them")
    return start


def wrong(name: str, given: object, remedy: str) -> WrongShape:
    """The error for an argument of the wrong type."""
    shown = repr(given)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return WrongShape(name, f"{shown} is of type {type(given).__name__}; {remedy}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
