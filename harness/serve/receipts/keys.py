"""The server's Ed25519 keys: made once, readable by their owner alone, replaced without losing the
old ones' receipts.

``key.pem`` is the private key. Every line of ``keys.jsonl`` is a public key, signed by the one
before it, so who trusts the first trusts all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import ConfigError
from contract.lazy_dataclass import dataclass
from harness.extras import optional_libraries
from harness.serve.receipts.canonical import canonical

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PRIVATE, HISTORY = "key.pem", "keys.jsonl"
OWNER_ONLY = 0o600
MOST_HISTORY_BYTES = 1 << 20
SIGNATURE_BYTES, KEY_BYTES = 64, 32


@dataclass(frozen=True, slots=True)
class ReceiptKey:
    """A private key and its public half, hex."""

    private: Ed25519PrivateKey
    public: str

    def sign(self, data: bytes) -> str:
        """The signature of ``data``, hex."""
        return self.private.sign(data).hex()


def verifies(public: str, signature: str, data: bytes) -> bool:
    """Whether ``signature`` of ``data`` is by the key ``public``, both hex."""
    need_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    with suppress(ValueError, InvalidSignature):
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), data)
        return True
    return False


def open_key(folder: Path) -> ReceiptKey:
    """The key of a folder, made where there is none. Raises ConfigError."""
    need_cryptography()
    path = folder / PRIVATE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(folder, None)
        return _read(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be the key: {error.strerror}") from None


def rotate_receipt_key(folder: Path) -> ReceiptKey:
    """A new key in place of the folder's, signed by that one. Raises ConfigError."""
    before = open_key(folder)
    try:
        return _make(folder, before)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None


def public_keys(path: Path) -> list[str]:
    """The public keys that a file of them, or the folder it is in, holds, the oldest first. Raises
    ConfigError where one is not signed by the one before it."""
    path = path / HISTORY if path.is_dir() else path
    try:
        with path.open("rb") as file:
            text = file.read(MOST_HISTORY_BYTES)
        entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(
            f"{path}: holds no public keys; `zinc-rt receipts key` prints them"
        ) from None
    return _checked(path, entries)


def _checked(path: Path, entries: Sequence[Any]) -> list[str]:
    keys: list[str] = []
    for number, entry in enumerate(entries, 1):
        problem = f"{path}: line {number} is no public key, or not signed by the one before it"
        if not isinstance(entry, dict):
            raise ConfigError(problem)
        signature = str(entry.get("signature", ""))
        said = {name: value for name, value in entry.items() if name != "signature"}
        key, previous = str(entry.get("key")), entry.get("previous")
        known = previous == (keys[-1] if keys else None)
        if not known or not verifies(previous or key, signature, canonical(said)):
            raise ConfigError(problem)
        keys.append(key)
    if not keys:
        raise ConfigError(f"{path}: holds no public key")
    return keys


def _make(folder: Path, before: ReceiptKey | None) -> ReceiptKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    key = ReceiptKey(private, private.public_key().public_bytes_raw().hex())
    text = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    previous = None if before is None else before.public
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    said = {"key": key.public, "previous": previous, "since": since}
    entry = said | {"signature": (before or key).sign(canonical(said))}
    partial = folder / f"{PRIVATE}.{os.getpid()}"
    partial.unlink(missing_ok=True)
    with os.fdopen(
        os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb"
    ) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    # The public key first: a private key that nobody could verify would be worse than none.
    with (folder / HISTORY).open("ab") as history:
        history.write(canonical(entry) + b"\n")
        history.flush()
        os.fsync(history.fileno())
    partial.replace(folder / PRIVATE)
    return key


def _read(path: Path) -> ReceiptKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}: others can read this private key; chmod 600 it, and rotate it")
    try:
        private = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: is no Ed25519 key in PEM") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise ConfigError(f"{path}: is no Ed25519 key")
    return ReceiptKey(private, private.public_key().public_bytes_raw().hex())


def need_cryptography() -> None:
    """Raise ConfigError when the library of signatures is not installed."""
    with optional_libraries():
        import cryptography  # noqa: F401
