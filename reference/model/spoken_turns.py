"""Token ids of a conversation in which earlier answers keep the tokens that the model generated.

A text can be tokenized in many ways, and a model need not generate the tokens that encoding gives.
If a request names the tokens of an earlier answer, and they spell what the template rendered for
it, the prompt has these tokens, so it matches cached pages. The text of the prompt is the same
either way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reference.model.chat_template import RenderedChat, encode_rendered
from reference.model.tokenizer import Tokenizer, TokenKind
from reference.model.tokenizer.special_tokens import Span

SPECIAL = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)


def encode_spoken(
    tokenizer: Tokenizer, rendered: RenderedChat, spoken: Sequence[Sequence[int]]
) -> list[int]:
    """Token ids of a rendered prompt. ``spoken`` are the tokens of earlier answers, in order; each
    is used if it spells a turn of the model.

    A control token of an answer is used only where the template itself wrote it. Raises
    RequestError for an id outside the vocabulary."""
    if not rendered.opening or not spoken:
        return encode_rendered(tokenizer, rendered)
    specials = [
        (start, end, token)
        for start, end, token in tokenizer.special_tokens(rendered.text, rendered.template_spans)
        if token is not None
    ]
    ids: list[int] = []
    done = 0
    for answer in spoken:
        # The template writes the token that ends an answer.
        turn = answer[:-1] if answer and answer[-1] in tokenizer.eog_ids else answer
        found = _turn(tokenizer, rendered, specials, turn, done)
        if found is not None:
            start, end = found
            ids += _part(tokenizer, rendered, done, start)
            ids += turn
            done = end
    return ids + _part(tokenizer, rendered, done, len(rendered.text))


def _turn(
    tokenizer: Tokenizer,
    rendered: RenderedChat,
    specials: Sequence[tuple[int, int, int]],
    turn: Sequence[int],
    first: int,
) -> Span | None:
    """The range of the text, from ``first`` on, that the tokens of a turn spell; None if there is
    none."""
    spelled = _spelled(tokenizer, turn)
    if spelled is None:
        return None
    text, own = spelled
    opening, whole = rendered.opening, rendered.text
    at = whole.find(opening + text, first)
    while at >= 0:
        start = at + len(opening)
        end = start + len(text)
        by_template = any(a <= at and start <= b for a, b in rendered.template_spans)
        inside = [(a - start, b - start, token) for a, b, token in specials if start <= a < end]
        ends = end == len(whole) or any(end in (a, b) for a, b, _ in specials)
        if by_template and ends and inside == own:
            return start, end
        at = whole.find(opening + text, at + 1)
    return None


def _spelled(
    tokenizer: Tokenizer, turn: Sequence[int]
) -> tuple[str, list[tuple[int, int, int]]] | None:
    """The text of tokens, and its special tokens with their offsets; None if the tokens spell no
    valid text."""
    pieces: list[bytes] = []
    specials = []
    try:
        for token in turn:
            piece = tokenizer.token_bytes(token, special=True)
            if tokenizer.kind(token) in SPECIAL:
                start = len(b"".join(pieces).decode())
                specials.append((start, start + len(piece.decode()), token))
            pieces.append(piece)
        text = b"".join(pieces).decode()
    except UnicodeDecodeError:
        return None
    return (text, specials) if text else None


def _part(tokenizer: Tokenizer, rendered: RenderedChat, start: int, end: int) -> list[int]:
    """Token ids of the text from ``start`` to ``end``, which are boundaries of turns."""
    spans = list(_clipped(rendered.template_spans, start, end))
    add_bos = None if start == 0 else False
    return tokenizer.encode_spans(rendered.text[start:end], spans, add_bos=add_bos)


def _clipped(spans: Sequence[Span], start: int, end: int) -> Iterator[Span]:
    for first, last in spans:
        if first < end and last > start:
            yield max(first, start) - start, min(last, end) - start
