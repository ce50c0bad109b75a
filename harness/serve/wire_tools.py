"""Request fields for tools and response formats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}(?!\n)$")]
MAX_TOOLS = 128
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class FunctionDefinition(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function the model may call. ``parameters`` is the JSON schema of its arguments. ``strict``
    enforces the schema also if the model decides by itself whether to call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    """A tool that the model may call: always a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(Struct, forbid_unknown_fields=True):
    """A function by its name."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    """A tool choice that names the tool to call."""

    type: Literal["function"]
    function: FunctionReference


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class CalledFunction(Struct, forbid_unknown_fields=True):
    """A call that the model made. ``arguments`` is the text of a JSON object, or the object itself.
    Null or an empty text means no arguments."""

    name: FunctionName
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, forbid_unknown_fields=True):
    """A tool call of an earlier turn. ``index`` numbers calls in streams, and is ignored."""

    type: Literal["function"]
    id: CallId
    function: CalledFunction
    index: int | None = None


class TextFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """No constraint."""


class JsonObjectFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """An answer that is one JSON object."""


class JsonSchema(Struct, forbid_unknown_fields=True):
    """A JSON schema. It is always enforced exactly, with or without ``strict``."""

    name: FunctionName
    description: str | None = None
    schema_: dict[str, Any] | bool | None = field(default=None, name="schema")
    strict: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """An answer that matches a JSON schema."""

    json_schema: JsonSchema


class RegexFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="regex"):
    """An answer that matches a regular expression as a whole. An extension of OpenAI's API."""

    regex: Annotated[str, Meta(min_length=1, max_length=65536)]


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
