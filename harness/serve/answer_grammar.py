"""Grammars that requests put on their answers, and the token masks that enforce them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contract.types import Request
from harness.host.dialect.calls import ANY_OBJECT, json_rule
from harness.host.structured.gbnf import gbnf_rules
from harness.host.structured.grammars import (
    GrammarBroke,
    GrammarRefused,
    Grammars,
    TokenMasks,
    regex_rule,
)
from harness.host.structured.schema_tree import SchemaRefused
from harness.serve.errors import ApiError, invalid_value
from harness.serve.wire import ChatRequest, CompletionRequest
from harness.serve.wire_tools import (
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    TextFormat,
)

FORMAT, GRAMMAR = "response_format", "grammar"
"""Request fields that constrain the answer."""


class Constrained(Protocol):
    """A grammar in llguidance's Lark dialect, and the request field that it comes from."""

    @property
    def grammar(self) -> str | None:
        """The whole grammar; None for any text."""

    @property
    def grammar_param(self) -> str:
        """The field."""


@dataclass(frozen=True, slots=True)
class TextPlan:
    """The grammar of a completion's text."""

    grammar: str | None
    grammar_param: str = GRAMMAR

    @classmethod
    def of(cls, body: CompletionRequest) -> TextPlan:
        """The plan for a ``response_format``, or for a ``grammar`` in GBNF. Raises ApiError."""
        rule = format_rule(body.response_format)
        if body.grammar is None:
            return cls(None if rule is None else f"start: {rule}", FORMAT)
        if rule is not None:
            raise contradiction()
        return cls(f"start: body\n{gbnf_body(body.grammar)}")


def masks_of(
    plan: Constrained, grammars: Grammars, requests: Sequence[Request]
) -> dict[int, TokenMasks]:
    """The token masks of each request, by id; empty without a grammar. The first mask is computed
    here, so that a bad grammar is refused at once. Raises ApiError and GrammarsBusy."""
    if plan.grammar is None:
        return {}
    param = plan.grammar_param
    if any(request.ignore_end for request in requests):
        raise invalid_value(param, f"{param} and ignore_eos contradict each other")
    try:
        masks = grammars.masks(plan.grammar, len(requests))
        for one in masks:
            one([])
    except (GrammarRefused, GrammarBroke) as refused:
        raise grammar_error(param, str(refused)) from None
    return dict(zip((request.id for request in requests), masks, strict=True))


def grammar_error(param: str, problem: str) -> ApiError:
    """The refusal of a request whose grammar cannot be enforced."""
    return ApiError(400, f"{param} {problem}", param=param, code="unsupported_schema", retry=False)


def answer_rule(body: ChatRequest) -> str | None:
    """The rule of an answer in Lark, from a format or a grammar; None for any text. Raises
    ApiError."""
    answer = format_rule(body.response_format)
    if body.grammar is None:
        return answer
    if answer is not None:
        raise contradiction()
    return "gbnf\n" + gbnf_body(body.grammar).replace("body: ", "gbnf: ", 1)


def contradiction() -> ApiError:
    """The error for a request with both a grammar and a response format."""
    return invalid_value(FORMAT, f"{FORMAT} and {GRAMMAR} contradict each other")


def gbnf_body(gbnf: str) -> str:
    """The rules of a grammar in GBNF, the first one ``body``. Raises ApiError."""
    try:
        return gbnf_rules(gbnf)
    except GrammarRefused as refused:
        raise grammar_error(GRAMMAR, str(refused)) from None


def format_rule(requested: ResponseFormat | None) -> str | None:
    """The rule of an answer's format in Lark; None for any text. Raises ApiError."""
    match requested:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return json_rule(ANY_OBJECT)
        case JsonSchemaFormat(json_schema=named):
            field = "response_format.json_schema.schema"
            schema = named.schema_
            if schema is None:
                raise invalid_value(field, f"{field} is missing")
            return enforced(field, lambda: json_rule(schema), param="response_format")
        case RegexFormat(regex=regex):
            try:
                return regex_rule(regex)
            except GrammarRefused as refused:
                raise grammar_error("response_format", str(refused)) from None


def enforced(field: str, rules: Callable[[], str], param: str | None = None) -> str:
    """The grammar that ``rules`` makes from the schema in ``field``. Raises ApiError if the schema
    cannot be enforced."""
    try:
        return rules()
    except SchemaRefused as refused:
        raise ApiError(
            400,
            f"{field}: {refused}; it would have to be ignored, so the request is refused",
            param=param or field,
            code="unsupported_schema",
        ) from None
