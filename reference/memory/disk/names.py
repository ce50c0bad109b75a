"""Names of cached pages on disk: digests of everything that a page's bytes depend on.

These are the function that the model computes, the storage type of keys and values, and all tokens
up to the page's last. The name is a digest over them and the scope that may read the page, so other
bytes have another name. Digests are keyed with a secret of the folder: without it nobody can
compute the name of a prompt's page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

SECRET_BYTES = 32
NAME_BYTES = 32
SCOPE_BYTES = 16


class PageNames:
    """The names of pages in one folder for one ``function``: a text that names the model's files,
    the arithmetic, and the storage of keys and values."""

    def __init__(self, secret: bytes, function: str) -> None:
        self._secret = secret
        self._function = function

    def scope(self, scope: Sequence[str | int]) -> str:
        """The name of a scope's folder, hex."""
        return self._digest(b"scope", _text(scope), SCOPE_BYTES).hex()

    def root(self, scope: Sequence[str | int]) -> bytes:
        """The name before the first page of each prompt."""
        return self._digest(b"root", _text([self._function, *scope]), NAME_BYTES)

    def page(self, before: bytes, tokens: bytes) -> bytes:
        """The name of the page with ``tokens``, int32[16], that comes after the page ``before``."""
        return self._digest(b"page", before + tokens, NAME_BYTES)

    def _digest(self, use: bytes, data: bytes, nbytes: int) -> bytes:
        return hashlib.blake2b(data, digest_size=nbytes, key=self._secret, person=use).digest()


def _text(value: Sequence[str | int]) -> bytes:
    return json.dumps(list(value)).encode()
