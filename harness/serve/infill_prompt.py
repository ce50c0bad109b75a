"""Prompts after which a model writes the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from harness.serve.errors import unsupported
from harness.serve.model import ServedModel


class ExtraFile(Struct):
    """Another file that the model may read first."""

    text: str
    filename: str | None = None


def infill_prompt(
    model: ServedModel, prefix: str, suffix: str, extra: Sequence[ExtraFile] = ()
) -> list[int]:
    """The token ids of a fill-in-the-middle prompt; ``extra`` are other files the model reads
    first. Raises ApiError for a model without tokens for it."""
    tokens = model.tokenizer.infill_ids
    if tokens is None:
        raise unsupported(
            "suffix", f"{model.name} has no tokens for text between a prefix and a suffix"
        )
    before: list[int] = []
    if extra:
        file = tokens.file
        if file is None:
            raise unsupported("input_extra", f"{model.name} has no tokens for other files")
        for one in extra:
            before += [file, *_text(model, f"{one.filename or 'file'}\n{one.text}")]
        before += [file, *_text(model, "filename\n")]
    start = [model.tokenizer.bos_id] if model.tokenizer.add_bos else []
    bos = [token for token in start if token is not None]
    parts = (tokens.prefix, _text(model, prefix)), (tokens.suffix, _text(model, suffix))
    ids = [token for mark, text in parts for token in (mark, *text)]
    return [*bos, *before, *ids, tokens.middle]


def _text(model: ServedModel, text: str) -> list[int]:
    return model.encode(text, add_special_tokens=False)
