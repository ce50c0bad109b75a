"""The bodies of requests, one type for each. msgspec validates bodies by these types, and the
OpenAPI document is made from them. ``wire_fields`` handles unknown fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from contract.types import MAX_INT32
from harness.serve.errors import ApiError
from harness.serve.strict_json import BadJson, Decimals, known_type, loads, parsing, with_floats
from harness.serve.wire_fields import served_fields
from harness.serve.wire_refusals import refusal
from harness.serve.wire_tools import ReasoningEffort, ResponseFormat, ToolCall, ToolChoice, Tools

MAX_CHOICES = 128
MAX_MESSAGES = 4096
Temperature = Annotated[float, Meta(ge=0, le=100, description="0 always takes the likeliest")]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(ge=0.01, le=100, description="1 is off")]
MaxTokens = Annotated[int, Meta(ge=1, le=MAX_INT32)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT32, description="0 and -1 keep every token")]
Window = Annotated[int, Meta(ge=0, le=MAX_INT32, description="tokens the penalties look back at")]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Stop = Annotated[list[str], Meta(max_length=16)]
StopTokens = Annotated[list[Annotated[int, Meta(ge=0, le=MAX_INT32)]], Meta(max_length=64)]
ForcedTokens = Annotated[
    list[Annotated[int, Meta(ge=0, le=MAX_INT32)]],
    Meta(min_length=1, description="the whole answer, whose log-probabilities are asked for"),
]
Tier = Literal["auto", "default", "flex", "priority", "scale", "fast"]
Id = Annotated[str, Meta(max_length=512)]


MAX_SEED = 2**63 - 1
Seed = Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)]
NO_SEEDS = (None, -1)
"""The values of ``seed`` for which the server draws one: clients of llama.cpp, vLLM and ollama ask
for that with -1."""


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream: ``include_usage`` adds a last chunk with the usage;
    ``continuous_usage_stats`` adds the usage so far to every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextPart(Struct, forbid_unknown_fields=True):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class _MessageFields(
    Struct, forbid_unknown_fields=True, omit_defaults=True, tag_field="role", kw_only=True
):
    """The fields of every message."""

    content: str | list[TextPart]
    name: str | None = None


class SystemMessage(_MessageFields, tag="system"):
    """Instructions to the model."""


class DeveloperMessage(_MessageFields, tag="developer"):
    """OpenAI's newer name of a system message. Chat templates get a system message."""


class UserMessage(_MessageFields, tag="user"):
    """A message of the user."""


class AssistantMessage(_MessageFields, tag="assistant", kw_only=True):
    """An earlier answer of the model, with text, tool calls or both. ``refusal`` is read as text.
    ``annotations`` and ``audio`` are ignored. ``token_ids`` are the answer's tokens, from
    ``return_token_ids``: the prompt has these tokens if they decode to the same text."""

    content: str | list[TextPart] | None = None  # type: ignore[assignment]
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: None = None
    token_ids: list[int] | None = None


class ToolMessage(_MessageFields, tag="tool", kw_only=True):
    """The result of a tool call. Without ``tool_call_id`` it answers the first open call."""

    tool_call_id: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class TemplateOptions(Struct, forbid_unknown_fields=True):
    """Options of chat templates."""

    enable_thinking: bool | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class LoraScale(Struct, forbid_unknown_fields=True):
    """An adapter, by its number in ``GET /lora-adapters``, and its scale."""

    id: Annotated[int, Meta(ge=0, le=MAX_INT32)]
    scale: float


class BasicSampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """The sampling parameters that every API has."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    seed: Seed | None = None


class Sampling(BasicSampling, kw_only=True):
    """All sampling parameters, and stop strings."""

    min_p: Share | None = None
    repeat_last_n: Window | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: str | Stop | None = None


class GenerationRequest(Sampling, kw_only=True):
    """The fields of every request for generated text.

    ``user``, ``safety_identifier``, ``prompt_cache_key`` and ``metadata`` are ignored: the prefix
    cache compares tokens, and nothing is stored.

    ``seed``: choice i is sampled with seed + i. Without it, or with -1, the server draws one and
    names it in the answer. ``stop_token_ids``: a token that ends the text and is not part of it.
    ``min_tokens``: before that many tokens no end token is sampled, unless a format allows nothing
    else, and no stop string begins. ``ignore_eos``: end tokens do not end the text.
    ``force_tokens``: the token ids of the whole answer; nothing is sampled, and ``logprobs`` scores
    them.

    ``return_token_ids``: the answer lists the token ids of the prompt and of the text.
    ``prompt_logprobs``: log-probabilities of the prompt's tokens, and as many likely tokens at each
    position. ``logits_digest``: ``x_zinc.logits_sha256`` has a SHA-256 of each choice's logits.
    ``experts``: ``x_zinc.experts`` has the experts that each token of a mixture used. ``receipt``:
    whether the answer gets a receipt, if the server makes receipts.

    ``lora``: adapters of the answer. Without it they are the adapter that ``model`` names, or the
    server's defaults. ``id_slot``: the slot of ``/slots`` for this conversation. ``n_predict`` (-1
    for no limit) and ``repeat_penalty`` are llama.cpp's names of ``max_tokens`` and
    ``repetition_penalty``."""

    model: Id | None = None
    max_tokens: MaxTokens | None = None
    repetition_penalty: Repetition | None = None
    n: Choices | None = None
    stop_token_ids: StopTokens | None = None
    return_token_ids: bool | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 0
    n_predict: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    id_slot: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    logits_digest: bool = False
    prompt_logprobs: TopLogprobs | None = None
    force_tokens: ForcedTokens | None = None
    experts: bool | None = None
    lora: list[LoraScale] | None = None
    receipt: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: Tier | None = None
    user: Id | None = None
    safety_identifier: Id | None = None
    prompt_cache_key: Id | None = None
    metadata: dict[str, str] | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """``POST /v1/chat/completions``.

    ``enable_thinking``, here or in ``chat_template_kwargs``, and ``reasoning_effort`` switch
    thinking: efforts "none" and "minimal" switch it off. With ``continue_final_message`` the answer
    continues the last message, which must be text of the assistant. With ``add_generation_prompt``
    false the prompt ends with the last message. ``grammar`` is a grammar of the answer in GBNF."""

    messages: Messages
    grammar: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateOptions | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """``POST /v1/completions``.

    ``prompt`` is a text, a list of texts, the ids of one prompt, or a list of lists of ids. The
    text of a control token becomes that token, unless ``parse_special`` is false. With
    ``add_special_tokens`` false no BOS is put in front. With ``echo`` the text begins with the
    prompt, and ``logprobs`` include its tokens; then ``max_tokens`` may be 0. ``response_format``,
    or ``grammar`` in GBNF, constrains the text. With ``suffix`` the model fills in between prompt
    and suffix, whose texts never become control tokens."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    parse_special: bool = True
    add_special_tokens: bool = True
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    grammar: str | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None


class TemplateFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of requests that render a conversation, as in chat completions."""

    messages: Messages | None = None
    tools: Tools | None = None
    model: Id | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateOptions | None = None


class TokenizeRequest(TemplateFields, kw_only=True):
    """``POST /tokenize`` for a text, or for a conversation as the model reads it.

    The text of a control token becomes that token, unless ``parse_special`` is false; in messages
    it never does. With ``add_special_tokens`` false no BOS is put in front of a text. ``content``
    is llama.cpp's name of ``prompt``; then a BOS is added only with ``add_special``. With
    ``with_pieces`` each token is an object with its id and text."""

    prompt: str | None = None
    content: str | None = None
    parse_special: bool = True
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool = False


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: Id | None = None


class TemplateRequest(TemplateFields, kw_only=True):
    """``POST /apply-template``."""

    messages: Messages


Body = TypeVar("Body", bound=Struct)
Prepare = Callable[[dict[str, Any], list[str]], dict[str, Any]]
"""Rewrites a body to the fields of its type, and adds the names of dropped fields to the list."""
SCHEMA_FIELDS = frozenset(
    (
        *("tools", "response_format", "text", "format", "output_config", "structured_outputs"),
        *("guided_json", "json_schema"),
    )
)
"""Fields of any API that may hold JSON schemas, whose numbers are read exactly."""


def decode(
    body: bytes, kind: type[Body], ignored: list[str] | None = None, prepare: Prepare | None = None
) -> Body:
    """``body`` as ``kind``. Raises ApiError 400 for an invalid body. ``prepare`` rewrites the value
    first. Unknown fields are refused, or with the list ``ignored`` added to it if they change
    nothing."""
    with parsing(body):
        before = Decimals.latest
        try:
            value: Any = loads(body, exact=True)
        except BadJson as error:
            raise ApiError(400, f"the body {error}", code="invalid_json") from None
        rounded = Decimals.latest is before
        if isinstance(value, dict) and isinstance(kind, type):
            if not rounded:
                value = _rounded(value)
            if prepare is not None and ignored is not None:
                value = prepare(value, ignored)
            value = served_fields(value, kind, ignored)
        elif isinstance(value, list) and not rounded:
            value = with_floats(value)
        return converted(value, kind)


def _rounded(value: dict[str, Any]) -> dict[str, Any]:
    """A body with numbers as binary64, but for those of schemas."""
    return {name: one if name in SCHEMA_FIELDS else with_floats(one) for name, one in value.items()}


class _Named(Struct):
    model: str | None = None
    lora: Any = None


def model_named(body: bytes) -> tuple[str | None, bool]:
    """The model that a body names, None if it names none, and whether the body lists adapters. An
    invalid body gives neither."""
    try:
        named = msgspec.json.decode(body, type=known_type(_Named))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None, False
    return named.model, named.lora is not None


def given_fields(body: Struct, names: Iterable[str]) -> dict[str, Any]:
    """The fields of ``names`` that are not null in a body."""
    return {name: given for name in names if (given := getattr(body, name)) is not None}


def plain(value: Any) -> Any:
    """A part of a body as plain JSON types, with numbers as binary64."""
    return with_floats(msgspec.to_builtins(value, builtin_types=(Decimal,)))


def converted(value: Any, kind: type[Body]) -> Body:
    """``value``, of plain JSON types, as ``kind``. Raises ApiError 400 that names the wrong
    field."""
    try:
        return msgspec.convert(value, known_type(kind))
    except msgspec.ValidationError as error:
        raise refusal(str(error), value, kind) from None
