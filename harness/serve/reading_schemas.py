"""The types of answers for the OpenAPI document: embeddings, scores, reranking, and the server's
state."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class Embedding(Struct):
    """The vector of a text: numbers, or base64 of binary32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class ScoredToken(Struct):
    """One of the likeliest tokens at a position."""

    id: int
    logprob: float


class TextScore(Struct):
    """Log-probabilities of the tokens of a text; null before the first scored token."""

    object: Literal["score"]
    index: int
    tokens: list[int]
    logprobs: list[float | None]
    ranks: list[int | None]
    top_logprobs: list[list[ScoredToken] | None]
    sum: float


class ReadTexts(Struct):
    """The fields of every answer about texts that are only read."""

    object: Literal["list"]
    model: str
    system_fingerprint: str
    usage: dict[str, int]
    x_zinc: dict[str, Any]


class Scores(ReadTexts):
    """``POST /v1/score``."""

    data: list[TextScore]


class Embeddings(ReadTexts):
    """``POST /v1/embeddings``."""

    data: list[Embedding]


class Ranked(Struct):
    """A document by its index, and how well it answers the query, 0 to 1."""

    index: int
    relevance_score: float
    document: dict[str, str] | UnsetType = UNSET


class Reranked(ReadTexts):
    """``POST /v1/rerank``: the best documents first."""

    results: list[Ranked]


class Status(Struct):
    """The state of a server."""

    status: str


class Health(Status, omit_defaults=True):
    """State of a server and its model. A server with API keys gives only the status."""

    model: str = ""
    active: int = 0
    queued: int = 0
    context: dict[str, int] = {}
    memory: dict[str, int] = {}
    disk_cache: dict[str, int | str] = {}


class Version(Struct):
    """The version of the server and the function that its model computes."""

    version: str
    fingerprint: str
