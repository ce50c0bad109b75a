"""The request bodies of the Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from harness.serve.wire import MAX_MESSAGES, Id, MaxTokens, Seed, Share, Temperature, TopK
from harness.serve.wire_tools import CallId, FunctionName, ReasoningEffort

StopSequences = Annotated[list[str], Meta(max_length=16)]


class TextBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A piece of text. ``cache_control`` is ignored: the prefix cache finds all prompts that begin
    alike."""

    text: str
    cache_control: Any = None
    citations: Any = None


class ToolUseBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """A tool call that the model made."""

    id: CallId
    name: FunctionName
    input: dict[str, Any] | None = None
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """The result of a tool call, or its failure."""

    tool_use_id: CallId
    content: str | list[TextBlock] | None = None
    is_error: bool = False
    cache_control: Any = None


class ThinkingBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """Reasoning of the model."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(
    Struct, forbid_unknown_fields=True, tag_field="type", tag="redacted_thinking"
):
    """Encrypted reasoning of another server."""

    data: str


UserBlock = TextBlock | ToolResultBlock
AssistantBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class UserTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """A message of the user."""

    content: str | list[UserBlock]


class SystemTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """Instructions to the model in the middle of a conversation."""

    content: str | list[TextBlock]


class AssistantTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """An earlier answer of the model."""

    content: str | list[AssistantBlock]


class ClientTool(Struct, forbid_unknown_fields=True):
    """A function that the client runs."""

    name: FunctionName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None


class AnyChoice(Struct, forbid_unknown_fields=True):
    """Whether the model calls a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Struct, forbid_unknown_fields=True):
    """Whether the model thinks first. ``budget_tokens`` is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class SchemaFormat(Struct, forbid_unknown_fields=True):
    """An answer that matches a JSON schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = field(name="schema")


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The format of an answer, and the reasoning effort."""

    effort: Literal["max"] | ReasoningEffort | None = None
    format: SchemaFormat | None = None


class CountRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/messages/count_tokens``: the ``input_tokens`` of a request."""

    messages: Annotated[
        list[UserTurn | AssistantTurn | SystemTurn], Meta(min_length=1, max_length=MAX_MESSAGES)
    ]
    model: Id
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: AnyChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None
    cache_control: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """``POST /v1/messages``. ``metadata`` and ``cache_control`` are ignored. ``seed`` and ``min_p``
    are extensions, as in chat completions."""

    max_tokens: MaxTokens
    stop_sequences: StopSequences | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    metadata: Any = None
    service_tier: Literal["auto", "standard_only"] | None = None
