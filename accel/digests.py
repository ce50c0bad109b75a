"""The digest of what is in caches, and of the texts of kernels.

It is BLAKE2 without ``hashlib``, which loads OpenSSL: 4 MB and 2 ms of every start."""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

DIGEST_BYTES = 32


def digest(data: bytes = b"") -> blake2b:
    """The digest of ``data``, which can be continued."""
    return blake2b(data, digest_size=DIGEST_BYTES)
