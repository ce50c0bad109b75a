"""Translates vLLM's and llama.cpp's fields for structured outputs and reasoning to this server's
fields."""

from __future__ import annotations

import re
from typing import Any

from harness.serve.errors import invalid_value, unsupported
from harness.serve.strict_json import BadJson, loads
from harness.serve.tool_selection import offered_tools

FORMAT, GRAMMAR = "response_format", "grammar"
EFFORT = "reasoning_effort"
STRUCTURED = "structured_outputs"
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
KINDS = ("json", "regex", "choice", "grammar", "json_object")
TRANSLATED = frozenset(
    (*GUIDED, *("tools", "tool_choice", "messages", "reasoning"), FORMAT, STRUCTURED, "json_schema")
)
"""The fields that ``own_chat_fields`` looks at."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""Fields with LM Studio's -1 for no limit."""
NAME = "answer"
"""The name of a schema that has none."""


def own_chat_fields(value: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """A chat body with this server's fields: only tools that the client runs, refusals as text,
    ``reasoning`` renamed, and structured outputs as ``response_format`` or ``grammar``. Raises
    ApiError."""
    value = _with_own_limit(value)
    if TRANSLATED.isdisjoint(value):
        return value
    return own_format(_with_own_turns(offered_tools(value, ignored)))


def _with_own_limit(value: dict[str, Any]) -> dict[str, Any]:
    """``value`` with a limit of -1, which is none, as ``n_predict``."""
    given = [name for name in LIMITS if type(value.get(name)) is int and value[name] == -1]
    rest = {name: one for name, one in value.items() if name not in given}
    return rest | {"n_predict": rest.get("n_predict") or -1} if given else value


def _with_own_turns(value: dict[str, Any]) -> dict[str, Any]:
    reasoning, messages = value.get("reasoning"), value.get("messages")
    if isinstance(reasoning, dict) and reasoning.keys() == {"effort"}:
        value = _renamed(value | {"reasoning": reasoning["effort"]}, EFFORT)
    if not isinstance(messages, list):
        return value
    return value | {"messages": [_own_turn(message) for message in messages]}


def _own_turn(message: Any) -> Any:
    """A message with the refusals of the model as plain text, and ``reasoning`` renamed."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    message = _renamed(message, "reasoning_content")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": [_text_of_refusal(part) for part in content]}


def _renamed(value: dict[str, Any], name: str) -> dict[str, Any]:
    """``value`` with ``reasoning`` as ``name``, where it has no such field."""
    if value.get("reasoning") is None or value.get(name) is not None:
        return value
    rest = {key: one for key, one in value.items() if key != "reasoning"}
    return rest | {name: value["reasoning"]}


def _text_of_refusal(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") != "refusal":
        return part
    rest = {name: one for name, one in part.items() if name != "refusal"}
    return rest | {"type": "text", "text": part.get("refusal")}


def own_format(value: dict[str, Any]) -> dict[str, Any]:
    """``value`` with ``structured_outputs``, ``guided_json`` and its like, ``json_schema``, or a
    ``json_object`` with a schema translated to ``response_format`` or ``grammar``. Raises ApiError
    if two fields name a format."""
    value = _named(value)
    given = [name for name in (STRUCTURED, "json_schema", *GUIDED) if value.get(name)]
    if not given:
        return value
    rest = {name: one for name, one in value.items() if name not in given}
    taken = [name for name in (FORMAT, GRAMMAR) if rest.get(name) not in (None, {"type": "text"})]
    if len(given) + len(taken) > 1:
        named = " and ".join([*given, *taken])
        raise invalid_value(given[0], f"{named} contradict each other")
    (name,) = given
    if name != STRUCTURED:
        return rest | _form(name.removeprefix("guided_"), value[name], name)
    forms = value[name]
    known = isinstance(forms, dict) and [kind for kind in KINDS if forms.get(kind) is not None]
    if not known or len(known) > 1:
        raise invalid_value(name, f"{name} must have one of {', '.join(KINDS)}")
    other = [key for key in forms if key not in KINDS and forms[key] not in (None, False)]
    if other:
        raise unsupported(
            f"{name}.{other[0]}", f"{name}.{other[0]} is not served here; leave it out"
        )
    return rest | _form(known[0], forms[known[0]], f"{name}.{known[0]}")


def sent_name(raw: bytes, param: str) -> str:
    """The field of the body ``raw`` that was translated to ``param``, a field of this server's or a
    part of one."""
    try:
        value = loads(raw)
    except BadJson:
        return param
    own = re.split(r"[.\[]", param, maxsplit=1)[0]
    if not isinstance(value, dict) or own not in (FORMAT, GRAMMAR, EFFORT):
        return param
    if own == EFFORT:
        return param if value.get(EFFORT) is not None else "reasoning.effort"
    form = next((name for name in (STRUCTURED, "json_schema", *GUIDED) if value.get(name)), None)
    if form == STRUCTURED and isinstance(value[form], dict):
        kinds = [kind for kind in KINDS if value[form].get(kind) is not None]
        return ".".join([form, *kinds[:1]])
    if form is not None:
        return form
    given = value.get(own)
    if isinstance(given, dict) and given.get("schema") is not None:
        return f"{own}.schema"
    return param


def _named(value: dict[str, Any]) -> dict[str, Any]:
    """``value`` with a name for its schema, and a ``json_object`` with a schema as
    ``json_schema``."""
    form = value.get(FORMAT)
    if not isinstance(form, dict):
        return value
    if form.get("type") == "json_object" and form.get("schema") is not None:
        return value | {FORMAT: _schema(form["schema"])}
    named = form.get("json_schema")
    if form.get("type") == "json_schema" and isinstance(named, dict) and "name" not in named:
        return value | {FORMAT: form | {"json_schema": {"name": NAME, **named}}}
    return value


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": NAME, "schema": schema}}


def _form(kind: str, form: Any, param: str) -> dict[str, Any]:
    """The field of this server for a format of this kind."""
    if kind in ("json", "json_schema"):
        return {FORMAT: _schema(_read(form, param) if isinstance(form, str) else form)}
    if kind == "json_object":
        return {FORMAT: {"type": "json_object"}} if form is True else {}
    if kind == "regex":
        return {FORMAT: {"type": "regex", "regex": form}}
    if kind == "grammar":
        return {GRAMMAR: form}
    if not isinstance(form, list) or not form or not all(isinstance(one, str) for one in form):
        raise invalid_value(param, f"{param} must be texts")
    return {GRAMMAR: "root ::= " + " | ".join(map(_literal, form))}


def _read(text: str, param: str) -> Any:
    """A schema that a client sent as text. Raises ApiError."""
    try:
        return loads(text.encode(), exact=True)
    except (BadJson, UnicodeEncodeError) as error:
        raise invalid_value(param, f"{param}: {error}") from None


def _literal(text: str) -> str:
    """A literal in GBNF."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'
