"""API keys: random, shown once, stored as digests, compared in constant time.

A key has 256 random bits, so a plain SHA-256 is a safe stored form."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable

PREFIX = "zrt-"
MAX_KEY_CHARACTERS = 512


def new_key() -> str:
    """A new random key."""
    return PREFIX + secrets.token_urlsafe(32)


def key_digest(key: str) -> str:
    """Stored form of a key: ``sha256:`` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class Keyring:
    """The tenants of keys, by the digests of the keys."""

    def __init__(self, digests: Iterable[tuple[str, int]] = ()) -> None:
        self._digests = [(digest.encode(), tenant) for digest, tenant in digests]

    def __len__(self) -> int:
        return len(self._digests)

    def tenant_of(self, key: str) -> int | None:
        """The id of the tenant with this key, None for an unknown key. Always compares all
        digests."""
        own = key_digest(key).encode()
        found = None
        for digest, tenant in self._digests:
            if hmac.compare_digest(own, digest):
                found = tenant
        return found


def presented_key(header: str | None) -> str | None:
    """The key of an ``Authorization`` header: a bearer token, or the password of Basic
    authentication. None if there is none."""
    scheme, _, value = (header or "").strip().partition(" ")
    value = value.strip()
    if not value or len(value) > MAX_KEY_CHARACTERS:
        return None
    match scheme.lower():
        case "bearer":
            return value
        case "basic":
            try:
                pair = base64.b64decode(value, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                return None
            return pair.partition(":")[2] or None
    return None
