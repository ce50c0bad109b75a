"""Digests of model files, computed once for each state of a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from contract.arithmetic import ARITHMETIC_VERSION
from contract.cached_files import replacing
from harness.named_adapters import Scales
from harness.toml_file import FILE_BYTES_MAX
from reference.limits import Limits
from reference.model.gguf.shard import Shard
from reference.model.open import Model

MAX_CACHED = 256
"""Most files whose digests the cache file holds."""
DIGESTS_FILE = "digests.json"
"""Its usual name."""


def file_digests(model: Model, cache_file: Path) -> list[str]:
    """SHA-256 of each open file of a model, hex; known ones are taken from ``cache_file``."""
    return [
        cached_digest(
            shard.path, os.fstat(shard.descriptor), cache_file, partial(opened_digest, shard)
        )
        for shard in model.file.shards
    ]


def opened_digest(shard: Shard) -> str:
    """SHA-256 of an open file of a model, hex, also where another has its name by now. Raises
    ModelFileError for a file that was written to."""
    digest = None
    with suppress(OSError), shard.path.open("rb") as file:
        if os.path.samestat(os.fstat(file.fileno()), os.fstat(shard.descriptor)):
            digest = hashlib.file_digest(file, "sha256")
    if digest is None:
        digest = hashlib.sha256(shard.mapping)
    shard.check_unchanged()
    return digest.hexdigest()


def cached_digest(
    path: Path, state: os.stat_result, cache_file: Path, compute: Callable[[], str]
) -> str:
    """The digest that ``compute`` returns, computed once for each ``state`` of the file."""
    path = path.resolve()
    stamp = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    known = _read(cache_file)
    entry = known.get(str(path))
    if isinstance(entry, list) and len(entry) == 2 and entry[0] == stamp:
        return str(entry[1])
    digest = compute()
    known.pop(str(path), None)
    known[str(path)] = [stamp, digest]
    _write(cache_file, dict(list(known.items())[-MAX_CACHED:]))
    return digest


def _read(cache_file: Path) -> dict[str, object]:
    try:
        with cache_file.open("rb") as file:
            value = json.loads(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(cache_file: Path, known: dict[str, object]) -> None:
    # Digests that are not stored only cost the time to compute them again.
    with suppress(OSError):
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cache_file) as file:
            file.write(json.dumps(known).encode())


def frequency_tables(model: Model, context: int) -> list[str]:
    """The tensors of frequency divisors that the length of the context chooses; none of a model
    that has no such choice."""
    chosen = [rope.factors_for(context) for rope in model.config.ropes if rope.long_factors]
    return list(dict.fromkeys(chosen))


def system_fingerprint(model: Model, limits: Limits, cache_file: Path) -> str:
    """``exact-VERSION-`` and 16 hex digits of a digest over the model's files, the version of the
    arithmetic, the storage of keys and values, and what the context's length chooses.

    The digests of files that have not changed, by size and time, come from ``cache_file``."""
    says: list[object] = [ARITHMETIC_VERSION, limits.kv_dtype.name, file_digests(model, cache_file)]
    tables = frequency_tables(model, limits.context)
    digest = hashlib.sha256(json.dumps(says + tables).encode()).hexdigest()
    return f"exact-{ARITHMETIC_VERSION}-{digest[:16]}"


def adapted_fingerprint(alone: str, model: Model, scales: Scales) -> str:
    """The fingerprint of a model with adapters; ``alone`` is its fingerprint without any."""
    identity = model.adapters.identity(scales)
    if not identity:
        return alone
    digest = hashlib.sha256("\n".join((alone, *identity)).encode()).hexdigest()
    return f"{alone.rpartition('-')[0]}-{digest[:16]}"
