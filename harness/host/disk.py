"""The disk cache of a model: what names its pages, and how it is opened."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from contract.arithmetic import ARITHMETIC_VERSION, PAGE_TOKENS
from contract.ir.codec import encode
from harness.file_digests import DIGESTS_FILE, file_digests
from reference.limits import Limits, whole_contexts
from reference.memory.disk.cache import DiskCache, DiskCacheOptions
from reference.memory.disk.folder import SUBFOLDER, forget_scope
from reference.memory.prefix import Scope
from reference.model.open import Model

log = logging.getLogger("zinc_rt.disk")
READ_SHARE, READ_BYTES = 4, 128 << 20
"""At most this part of the available memory, and for each prompt so many bytes, hold pages that
were read for prompts."""


def function_name(model: Model, limits: Limits, files: Sequence[str]) -> str:
    """A text that is the same only for models whose keys and values of equal tokens are equal.

    It has ``files``, the digests of the model's files; the version of the arithmetic; and the graph
    of the smallest sizes, with the type of keys and values. Numbers of slots and pages are not in
    it. The length of the context is only where it decides between two tables of frequencies."""
    smallest = whole_contexts(
        slots=1,
        context=PAGE_TOKENS,
        kv_dtype=limits.kv_dtype,
        step_tokens=2,
        step_rows=1,
        recent_tokens=1,
    )
    graph = hashlib.sha256(encode(model.graph(smallest))).hexdigest()
    factors = [rope.factors_for(limits.context) for rope in model.config.ropes]
    return json.dumps([ARITHMETIC_VERSION, limits.kv_dtype.name, list(files), graph, factors])


def open_disk_cache(folder: Path, most_bytes: int, model: Model, limits: Limits) -> DiskCache:
    """The disk cache of a model. Where the folder cannot be used, the log says so and nothing is
    cached."""
    files = file_digests(model, folder / SUBFOLDER / DIGESTS_FILE)
    options = DiskCacheOptions(
        folder,
        most_bytes,
        function_name(model, limits, files),
        # As many prompts wait as have slots.
        read_bytes=min(
            READ_BYTES, psutil.virtual_memory().available // READ_SHARE // (2 * limits.slots)
        ),
    )
    return DiskCache(options, log.warning, time.monotonic)


def forgetting(folder: Path | None) -> Callable[[Scope], None]:
    """What removes the pages of scopes that end from ``folder``, also where no model is loaded."""

    def forget(scope: Scope) -> None:
        if folder is not None:
            try:
                forget_scope(folder, scope)
            except OSError as error:
                log.warning("%s keeps the pages of a removed tenant: %s", folder, error.strerror)

    return forget
