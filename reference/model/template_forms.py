"""The forms of messages that a chat template accepts, found by rendering some.

Templates differ in what the content of a message is: a text, or a list of parts; in what it is
in a message with tool calls: null, an empty text, or missing; in what the arguments of calls are:
an object, or its JSON text; and in the name of reasoning. A template silently drops a form that it
does not take. So each form is rendered once, with texts that nothing else would print, and a form
whose texts come out is taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

Turn = dict[str, Any]
TryOut = Callable[[Sequence[Turn]], str | None]
"""Renders messages by a template; None if it fails."""

MARK = "zqmark7"
NAME = "zqname7"
KEY = "zqkey7"
VALUE = "zqvalue7"
CALL_ID = "call00007"
"""Texts that no template has of its own."""
REASONING, OTHER_REASONING = "reasoning_content", "thinking"
"""Names under which templates look for the reasoning of a message."""
ABSENT = object()
"""A content that is not there."""


class TemplateForms:
    """The forms one template takes. ``try_out`` renders; each form is tried when it is needed."""

    def __init__(self, try_out: TryOut) -> None:
        self._try_out = try_out
        self._takes_text: dict[str, bool] = {}

    def adapted(self, messages: Sequence[Turn]) -> list[Turn]:
        """``messages`` in the forms the template takes."""
        return [self._adapted(message) for message in self._with_system(messages)]

    def takes_text(self, role: str) -> bool:
        """Whether the content of a role's messages is a text. False if it is a list of parts; True
        if the template prints neither."""
        known = self._takes_text.get(role)
        if known is None:
            known = self._takes_text[role] = self._prints(role, MARK) or not self._prints(
                role, _parts(MARK)
            )
        return known

    @cached_property
    def takes_system(self) -> bool:
        """Whether the text of a system message reaches the model."""
        return self._prints("system", MARK) or self._prints("system", _parts(MARK))

    @cached_property
    def _takes_two_systems(self) -> bool:
        """Whether a second system message at the beginning is printed too."""
        first, second = self._system(VALUE), self._system(MARK)
        text = self._try_out([first, second, self._user("hi")])
        return text is not None and MARK in text and VALUE in text

    @cached_property
    def _takes_late_systems(self) -> bool:
        """Whether a system message after a user's is printed."""
        text = self._try_out([self._user("hi"), self._system(MARK), self._user("hi")])
        return text is not None and MARK in text

    def _with_system(self, messages: Sequence[Turn]) -> Sequence[Turn]:
        """``messages`` with system messages only where the template prints them: those at the
        beginning are joined to one if it prints one, later ones become the user's, and if it prints
        none their text is part of the user's turns."""
        roles = [message["role"] for message in messages]
        if "system" in roles and not self.takes_system:
            return _system_in_user_turns(messages)
        first = next((n for n, role in enumerate(roles) if role != "system"), len(roles))
        head, rest = list(messages[:first]), list(messages[first:])
        texts = [_text_of(message.get("content")) for message in head]
        if first > 1 and None not in texts and not self._takes_two_systems:
            head = [{"role": "system", "content": "\n\n".join(filter(None, texts))}]
        if "system" in roles[first:] and not self._takes_late_systems:
            rest = [{**m, "role": "user"} if m["role"] == "system" else m for m in rest]
        return head + rest

    def _system(self, text: str) -> Turn:
        return {"role": "system", "content": text if self.takes_text("system") else _parts(text)}

    def _adapted(self, message: Turn) -> Turn:
        content = message.get("content")
        adapted = dict(message)
        if isinstance(content, str) and not self.takes_text(message["role"]):
            adapted["content"] = _parts(content)
        elif (texts := _texts_of(content)) is not None and self.takes_text(message["role"]):
            adapted["content"] = content = "".join(texts)
        if message["role"] == "assistant" and message.get("tool_calls"):
            self._adapt_calls(adapted, content)
        if adapted.get(REASONING) and self._uses_other_name:
            self._adapt_reasoning(adapted)
        return adapted

    def _adapt_reasoning(self, message: Turn) -> None:
        """Reasoning under the other name; none if the template refuses them."""
        reasoning = message.pop(REASONING)
        has_both = bool(message.get("tool_calls") and message.get("content"))
        if not has_both or self._accepts_reasoning_with_content:
            message[OTHER_REASONING] = reasoning

    @cached_property
    def _uses_other_name(self) -> bool:
        """Whether reasoning comes out under the other name alone."""
        own, other = (
            any(text is not None and MARK in text for text in self._thinking(name, None))
            for name in (REASONING, OTHER_REASONING)
        )
        return other and not own

    @cached_property
    def _accepts_reasoning_with_content(self) -> bool:
        """Whether a message may have reasoning, content and calls."""
        return any(text is not None for text in self._thinking(OTHER_REASONING, "hi"))

    def _thinking(self, name: str, content: str | None) -> Iterator[str | None]:
        """The rendered reasoning in front of a call, in one conversation after the other."""
        turn = self._adapted(_calling(content, as_text=False)) | {name: MARK}
        return (self._try_out(around(turn)) for around in self._call_contexts())

    def _adapt_calls(self, message: Turn, content: Any) -> None:
        contents, as_text = self._call_forms
        if not content:
            given = content if "content" in message else ABSENT
            message.pop("content", None)
            chosen = given if any(given is one or given == one for one in contents) else contents[0]
            if chosen is not ABSENT:
                message["content"] = chosen
        calls = message["tool_calls"]
        if isinstance(calls, list):
            message["tool_calls"] = [_with_arguments(call, as_text) for call in calls]

    @cached_property
    def _call_forms(self) -> tuple[Sequence[Any], bool]:
        """The contents with which calls are printed, or their names where a template prints no
        arguments, and whether their arguments are texts."""
        for printed, around in product(((NAME, KEY, VALUE), (NAME,)), self._call_contexts()):
            other = self._try_out(around(_calling(MARK, as_text=False)))
            others = 0 if other is None else other.count("None")
            for as_text in (False, True):
                contents = [
                    content
                    for content in EMPTY_CONTENTS
                    if _shows(printed, self._try_out(around(_calling(content, as_text))), others)
                ]
                if contents:
                    return contents, as_text
        fails = self._try_out([self._user("hi"), _calling("", as_text=False)]) is None
        return ([None, ABSENT] if fails else [""]), False

    @cached_property
    def written_call(self) -> str | None:
        """What is written from the beginning of a conversation to the end of a turn that calls NAME
        with VALUE as the argument KEY; None if the call or the end of the turn is not known."""
        turn = self._adapted(_calling(None, as_text=False))
        said: Turn = self._adapted({"role": "assistant", "content": MARK})
        for around in self._call_contexts():
            text, plain = self._try_out(around(turn)), self._try_out(around(said))
            if text is None or plain is None or not _shows((NAME, VALUE), text, text.count("None")):
                continue
            end = plain.partition(MARK)[2]
            if text.endswith(end):
                return text.removesuffix(end)
        return None

    def _call_contexts(self) -> list[Callable[[Turn], list[Turn]]]:
        """Conversations around a turn with calls: some templates print it at the end only, some
        with its results only, and some with a system message only."""
        user, system = self._user("hi"), self._system("hi")
        return [
            lambda turn: [user, turn],
            lambda turn: [user, turn, RESULT],
            lambda turn: [system, user, turn, RESULT],
        ]

    def _prints(self, role: str, content: Any) -> bool:
        """Whether the content of a role's message is printed in any context."""
        message = {"role": role, "content": content}
        if role == "tool":
            message |= {"tool_call_id": CALL_ID, "name": NAME}
        texts = map(self._try_out, self._contexts(message))
        return any(text is not None and MARK in text.lower() for text in texts)

    def _contexts(self, message: Turn) -> Iterator[list[Turn]]:
        """Conversations with a message, the plainest one first: a template may refuse one that does
        not begin with a system message, or is too short. Turns of roles whose form is not known
        have a text, and then parts."""
        role = message["role"]
        if role not in ("user", "system", "assistant"):
            calls = self.adapted([_calling(None, as_text=False)]) if role == "tool" else []
            yield [self._user("hi"), *calls, message] if calls else [message, self._user("hi")]
            yield [self._user("hi"), message]
            yield [self._system("hi"), self._user("hi"), *calls, message]
            return
        for parts in (False, True):
            system, user, said = (
                {"role": one, "content": _parts("hi") if self._parts_for(one, parts) else "hi"}
                for one in ("system", "user", "assistant")
            )
            if role == "user":
                yield from ([message], [system, message], [system, user, said, message])
            elif role == "system":
                yield from ([message, user], [message, user, said, user])
            else:
                yield from ([user, message, user], [user, message], [system, user, message, user])

    def _parts_for(self, role: str, unknown: bool) -> bool:
        """Whether a role's content is a list of parts; ``unknown`` if that could not be
        determined."""
        known = self._takes_text.get(role)
        return unknown if known is None else not known

    def _user(self, text: str) -> Turn:
        return {"role": "user", "content": text if self.takes_text("user") else _parts(text)}


def _system_in_user_turns(messages: Sequence[Turn]) -> list[Turn]:
    """``messages`` in which system messages are turns of the user, joined with the user's turn next
    to them: many templates require turns to alternate. Content that is no text stays as it is."""
    merged: list[Turn] = []
    joins_next = False
    for message in messages:
        text = _text_of(message.get("content"))
        is_system = message["role"] == "system" and text is not None
        turn = {"role": "user", "content": text} if is_system else message
        previous = merged[-1] if merged and merged[-1]["role"] == "user" else {}
        previous_text = _text_of(previous.get("content"))
        joins = turn["role"] == "user" and (is_system or joins_next)
        if joins and None not in (previous_text, text):
            content = "\n\n".join(filter(None, (previous_text, text)))
            merged[-1] = {**previous, **turn, "content": content}
        else:
            merged.append(turn)
        joins_next = is_system
    return merged


def _calling(content: Any, as_text: bool) -> Turn:
    """A turn with a call, whose arguments are a text or an object."""
    arguments: Any = {KEY: VALUE}
    function = {"name": NAME, "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"id": CALL_ID, "type": "function", "function": function}
    turn: Turn = {"role": "assistant", "tool_calls": [call]}
    return turn if content is ABSENT else {**turn, "content": content}


def _parts(text: str) -> list[Turn]:
    return [{"type": "text", "text": text}]


RESULT: Turn = {"role": "tool", "content": "hi", "tool_call_id": CALL_ID, "name": NAME}
EMPTY_CONTENTS: tuple[Any, ...] = (None, "", ABSENT, [], _parts(""))


def _text_of(content: object) -> str | None:
    """A content as one text; None if it holds anything else."""
    texts = [content] if isinstance(content, str) else _texts_of(content)
    return None if texts is None else "".join(texts)


def _texts_of(content: object) -> list[str] | None:
    """The texts of a content that is a list of texts and of nothing else."""
    if not isinstance(content, list):
        return None
    texts = [
        part["text"]
        for part in content
        if isinstance(part, Mapping) and part.get("type") == "text"
        if isinstance(part.get("text"), str)
    ]
    return texts if len(texts) == len(content) else None


def _shows(printed: Sequence[str], text: str | None, others: int) -> bool:
    """Whether what is to be ``printed`` of a rendered call is there, arguments as JSON or in a way
    of the template's own, and no content is printed as Python writes null."""
    if text is None or not all(part in text for part in printed):
        return False
    pythons, quoted = f"{{'{KEY}'", f'\\"{KEY}\\"'
    return pythons not in text and quoted not in text and text.count("None") <= others


def _with_arguments(call: Any, as_text: bool) -> Any:
    """A call whose arguments have a form; one that is malformed is left to the template."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if isinstance(arguments, str) and not arguments.strip():
        arguments = "{}"
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except ValueError:
            return call
        arguments = value if isinstance(value, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}
