"""The types of the answers of other providers' routes, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class AnthropicMessage(Struct):
    """``POST /v1/messages``, not streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, int]
    system_fingerprint: str
    x_zinc: dict[str, Any]


class InputTokens(Struct):
    """``POST /v1/messages/count_tokens``."""

    input_tokens: int


class OllamaAnswered(Struct, kw_only=True):
    """``POST /api/chat`` and ``POST /api/generate``, not streamed."""

    model: str
    created_at: str
    done: bool
    done_reason: str
    message: dict[str, Any] | UnsetType = UNSET
    response: str | UnsetType = UNSET
    logprobs: list[dict[str, Any]] | UnsetType = UNSET


class OllamaVectors(Struct):
    """``POST /api/embed``."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class OllamaVector(Struct):
    """``POST /api/embeddings``."""

    embedding: list[float]


class OllamaModels(Struct):
    """``GET /api/tags`` and ``GET /api/ps``."""

    models: list[dict[str, Any]]


class OllamaShown(Struct):
    """``POST /api/show``."""

    template: str
    parameters: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(Struct):
    """``GET /api/version``."""

    version: str


class LlamaCompletion(Struct):
    """``POST /completion`` and ``POST /infill``, not streamed."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    model: str
    prompt: str
    has_new_line: bool
    truncated: bool
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: dict[str, Any]
    timings: dict[str, float]
    system_fingerprint: str
    x_zinc: dict[str, Any]
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET


class LlamaSlot(Struct):
    """``POST /slots/ID``, with the tokens and bytes that were saved or restored, or erased."""

    id_slot: int
    filename: str | UnsetType = UNSET
    n_saved: int | UnsetType = UNSET
    n_written: int | UnsetType = UNSET
    n_restored: int | UnsetType = UNSET
    n_read: int | UnsetType = UNSET
    n_erased: int | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET


class LlamaProps(Struct):
    """``GET /props``."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
