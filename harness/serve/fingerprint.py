"""The name of the function a server computes: two with one fingerprint answer alike, bit by bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from contract.arithmetic import ARITHMETIC_VERSION
from harness.file_digests import file_digests
from reference.model.open import Model


def system_fingerprint(model: Model, kv_dtype: str, cache_file: Path) -> str:
    """``exact-VERSION-`` and 16 hex digits of a digest over the model's files, the version of the
    arithmetic and the storage of keys and values.

    The digests of files that have not changed, by size and time, come from ``cache_file``.
    """
    says = json.dumps([ARITHMETIC_VERSION, kv_dtype, file_digests(model, cache_file)]).encode()
    return f"exact-{ARITHMETIC_VERSION}-{hashlib.sha256(says).hexdigest()[:16]}"
