"""The disk cache of a model: the identity of its pages, and how it is opened."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from accel.packets.host_memory import available_memory
from contract.arithmetic import ARITHMETIC_VERSION, PAGE_TOKENS
from contract.ir.codec import encode
from harness.file_digests import DIGESTS_FILE, file_digests, opened_digest
from reference.limits import Limits, whole_contexts
from reference.memory.disk.cache import DiskCache, DiskCacheOptions
from reference.memory.disk.folder import SUBFOLDER, forget_scope
from reference.memory.prefix import Scope
from reference.model.dflash import DFlashHead
from reference.model.open import Model

log = logging.getLogger("zinc_rt.disk")
READ_SHARE, READ_BYTES = 4, 128 << 20
"""Pages read for prompts take at most one part in READ_SHARE of the available memory, and
READ_BYTES for each prompt."""


def function_name(model: Model, limits: Limits, files: Sequence[str]) -> str:
    """A text that identifies the function from tokens to keys and values: equal texts mean equal
    bits.

    It contains ``files``, the digests of the model's files; the version of the arithmetic; the type
    of keys and values; and a digest of the graph at the smallest sizes. It does not depend on the
    numbers of slots and pages, and on the context only if that selects a table of frequency
    factors."""
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


def open_disk_cache(folder: Path, max_bytes: int, model: Model, limits: Limits) -> DiskCache:
    """The disk cache of a model in ``folder``, up to ``max_bytes``. If the folder cannot be used,
    this is logged and nothing is cached."""
    files = file_digests(model, folder / SUBFOLDER / DIGESTS_FILE)
    if isinstance(model.head, DFlashHead):
        # Its keys and values are in the pages too.
        files += [opened_digest(shard) for shard in model.head.file.shards]
    options = DiskCacheOptions(
        folder,
        max_bytes,
        function_name(model, limits, files),
        # Besides the running prompts, as many waiting ones may have pages read.
        read_bytes=min(READ_BYTES, available_memory() // READ_SHARE // (2 * limits.slots)),
    )
    return DiskCache(options, log.warning, time.monotonic)


def forgetting(folder: Path | None) -> Callable[[Scope], None]:
    """A function that removes the pages of a removed scope from ``folder``, also if no model is
    loaded."""

    def forget(scope: Scope) -> None:
        if folder is not None:
            try:
                forget_scope(folder, scope)
            except OSError as error:
                log.warning("%s keeps the pages of a removed tenant: %s", folder, error.strerror)

    return forget
