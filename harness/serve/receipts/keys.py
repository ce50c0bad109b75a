"""The Ed25519 keys that sign receipts. A key can be replaced; receipts of old keys stay valid.

``key.pem`` is the private key, readable by its owner alone. Every line of ``keys.jsonl`` is a
public key signed by the key before it, so whoever trusts the first key trusts all."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.cached_files import replacing, unfinished
from contract.errors import ConfigError, system_errors_as
from contract.lazy_dataclass import dataclass
from harness.extras import optional_libraries
from harness.serve.receipts.canonical import canonical

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PRIVATE, HISTORY, LOCK = "key.pem", "keys.jsonl", "key.lock"
LOCK_SECONDS = 10.0
"""Longest wait for another process that makes a key."""
OWNER_ONLY = 0o600
MAX_HISTORY_BYTES = 1 << 20
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
    """Whether ``signature`` of ``data`` was made with the key ``public``; both are hex."""
    need_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    with suppress(ValueError, InvalidSignature):
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), data)
        return True
    return False


def open_key(folder: Path) -> ReceiptKey:
    """The key in a folder; a new one if there is none. Raises ConfigError."""
    need_cryptography()
    path, history = folder / PRIVATE, folder / HISTORY
    with system_errors_as(f"{path}: cannot be the key"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (path.exists() and history.exists()) or _abandoned_files(folder):
            with _locked(folder):
                _complete(folder)
        return _read(path)


def rotate_receipt_key(folder: Path) -> ReceiptKey:
    """Replace the folder's key by a new one, signed by the old one. Raises ConfigError."""
    open_key(folder)
    with system_errors_as(f"{folder}: cannot be written"), _locked(folder):
        before = _read(folder / PRIVATE)
        key = _generated()
        # The public key first: a private key that nobody could verify would be worse than none.
        _write_history(folder, [*_lines_to(folder, before.public), _entry(key, before)])
        _write_private(folder, key)
        return key


def public_keys(path: Path) -> list[str]:
    """The public keys in a file or folder, oldest first. Raises ConfigError if a key is not signed
    by the one before it."""
    path = path / HISTORY if path.is_dir() else path
    try:
        with path.open("rb") as file:
            text = file.read(MAX_HISTORY_BYTES)
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
        signed = {name: value for name, value in entry.items() if name != "signature"}
        key, previous = str(entry.get("key")), entry.get("previous")
        known = previous == (keys[-1] if keys else None)
        if not known or not verifies(previous or key, signature, canonical(signed)):
            raise ConfigError(problem)
        keys.append(key)
    if not keys:
        raise ConfigError(f"{path}: holds no public key")
    return keys


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock for changing a folder's keys; the system releases it when the process ends."""
    path = folder / LOCK
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, OWNER_ONLY))
    with closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as lock:
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: cannot be locked: {error}") from None
        for left in _abandoned_files(folder):
            left.unlink(missing_ok=True)
        yield


def _abandoned_files(folder: Path) -> list[Path]:
    """Unfinished key files. If this process has the lock, their writers were killed."""
    return unfinished(folder / PRIVATE) + unfinished(folder / HISTORY)


def _complete(folder: Path) -> None:
    """Make the missing private key, or the missing file of public keys."""
    path, history = folder / PRIVATE, folder / HISTORY
    if not path.exists():
        if history.exists():
            raise ConfigError(
                f"{path}: is missing, and {HISTORY} names its public key; put it back, or begin "
                f"with other keys where {HISTORY} is moved away"
            )
        _write_private(folder, _generated())
    if not history.exists():
        _write_history(folder, [_entry(_read(path), None)])


def _generated() -> ReceiptKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    return ReceiptKey(private, private.public_key().public_bytes_raw().hex())


def _entry(key: ReceiptKey, before: ReceiptKey | None) -> bytes:
    """The line of the history for ``key``, signed by the key before it or by itself."""
    previous = None if before is None else before.public
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    signed = {"key": key.public, "previous": previous, "since": since}
    return canonical(signed | {"signature": (before or key).sign(canonical(signed))})


def _lines_to(folder: Path, public: str) -> list[bytes]:
    """The lines up to the key ``public``. A failed rotation may have left a line after it."""
    lines = [line for line in (folder / HISTORY).read_bytes().splitlines() if line.strip()]
    at = next((n for n, line in enumerate(lines) if _names(line, public)), len(lines))
    return lines[: at + 1]


def _names(line: bytes, public: str) -> bool:
    with suppress(ValueError):
        entry = json.loads(line)
        return isinstance(entry, dict) and entry.get("key") == public
    return False


def _write_history(folder: Path, lines: Sequence[bytes]) -> None:
    with replacing(folder / HISTORY, 0o644, sync=True) as file:
        file.writelines(line + b"\n" for line in lines)


def _write_private(folder: Path, key: ReceiptKey) -> None:
    from cryptography.hazmat.primitives import serialization

    text = key.private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with replacing(folder / PRIVATE, OWNER_ONLY, sync=True) as file:
        file.write(text)


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
