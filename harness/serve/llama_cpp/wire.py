"""The request bodies of llama.cpp's own routes."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from contract.types import MAX_INT32
from harness.serve.infill_prompt import ExtraFile
from harness.serve.wire import GenerationRequest, Id, TopLogprobs

MAX_EXTRA = 64
Biases = dict[str, float] | list[tuple[int | str, float | bool]]


class _SampledText(GenerationRequest, kw_only=True):
    """The fields of both requests. ``n_probs``: log-probabilities of every token, and of that many
    likely ones. ``return_tokens``: the token ids. ``logit_bias``: of a token, or of every token of
    a text; false forbids it. A negative ``seed`` draws one. ``repeat_last_n`` -1 is the longest
    window. ``response_fields``: paths such as ``timings/prompt_n``; an answer, or the last object
    of a stream, has only these."""

    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    n_probs: TopLogprobs = 0
    return_tokens: bool = False
    logit_bias: Biases | None = None  # type: ignore[assignment]
    response_fields: Annotated[list[str], Meta(max_length=MAX_EXTRA)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None


class LlamaCompletionRequest(_SampledText, kw_only=True):
    """``POST /completion``. ``prompt`` is a text, token ids, or a list of both. Without
    ``n_predict`` the answer ends with an end token or at the end of the context."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]


class SlotFile(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /slots/ID?action=save``, ``restore`` or ``erase``. ``filename`` is the file to save or
    restore in the server's folder for slots."""

    filename: str | None = None
    model: Id | None = None


class InfillRequest(_SampledText, kw_only=True):
    """``POST /infill``: the text between ``input_prefix`` + ``prompt`` and ``input_suffix``. These
    texts never become control tokens. ``input_extra`` are other files, for models with tokens for
    them."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_EXTRA)] | None = None
