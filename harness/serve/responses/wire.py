"""The bodies of the routes below ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from harness.serve import wire
from harness.serve.responses.namespaces import joined_name
from harness.serve.wire_tools import ReasoningEffort

LOGPROBS = "message.output_text.logprobs"
REFERENCE = "item_reference"
"""The type of a reference to a stored item."""


class InputPart(Struct, forbid_unknown_fields=True):
    """A part of a message, from a client or an earlier answer. ``annotations`` and ``logprobs`` are
    ignored."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None


class InputItem(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An item of the conversation: a message, a function call, its output, reasoning, or a
    reference to a stored item by ``id``.

    Items of answers can be sent back, also those of other servers. Of encrypted reasoning the
    summary is read. ``token_ids`` are the tokens of the whole turn, as in messages of chat
    completions."""

    type: Literal[
        "message", "function_call", "function_call_output", "reasoning", "item_reference"
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    id: wire.Id | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    call_id: wire.Id | None = None
    name: wire.Id | None = None
    namespace: wire.Id | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: Any = None
    token_ids: list[int] | None = None


class ResponseFunction(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function the model may call, possibly in a namespace."""

    type: Literal["function"]
    name: wire.Id
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    namespace: wire.Id | None = None

    @property
    def called(self) -> str:
        """Its name for the model."""
        return joined_name(self.namespace, self.name)


class ChosenFunction(Struct, forbid_unknown_fields=True):
    """The function that must be called."""

    type: Literal["function"]
    name: wire.Id
    namespace: wire.Id | None = None

    @property
    def called(self) -> str:
        """Its name for the model."""
        return joined_name(self.namespace, self.name)


class ResponseTextFormat(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The format of the text: any, a JSON object, or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: wire.Id | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = field(default=None, name="schema")
    strict: bool | None = None


class ResponseText(Struct, forbid_unknown_fields=True):
    """Format of text."""

    format: ResponseTextFormat | None = None


class ResponseReasoning(Struct, forbid_unknown_fields=True):
    """Whether the model thinks first."""

    effort: ReasoningEffort | None = None


class ResponsesRequest(wire.BasicSampling, kw_only=True):
    """``POST /v1/responses``.

    The answer is stored unless ``store`` is false. ``previous_response_id`` names a stored answer
    whose conversation continues. ``user``, ``safety_identifier``, ``prompt_cache_key`` and
    ``metadata`` are ignored. ``logits_digest`` is that of chat completions. ``include`` with
    ``message.output_text.logprobs`` lists the tokens of the text, with ``top_logprobs`` likely
    ones."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=wire.MAX_MESSAGES)]
    model: wire.Id | None = None
    instructions: str | None = None
    max_output_tokens: wire.MaxTokens | None = None
    stop: str | wire.Stop | None = None
    ignore_eos: bool | None = None
    repetition_penalty: wire.Repetition | None = None
    chat_template_kwargs: wire.TemplateOptions | None = None
    logits_digest: bool = False
    stream: bool | None = None
    text: ResponseText | None = None
    tools: list[ResponseFunction] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[wire.Id] | None = None
    top_logprobs: wire.TopLogprobs | None = None
    service_tier: wire.Tier | None = None
    user: wire.Id | None = None
    safety_identifier: wire.Id | None = None
    prompt_cache_key: wire.Id | None = None
    metadata: dict[str, str] | None = None
