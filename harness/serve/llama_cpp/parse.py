"""Translates requests of llama.cpp's routes to text completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.serve.answers import Json
from harness.serve.errors import invalid_value, renaming, unsupported
from harness.serve.infill_prompt import infill_prompt
from harness.serve.llama_cpp.wire import InfillRequest, LlamaCompletionRequest
from harness.serve.model import ServedModel
from harness.serve.wire import CompletionRequest, GenerationRequest, converted, given_fields

SAME = frozenset((*GenerationRequest.__struct_fields__, "grammar")) - {
    "logit_bias",
    "repeat_last_n",
    "seed",
}
DRAWN_SEED = 2**32 - 1
"""With this seed llama.cpp's clients ask for a random one."""
FORBIDDEN = -100.0
"""The lowest bias."""
client_name = renaming(
    {
        "logprobs": "n_probs",
        "response_format": "json_schema",
        "max_tokens": "n_predict",
        "suffix": "input_suffix",
    }
)
"""This API's names of fields of completions."""


def completion_of(model: ServedModel, body: LlamaCompletionRequest) -> CompletionRequest:
    """The completion for a request. Raises ApiError."""
    prompt = body.prompt if isinstance(body.prompt, str) else _prompt_ids(model, body.prompt)
    return _completion(model, body, prompt)


def infill_of(model: ServedModel, body: InfillRequest) -> CompletionRequest:
    """The completion for a fill-in-the-middle request. Raises ApiError."""
    prefix, extra = body.input_prefix + body.prompt, body.input_extra or ()
    return _completion(model, body, infill_prompt(model, prefix, body.input_suffix, extra))


def _completion(
    model: ServedModel, body: LlamaCompletionRequest | InfillRequest, prompt: str | list[int]
) -> CompletionRequest:
    if body.n not in (None, 1):
        raise unsupported("n", "n is 1 here")
    fields: Json = given_fields(body, SAME)
    if body.max_tokens is None and body.n_predict is None:
        fields["n_predict"] = -1
    if body.stream:
        fields["stream_options"] = {"include_usage": True}
    if body.seed is not None and 0 <= body.seed != DRAWN_SEED:
        fields["seed"] = body.seed
    if body.repeat_last_n is not None and body.repeat_last_n >= 0:
        fields["repeat_last_n"] = body.repeat_last_n
    if body.lora is not None:
        fields["lora"] = [{"id": one.id, "scale": one.scale} for one in body.lora]
    if body.n_probs:
        fields["logprobs"] = body.n_probs
    if body.logit_bias:
        fields["logit_bias"] = dict(_biases(model, body.logit_bias))
    if body.json_schema is not None:
        schema = {"name": "json_schema", "schema": body.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return converted(fields | {"prompt": prompt}, CompletionRequest)


def _prompt_ids(model: ServedModel, parts: Sequence[str | int | list[int]]) -> list[int]:
    """The token ids of one prompt that is a list: of ids, of texts and ids, or of one prompt."""
    if len(parts) == 1 and isinstance(parts[0], list):
        return parts[0]
    several = all(isinstance(part, str) for part in parts) and len(parts) > 1
    if several or any(isinstance(part, list) for part in parts):
        raise unsupported("prompt", "one prompt a request here; /v1/completions takes several")
    ids: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            ids += model.encode(part, add_special_tokens=number == 0)
        elif isinstance(part, int):
            ids.append(part)
    return ids


def _biases(
    model: ServedModel, biases: dict[str, float] | list[tuple[int | str, float | bool]]
) -> Iterator[tuple[str, float]]:
    """The bias of every token."""
    for token, value in biases.items() if isinstance(biases, dict) else biases:
        if value is True:
            raise invalid_value("logit_bias", "a bias is a number, or false")
        bias = FORBIDDEN if value is False else value
        if isinstance(token, int) or token.isdecimal():
            yield str(token), bias
        else:
            for one in model.encode(token, add_special_tokens=False):
                yield str(one), bias
