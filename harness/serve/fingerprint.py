"""The name of the function a server computes: two with one fingerprint answer alike, bit by bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from contract.arithmetic import ARITHMETIC_VERSION
from harness.digest import file_digest
from harness.toml_file import FILE_BYTES_MAX
from reference.model.open import Model

MOST_KEPT = 256
"""Files whose digests are kept."""


def system_fingerprint(model: Model, kv_dtype: str, kept: Path) -> str:
    """``exact-VERSION-`` and 16 hex digits of a digest over the model's files, the version of the
    arithmetic and the storage of keys and values.

    The digests of files that have not changed, by size and time, are taken from the file ``kept``.
    """
    says = json.dumps([ARITHMETIC_VERSION, kv_dtype, file_digests(model, kept)]).encode()
    return f"exact-{ARITHMETIC_VERSION}-{hashlib.sha256(says).hexdigest()[:16]}"


def file_digests(model: Model, kept: Path) -> list[str]:
    """SHA-256 of each file of a model, hex; see ``system_fingerprint``."""
    return [kept_digest(shard.path, kept) for shard in model.file.shards]


def kept_digest(path: Path, kept: Path) -> str:
    """SHA-256 of a file, hex, computed once for each state of it."""
    path = path.resolve()
    state = path.stat()
    stamp = [state.st_size, state.st_mtime_ns, state.st_ino]
    known = _read(kept)
    entry = known.get(str(path))
    if isinstance(entry, list) and len(entry) == 2 and entry[0] == stamp:
        return str(entry[1])
    digest = file_digest(path)
    known.pop(str(path), None)
    known[str(path)] = [stamp, digest]
    _write(kept, dict(list(known.items())[-MOST_KEPT:]))
    return digest


def _read(kept: Path) -> dict[str, object]:
    try:
        with kept.open("rb") as file:
            value = json.loads(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(kept: Path, known: dict[str, object]) -> None:
    partial = kept.with_suffix(".partial")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(known))
        partial.replace(kept)
    except OSError:
        # Digests that are not kept only cost the time to compute them again.
        return
