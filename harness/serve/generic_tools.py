"""Tools for a model whose chat template has no support for them: the system text describes the
tools, and earlier calls and their results become text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.host.dialect import Dialect
from harness.host.dialect.calls import ANY_OBJECT, Function, json_rule
from harness.host.dialect.json_calls import JsonObjectCalls
from harness.host.structured.schema_tree import SchemaRefused

Turn = dict[str, Any]
CALLS = JsonObjectCalls("<tool_call>", "</tool_call>", before="\n", after="\n")
"""The syntax of calls that the system text asks for. Most models were trained on it."""
DESCRIPTION = """\
# Tools

You may call functions to help with what the user asks. They are, one JSON object a line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON between these tags, once for each call:
<tool_call>
{{"name": <name of the function>, "arguments": <object of its arguments>}}
</tool_call>

What a call gives is told between <tool_response> and </tool_response>."""


def generic_dialect(dialect: Dialect, strict: bool) -> Dialect:
    """``dialect`` with a syntax of calls. Calls in a Markdown fence are read too, but not with
    ``strict`` functions, since grammars do not cover them."""
    return replace(dialect, calls=replace(CALLS, fenced=not strict))


def written_as_text(turns: Sequence[Turn], tools: Sequence[Turn], takes_system: bool) -> list[Turn]:
    """``turns`` with calls and results as text, and a description of ``tools`` in the system text,
    or in the user's first message if the template has no system text."""
    written: list[Turn] = []
    for turn in turns:
        if turn["role"] == "assistant" and turn.get("tool_calls"):
            written.append(_with_calls(turn))
        elif turn["role"] == "tool":
            text = f"<tool_response>\n{_text(turn)}\n</tool_response>"
            _append_user(written, text, after_result=True)
        elif turn["role"] == "user" and written and written[-1].get(RESULT):
            _append_user(written, _text(turn), after_result=False)
        else:
            written.append(dict(turn))
    for turn in written:
        turn.pop(RESULT, None)
    return _described(written, tools, takes_system) if tools else written


def enforced_functions(functions: Sequence[Function], strict: set[str]) -> list[Function]:
    """``functions`` whose calls a grammar can enforce. A function that is not ``strict`` takes any
    object if its schema cannot be enforced."""
    return [one if one.name in strict else _loosened(one) for one in functions]


RESULT = "tool_result"
"""Key that marks a user's turn made of results, while turns are merged."""


def _loosened(function: Function) -> Function:
    try:
        json_rule(function.parameters)
    except SchemaRefused:
        return replace(function, parameters=ANY_OBJECT)
    return function


def _with_calls(turn: Turn) -> Turn:
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(function["name"])}, '
        f'"arguments": {_arguments(function["arguments"])}}}\n</tool_call>'
        for function in (call["function"] for call in turn["tool_calls"])
    ]
    others = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**others, "content": "\n".join([*filter(None, [_text(turn)]), *calls])}


def _arguments(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments.strip() or "{}"
    return json.dumps(arguments, ensure_ascii=False)


def _append_user(written: list[Turn], text: str, after_result: bool) -> None:
    """Append to the user's last turn. Results and the user's next text are one turn, because many
    templates require turns to alternate."""
    if written and written[-1].get(RESULT):
        written[-1]["content"] += f"\n{text}"
        written[-1][RESULT] = after_result
    else:
        written.append({"role": "user", "content": text, RESULT: after_result})


def _described(turns: list[Turn], tools: Sequence[Turn], takes_system: bool) -> list[Turn]:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = DESCRIPTION.format(tools=lines)
    role = "system" if takes_system else "user"
    first = next((turn for turn in turns if turn["role"] == role), None)
    if first is None:
        return [{"role": role, "content": text}, *turns]
    content = _text(first)
    first["content"] = f"{content}\n\n{text}" if takes_system else f"{text}\n\n{content}"
    return turns


def _text(turn: Turn) -> str:
    content = turn.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
