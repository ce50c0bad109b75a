"""The printable alphabet in which byte-level BPE vocabularies (GPT-2) write arbitrary bytes.

Bytes 33-126, 161-172 and 174-255 stand for themselves as code points; the other 68, in
increasing order, are written U+0100, U+0101, ..."""

from __future__ import annotations


def _alphabet() -> tuple[str, ...]:
    own = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = []
    next_free = 0x100
    for byte in range(256):
        if byte in own:
            letters.append(chr(byte))
        else:
            letters.append(chr(next_free))
            next_free += 1
    return tuple(letters)


LETTER_OF_BYTE: tuple[str, ...] = _alphabet()
"""The character that stands for each byte."""

SYMBOL_OF_BYTE: tuple[bytes, ...] = tuple(letter.encode() for letter in LETTER_OF_BYTE)
"""The same characters in UTF-8, as a vocabulary stores them."""

BYTE_OF_LETTER: dict[str, int] = {letter: byte for byte, letter in enumerate(LETTER_OF_BYTE)}


def from_byte_alphabet(stored: bytes) -> bytes:
    """The bytes a stored token stands for.

    A character outside the alphabet stands for its own UTF-8 bytes, and a token that is not
    UTF-8 for its stored bytes: such vocabularies are malformed, but decoding never fails."""
    try:
        letters = stored.decode()
    except UnicodeDecodeError:
        return stored
    decoded = bytearray()
    for letter in letters:
        byte = BYTE_OF_LETTER.get(letter)
        if byte is None:
            decoded += letter.encode()
        else:
            decoded.append(byte)
    return bytes(decoded)
