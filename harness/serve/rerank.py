"""``POST /v1/rerank``: how well documents answer a query, by reranker models.

A reranker (Qwen3-Reranker) is asked whether a document answers a query, and says yes or no. The
score is the probability of yes among the two, from the logits at the end of the prompt: 1 / (1 +
exp(no - yes)), computed with 50 decimal digits and rounded once to binary64. So equal logits give
equal bits."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context
from typing import Annotated

from msgspec import Meta, Struct

from contract.arrays import Floats
from contract.errors import RequestError
from contract.types import Tenant
from harness.host.submissions import Submission
from harness.serve.answers import Json
from harness.serve.caller import Caller
from harness.serve.errors import ApiError
from harness.serve.model import ServedModel
from harness.serve.readings import Reading, check_context, read_texts, rows_of
from harness.serve.route import Route
from harness.serve.service import Service
from harness.serve.wire import Id
from reference.model.tokenizer.special_tokens import Span
from reference.runner import LOGITS

MAX_DOCUMENTS = 1024
KIND = "rerank"
"""The kind of its receipts."""
TEMPLATE_KEY = "tokenizer.chat_template.rerank"
"""Metadata key of llama.cpp's files for the prompt, with {query} and {document} in it."""
NAME_KEYS = ("general.name", "general.basename", "general.base_model.0.name")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt template of Qwen3-Reranker."""
PRECISE = Context(prec=50)


class RerankDocument(Struct):
    """A document as an object. Other fields are ignored."""

    text: str


class RerankRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/rerank``. ``top_n`` lists only the best documents; ``return_documents`` false
    leaves out their texts. ``instruction`` says what the documents are for."""

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    model: Id | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    user: Id | None = None


@dataclass(slots=True)
class _Judged:
    """Keeps the logits of yes and no at the end of a prompt of ``tokens`` tokens."""

    tokens: int
    yes: int
    no: int
    logits: tuple[float, float] | None = None

    @property
    def rows_from(self) -> int:
        """The first position whose row is needed."""
        return self.tokens - 1

    def __call__(self, first: int, rows: Floats) -> None:
        self.logits = float(rows[-1, self.yes]), float(rows[-1, self.no])

    def score(self) -> float:
        """The probability of yes."""
        assert self.logits is not None
        return score_of(*self.logits)


def rerank(service: Service, body: RerankRequest, tenant: Tenant, caller: Caller) -> Json:
    """Answer a request. Raises as ``embed`` does."""
    service.check_accepting()
    model = service.model.for_request(body.model)
    yes, no = (_word(model, word) for word in ("yes", "no"))
    texts = _texts(body)
    prompts = prompts_to_rank(model, body)
    for index, prompt in enumerate(prompts):
        name = f"documents[{index}] with the query"
        check_context(model, prompt, tenant, "documents", name)

    def begin(index: int) -> tuple[Submission, Callable[[], float]]:
        judged = _Judged(len(prompts[index]), yes, no)
        return rows_of(model, prompts[index], judged, LOGITS, tenant), judged.score

    reading = Reading(service, model, KIND, body, prompts, tenant, caller)
    scores, common = read_texts(reading, begin, struct.Struct("<d").pack)
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results: list[Json] = [
        {"index": index, "relevance_score": scores[index]} for index in best[: body.top_n]
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return {"object": "list", "results": results, **common}


def _texts(body: RerankRequest) -> list[str]:
    return [one if isinstance(one, str) else one.text for one in body.documents]


def prompts_to_rank(model: ServedModel, body: RerankRequest) -> list[list[int]]:
    """The prompt of each document of a request, as token ids. Raises ApiError."""
    return [rerank_prompt(model, body.query, text, body.instruction) for text in _texts(body)]


def score_of(yes: float, no: float) -> float:
    """The probability of yes, from the logits of yes and no."""
    exponent = PRECISE.subtract(PRECISE.create_decimal(no), PRECISE.create_decimal(yes))
    return float(PRECISE.divide(1, PRECISE.add(1, PRECISE.exp(exponent))))


def rerank_prompt(
    model: ServedModel, query: str, document: str, instruction: str | None
) -> list[int]:
    """The prompt, as token ids, that asks whether a document answers a query. Only the template's
    own text becomes control tokens. Raises ApiError for a model that is no reranker."""
    metadata = model.model.file.metadata
    template = metadata.get(TEMPLATE_KEY)
    if isinstance(template, bytes):
        template = template.decode(errors="replace")
    names = " ".join(_name(metadata.get(key)) for key in NAME_KEYS).lower()
    if not isinstance(template, str) and "rerank" not in names:
        raise ApiError(
            400, f"{model.name} ranks no documents: it is no reranker", code="no_reranker"
        )
    if not isinstance(template, str):
        template = TEMPLATE
    elif instruction is not None and "{instruction}" not in template:
        template = template.replace(INSTRUCTION, "{instruction}", 1)
    values = {"query": query, "document": document, "instruction": instruction or INSTRUCTION}
    text, spans = _filled(template, values)
    model.check_length(text)
    return model.tokenizer.encode_spans(text, spans)


def _filled(template: str, values: dict[str, str]) -> tuple[str, list[Span]]:
    """The template with ``{name}`` replaced by values, and the spans of text that are the
    template's own."""
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    rest = template
    while rest:
        found = min(
            ((at, name) for name in values if (at := rest.find(f"{{{name}}}")) >= 0),
            default=(len(rest), None),
        )
        at, name = found
        if at:
            spans.append((length, length + at))
        piece = rest[:at] + ("" if name is None else values[name])
        pieces.append(piece)
        length += len(piece)
        rest = "" if name is None else rest[at + len(name) + 2 :]
    return "".join(pieces), spans


def _name(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _word(model: ServedModel, word: str) -> int:
    """The single token of a word. Raises RequestError."""
    ids = model.tokenizer.encode(word, add_bos=False)
    if len(ids) != 1:
        raise RequestError("model", f"{model.name} has no token that is {word!r}")
    return ids[0]


RERANK_ROUTES = (
    Route(
        "POST", "/v1/rerank", rerank, "How well documents answer a query.",
        RerankRequest, generates=True,
    ),
)  # fmt: skip
