"""Pre-tokenizers split text into the pieces inside which byte-level BPE merges.

Names are those of ``tokenizer.ggml.pre``. Apostrophe suffixes match without regard to ASCII case
only, as in llama.cpp; categories and white space are Unicode's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from contract.lazy_dataclass import dataclass

if TYPE_CHECKING:
    import regex

    Pattern: TypeAlias = re.Pattern[str] | regex.Pattern[str]

_ASCII_MEMBERS = {
    "L": "a-zA-Z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "P": r"!-#%-*,-/:;?@\[-\]_{}",
    "S": r"$+<=>\^`|~", "Han": "\u3007", "M": "\u0300",
}  # fmt: skip
"""Of the categories in the patterns, those that have ASCII characters; of one that has none a
character of it, since a class must have one."""

_SUFFIX_ANY_CASE = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_QWEN2 = (
    rf"{_SUFFIX_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN35 = (
    rf"{_SUFFIX_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _letters_by_case(suffix: str = "", unless: str = "") -> str:
    """Words of upper and then lower case letters, with one other character before them; ``unless``
    looks ahead for letters that are not of them."""
    before = r"[^\r\n\p{L}\p{N}]?"
    classes = (f"[{letters}]" for letters in (_UPPER, _LOWER))
    upper, lower = (f"(?:{unless}{one})" if unless else one for one in classes)
    return f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"


_AFTER_WORDS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_letters_by_case()}|\p{{N}}|{_AFTER_WORDS}"
_GPT4O = rf"{_letters_by_case(f'(?:{_SUFFIX_ANY_CASE})?')}|\p{{N}}{{1,3}}|{_AFTER_WORDS}"
_NO_HAN = r"(?!\p{Han})"
_KIMI = (
    rf"\p{{Han}}+|{_letters_by_case(f'(?:{_SUFFIX_ANY_CASE})?', _NO_HAN)}|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_LATER_CASED = (
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab6d"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U0001df96"
)
"""Letters with case that DeepSeek's first tokenizer does not count as such."""
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?(?:(?![{_LATER_CASED}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}\u0295])+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u0800-\u9fa5\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[\u0800-\u9fa5\uac00-\ud7ff]+",
    r"\p{N}",
)
_LLAMA3 = (
    rf"{_SUFFIX_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)


_HUNYUAN = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_AFMOE = (
    r"\p{N}+",
    # Threes from the right: the first group of a number has what is left of it.
    r"^\p{N}{1,2}(?=(?:\p{N}{3})*$)|\p{N}{3}",
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _HUNYUAN[2],
)
_EXAONE_MOE = (
    rf"{_SUFFIX_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}(?: ?\p{{L}}|\p{{M}})*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""Words that spaces part are one piece."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A sequence of splitting passes, and two settings of the models that use it.

    Every pass splits each piece of the previous pass at the matches of its pattern; text between
    two matches is a piece as well, so no character is lost."""

    passes: tuple[str, ...]
    whole_piece_first: bool = False
    """A piece that is itself a token is emitted without merging."""
    add_bos: bool = False
    """Whether a prompt starts with BOS when the file does not say."""
    nfc: bool = False
    """Whether the family's tokenizer normalizes text to Unicode form NFC before splitting it."""

    def normalized(self, text: str) -> str:
        """``text`` in the form that the family's tokenizer splits."""
        if not self.nfc or text.isascii():
            return text
        import unicodedata

        return unicodedata.normalize("NFC", text)

    def split(self, text: str) -> list[str]:
        """The pieces of ``text``, in order; their concatenation is ``text``."""
        pieces = [text]
        for pattern in self.passes:
            compiled = _compiled(pattern, text.isascii())
            pieces = [part for piece in pieces for part in _split(compiled, piece)]
        return pieces


def _split(pattern: Pattern, text: str) -> Iterable[str]:
    matches = pattern.findall(text)
    if sum(map(len, matches)) == len(text):
        return matches
    return _split_with_gaps(pattern, text) if matches else (text,)


def _split_with_gaps(pattern: Pattern, text: str) -> Iterator[str]:
    end = 0
    for match in pattern.finditer(text):
        if match.start() > end:
            yield text[end : match.start()]
        yield match.group()
        end = match.end()
    if end < len(text):
        yield text[end:]


@cache
def _compiled(pattern: str, ascii_text: bool) -> Pattern:
    """A compiled pass, for ASCII text with the standard library, for other text with ``regex``."""
    if ascii_text:
        of_ascii = re.sub(r"\[[^]]*\]|\\p\{\w+\}", _ascii_class, pattern)
        return re.compile(of_ascii, re.ASCII)
    # Imported here, because it takes as long as the rest of a short prompt's encoding.
    import regex

    return regex.compile(pattern)


def _ascii_class(found: re.Match[str]) -> str:
    """The ASCII characters of a Unicode category, or of a class that contains categories."""
    members = re.sub(r"\\p\{(\w+)\}", lambda one: _ASCII_MEMBERS.get(one[1], ""), found[0])
    return members if found[0].startswith("[") else f"[{members}]"


def _pre_tokenizer(*patterns: str, **expectations: bool) -> PreTokenizer:
    return PreTokenizer(patterns, **expectations)


_gpt2 = _pre_tokenizer(_GPT2)
_smollm = _pre_tokenizer(r"\p{N}", _GPT2)
_qwen2 = _pre_tokenizer(_QWEN2, nfc=True)
_neox = _pre_tokenizer(_GPT2, nfc=True)
_cl100k = _pre_tokenizer(_LLAMA3)
_gpt4o = _pre_tokenizer(_GPT4O)
_bailing = _pre_tokenizer(_QWEN2.replace(r"\s*[\r\n]+|", r"\s*[\r\n]|"))
_llama3 = _pre_tokenizer(_LLAMA3, whole_piece_first=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "afmoe": _pre_tokenizer(*_AFMOE),
    "a.x-4.0": _gpt2,
    "bailingmoe": _bailing,
    "bailingmoe2": _bailing,
    "chatglm-bpe": _cl100k,
    "command-r": _pre_tokenizer(*_smollm.passes, nfc=True),
    "dbrx": _cl100k,
    "deepseek-llm": _pre_tokenizer(*_DEEPSEEK),
    "deepseek-r1-qwen": _qwen2,
    "deepseek-v3": _pre_tokenizer(*_HUNYUAN),
    "deepseek-coder": _pre_tokenizer(*_DEEPSEEK_CODER),
    "exaone": _smollm,
    "exaone-moe": _pre_tokenizer(_EXAONE_MOE),
    "exaone4": _gpt2,
    "falcon": _pre_tokenizer(r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9]{3}"),
    "falcon3": _llama3,
    "falcon-h1": _llama3,
    "glm4": _pre_tokenizer(_LLAMA3, whole_piece_first=True),
    "gigachat": _gpt2,
    "gpt-2": _gpt2,
    "gpt-4o": _gpt4o,
    "hunyuan": _pre_tokenizer(_QWEN2),
    "hunyuan-dense": _pre_tokenizer(*_HUNYUAN),
    "kanana2": _gpt4o,
    "kimi-k2": _pre_tokenizer(_KIMI),
    "lfm2": _llama3,
    "llama-bpe": _llama3,
    "llama-v3": _llama3,
    "llama3": _llama3,
    "llama4": _gpt4o,
    "mellum": _gpt2,
    "midm-2.0": _llama3,
    "minerva-7b": _smollm,
    "minimax-m2": _gpt4o,
    "mpt": _neox,
    "olmo": _neox,
    "phi-2": _gpt2,
    "pixtral": _llama3,
    "qwen2": _qwen2,
    "qwen35": _pre_tokenizer(_QWEN35, nfc=True),
    "refact": _smollm,
    "seed-coder": _pre_tokenizer(_QWEN2.replace(r"[\r\n]*|", "|")),
    "smaug-bpe": _cl100k,
    "smollm": _smollm,
    "solar-open": _pre_tokenizer(_QWEN2),
    "stablelm2": _pre_tokenizer(_QWEN2),
    "starcoder": _smollm,
    "tekken": _pre_tokenizer(_TEKKEN, whole_piece_first=True, add_bos=True),
}
