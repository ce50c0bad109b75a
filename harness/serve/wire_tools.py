"""Request fields about tools and about the form of an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}(?!\n)$")]
MAX_TOOLS = 128
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class FunctionDefinition(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function the model may call. ``parameters`` is a JSON schema of its arguments; ``strict``
    asks that calls obey it even where the model decides by itself whether to call."""

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
    """A call as it was made: ``arguments`` is the text of a JSON object, or one, null or an empty
    text where it had none."""

    name: FunctionName
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call of an earlier turn. ``index`` is what streams number calls by."""

    type: Literal["function"]
    id: CallId
    function: CalledFunction
    index: int | None = None


class TextFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """No constraint on the form of an answer."""


class JsonObjectFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """An answer that is one JSON object."""


class JsonSchema(Struct, forbid_unknown_fields=True):
    """A JSON schema. It is enforced to the letter with ``strict`` and without."""

    name: FunctionName
    description: str | None = None
    schema_: dict[str, Any] | bool | None = field(default=None, name="schema")
    strict: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """An answer that obeys a JSON schema."""

    json_schema: JsonSchema


class RegexFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="regex"):
    """An answer that a regular expression matches as a whole. Not OpenAI's."""

    regex: Annotated[str, Meta(min_length=1, max_length=65536)]


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
