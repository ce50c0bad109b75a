"""The types of the routes' answers, for the OpenAPI document, by the name of the route.

Answers are built as plain objects; that they are of these types is tested by asking for them. They
may have more fields than are named here."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from harness.serve import dialect_schemas
from harness.serve.reading_schemas import Embeddings, Health, Reranked, Scores, Status, Version
from harness.serve.responses.wire import Response, ResponseDeleted, ResponseItems, ResponseTokens


class PromptDetails(Struct):
    """Counts of the prompt's tokens. A request need not ask for caching: computed prompts are found
    again as long as there is room."""

    cached_tokens: int
    cache_write_tokens: int


class Usage(Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: dict[str, int]


class TokenDifference(Struct):
    """The first token by which a prompt differs from a cached one: its position in the prompt, and
    the texts of the token that is cached there and of the prompt's."""

    position: int
    cached: str
    new: str


class CachedPrompt(Struct):
    """Prompt tokens that came from the cache, those of them that were only on disk, if any, and
    where a cached prompt went on otherwise."""

    tokens: int
    from_disk: int | UnsetType = UNSET
    first_difference: TokenDifference | UnsetType = UNSET


class Provenance(Struct):
    """What is needed to reproduce an answer, and its tenant and tier; ``cached`` counts the prompt
    tokens that were not computed again, ``trace`` is the file in the folder of ``--record`` that
    holds it, ``ignored`` are fields of the request that changed nothing, and ``sampling_defaults``
    are in force for what the request left out. ``tools`` is "described" if the server describes the
    tools to the model, because its template has no syntax of calls that is known."""

    seed: int
    tenant: str
    tier: str
    preemptions: int
    cached: CachedPrompt
    sampling_defaults: dict[str, float]
    trace: str | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    tools: str | UnsetType = UNSET


class Called(Struct):
    """A function and its arguments, the text of a JSON object."""

    name: str
    arguments: str


class MadeCall(Struct):
    """A tool call that the model made."""

    id: str
    type: Literal["function"]
    function: Called


class ChatMessage(Struct):
    """The model's message; reasoning and tool calls are present only if the model wrote some."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET


class TokenLogprob(Struct):
    """A token and the logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ListedToken(TokenLogprob):
    """A token, with the likeliest tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    """Every token of a message."""

    content: list[ListedToken]
    refusal: None


class ChatChoice(Struct):
    """One of the ``n`` requested messages."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class Answered(Struct, kw_only=True):
    """The fields of every answer with generated text."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str
    usage: Usage
    x_zinc: Provenance


class ChatCompletion(Answered, kw_only=True):
    """``POST /v1/chat/completions``, not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class PromptLogprob(Struct):
    """A token at a position of a prompt; its rank is null where it is not among the likeliest that
    are listed."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionLogprobs(Struct):
    """Every token of a text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct):
    """One of the ``n`` requested texts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class Completion(Answered, kw_only=True):
    """``POST /v1/completions``, not streamed."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ModelCard(Struct):
    """A model that the server has; with its context, in tokens, where it is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    x_zinc: dict[str, Any]
    max_model_len: int | UnsetType = UNSET


class ModelList(Struct):
    """The models that the server has."""

    object: Literal["list"]
    data: list[ModelCard]


class PullState(Struct):
    """Progress of a pull, in bytes."""

    model: str
    status: str
    completed: int
    total: int | None


class ModelDeleted(Struct):
    """A model that is gone."""

    id: str
    object: Literal["model"]
    deleted: bool


class TenantFacts(Struct):
    """A tenant, with how many keys it has."""

    id: int
    name: str
    qos: str
    keys: int
    models: list[str]
    operator: bool
    admin: bool


class TenantList(Struct):
    """All tenants."""

    object: Literal["list"]
    data: list[TenantFacts]


class TenantKey(Struct):
    """A tenant and its new key, which is shown this once."""

    tenant: TenantFacts
    key: str


class TenantDeleted(Struct):
    """A tenant that is gone."""

    id: int
    name: str
    deleted: bool


class TokenPiece(Struct):
    """A token and its text, or the bytes of one that is no text."""

    id: int
    piece: str | list[int]


class Tokens(Struct):
    """Ids of a text's tokens."""

    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class TokenizerInfo(Struct):
    """A tokenizer, by the names ``transformers`` has for its facts."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    add_bos_token: bool
    chat_template: str | None
    end_token_ids: list[int]
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class Prompt(Struct):
    """A text."""

    prompt: str
    content: str | UnsetType = UNSET


class TenantUsage(Struct):
    """The counts of a tenant's requests and tokens."""

    tenant: dict[str, Any]
    total: dict[str, int]
    days: dict[str, dict[str, int]]
    since_start: dict[str, Any]
    now: dict[str, Any]


ANSWERS: dict[str, type[Struct]] = {
    "chat": ChatCompletion,
    "complete": Completion,
    "models": ModelList,
    "one_model": ModelCard,
    "tokenize": Tokens,
    "tokenizer_info": TokenizerInfo,
    "detokenize": Prompt,
    "apply_template": Prompt,
    "usage": TenantUsage,
    "embed": Embeddings,
    "infill": dialect_schemas.LlamaCompletion,
    "continue_text": dialect_schemas.LlamaCompletion,
    "props": dialect_schemas.LlamaProps,
    "change_slot": dialect_schemas.LlamaSlot,
    "rerank": Reranked,
    "score": Scores,
    "respond": Response,
    "response": Response,
    "count_response": ResponseTokens,
    "remove_response": ResponseDeleted,
    "cancel_response": Response,
    "response_items": ResponseItems,
    "ollama_chat": dialect_schemas.OllamaAnswered,
    "ollama_generate": dialect_schemas.OllamaAnswered,
    "ollama_embed": dialect_schemas.OllamaVectors,
    "ollama_embed_one": dialect_schemas.OllamaVector,
    "ollama_show": dialect_schemas.OllamaShown,
    "ollama_tags": dialect_schemas.OllamaModels,
    "ollama_ps": dialect_schemas.OllamaModels,
    "ollama_version": dialect_schemas.OllamaVersion,
    "ollama_pull": Status,
    "message": dialect_schemas.AnthropicMessage,
    "count_message": dialect_schemas.InputTokens,
    "pull_model": PullState,
    "activate_model": ModelCard,
    "remove_model": ModelDeleted,
    "remove_named_model": ModelDeleted,
    "tenants": TenantList,
    "tenant": TenantFacts,
    "add_tenant": TenantKey,
    "rotate_key": TenantKey,
    "remove_tenant": TenantDeleted,
    "health": Health,
    "ready": Status,
    "version": Version,
}
STREAMED = frozenset(
    (
        *("chat", "complete", "infill", "continue_text", "respond", "message", "pull_model"),
        *("ollama_chat", "ollama_generate", "ollama_pull"),
    )
)
"""Routes that answer with events when asked to."""
NAMED_EVENTS = frozenset({"respond", "message"})
"""Those of them whose events have names."""
