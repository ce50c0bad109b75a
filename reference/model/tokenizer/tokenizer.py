"""The tokenizer of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from contract.errors import RequestError
from reference.model.tokenizer.encoders import TextEncoder
from reference.model.tokenizer.special_tokens import Fragment, Span, partition
from reference.model.tokenizer.vocabulary import InfillIds, TokenKind, Vocabulary


class Tokenizer:
    """Encodes text to token ids and decodes ids to bytes.

    Opening is cheap; the first ``encode`` builds the tables that encoding needs."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: TextEncoder,
        *,
        add_bos: bool,
        add_space_prefix: bool,
        suppress_tokens: Sequence[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._add_space_prefix = add_space_prefix
        self._bytes: dict[tuple[int, bool], bytes] = {}
        self.add_bos = add_bos
        """Whether a prompt starts with ``bos_id`` unless the caller says otherwise."""
        self.suppress_tokens: tuple[int, ...] = tuple(suppress_tokens)
        """Ids that must not be sampled, according to the file."""

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.named_ids.get("bos")

    @property
    def eos_id(self) -> int | None:
        return self._vocabulary.named_ids.get("eos")

    @property
    def named_ids(self) -> dict[str, int]:
        """The ids of tokens with a part of their own, by the names templates have for them."""
        names = {"padding": "pad", "unknown": "unk", "seperator": "sep", "separator": "sep"}
        return {names.get(name, name): id_ for name, id_ in self._vocabulary.named_ids.items()}

    @property
    def infill_ids(self) -> InfillIds | None:
        """The tokens around texts between which a text is written; None if there are none."""
        return self._vocabulary.infill_ids

    @property
    def eog_ids(self) -> frozenset[int]:
        """The ids that end a generation."""
        return self._vocabulary.end_ids

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest stored text, the most bytes one token can add."""
        return int(self._vocabulary.texts.lengths.max())

    def kind(self, token: int) -> TokenKind:
        """The kind of an id; raises RequestError when there is no such id."""
        self._vocabulary.text(token)
        return self._vocabulary.kind(token)

    def encode_exactly(self, text: str) -> list[int]:
        """Ids of tokens that spell ``text`` as it is: not normalized, and without BOS.

        For text a grammar demands. A byte that no token stands for is missing."""
        return self._ids(text, [], lambda part: part)

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool | None = None
    ) -> list[int]:
        """Token ids of ``text``.

        User-defined tokens are always recognized in the text, control tokens only with
        ``parse_special``; leave it off for text from strangers. ``add_bos`` None means the model's
        own rule. BOS is not added to a text that already starts with BOS. Raises RequestError for
        text that is not valid Unicode."""
        spans = [(0, len(text))] if parse_special and text else []
        return self.encode_spans(text, spans, add_bos=add_bos)

    def encode_spans(
        self, text: str, control_spans: Sequence[Span], *, add_bos: bool | None = None
    ) -> list[int]:
        """Token ids of ``text``; control tokens are recognized only inside the given character
        spans.

        Spans are sorted, disjoint and not touching. The text between two special tokens is encoded
        as one text, even across span boundaries, in the form the family's tokenizer gives it."""
        ids = self._ids(text, control_spans, self._encoder.normalized)
        wants_bos = self.add_bos if add_bos is None else add_bos
        if wants_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def special_tokens(self, text: str, control_spans: Sequence[Span]) -> list[Fragment]:
        """The special tokens in ``text`` and the ordinary text between them, as ``encode_spans``
        divides it."""
        return partition(text, self._specials, control_spans)

    def _ids(
        self, text: str, control_spans: Sequence[Span], normalized: Callable[[str], str]
    ) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"character {error.start} is half of a surrogate pair"
            raise RequestError("text", problem) from None
        ids: list[int] = []
        after_special = True
        for start, end, token in self.special_tokens(text, control_spans):
            if token is not None:
                ids.append(token)
            else:
                prefix = " " if self._add_space_prefix and after_special else ""
                ids.extend(self._encoder.encode(prefix + normalized(text[start:end])))
            after_special = token is not None
        return ids

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes an id adds to the text; control and unused ids add none.

        ``special`` gives control and unknown tokens their own text. Raises RequestError when there
        is no such id."""
        known = self._bytes.get((token, special))
        if known is None:
            known = self._bytes[token, special] = self._bytes_of(token, special)
        return known

    def _bytes_of(self, token: int, special: bool) -> bytes:
        stored = self._vocabulary.text(token)
        match self._vocabulary.kind(token):
            case TokenKind.NORMAL:
                return self._encoder.decode_normal(stored)
            case TokenKind.BYTE:
                return _byte_of(stored)
            case TokenKind.USER_DEFINED:
                return stored
            case TokenKind.CONTROL | TokenKind.UNKNOWN:
                return stored if special else b""
        return b""

    def hidden_text(self, token: int) -> str:
        """The text of a control token, which adds none to a text but which a stop string may name;
        empty for any other token."""
        if self.token_bytes(token):
            return ""
        return self.token_bytes(token, special=True).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """The bytes of a whole text, which need not be UTF-8.

        It removes the space that ``encode`` adds at the start for vocabularies that want one."""
        decoded = b"".join(self.token_bytes(token, special=special) for token in ids)
        return decoded.removeprefix(b" ") if self._add_space_prefix else decoded

    def token_text(self, token: int) -> str:
        """The text of an id for people, special ones included; U+FFFD where it is not UTF-8."""
        return self.token_bytes(token, special=True).decode(errors="replace")

    @cached_property
    def _specials(self) -> list[tuple[str, int, bool]]:
        """(text, id, is control), longest text in bytes first."""
        vocabulary = self._vocabulary
        found = []
        for token in vocabulary.ids_of_kind(
            TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED
        ).tolist():
            stored = vocabulary.text(token)
            try:
                text = stored.decode()
            except UnicodeDecodeError:
                continue
            if text:
                is_control = vocabulary.kind(token) is not TokenKind.USER_DEFINED
                found.append((-len(stored), token, text, is_control))
        found.sort()
        return [(text, token, is_control) for _, token, text, is_control in found]


def _byte_of(stored: bytes) -> bytes:
    """The byte of a token written ``<0xHH>``; any other byte token means its text."""
    if len(stored) == 6 and stored.startswith(b"<0x") and stored.endswith(b">"):
        try:
            return bytes.fromhex(stored[3:5].decode("ascii"))
        except ValueError:
            return stored
    return stored
