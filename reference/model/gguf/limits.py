"""Limits on a GGUF file, each far above any published model.

They bound the time and memory of opening a hostile file, whatever its counts and lengths. All are
per file, so a split model may use them once per shard, except the number of tensors."""

from __future__ import annotations

MAX_KEYS = 65_536
"""Most metadata entries."""

MAX_TENSORS = 65_536
"""Most tensors over all shards."""

MAX_SHARDS = 512
"""Most files of one split model (each costs two file descriptors)."""

MAX_KEY_BYTES = 65_535
"""Most bytes of one metadata key."""

MAX_TENSOR_NAME_BYTES = 255
"""Most bytes of one tensor name (ggml itself is built with 63 or 127)."""

MAX_TEXT_BYTES = 40 << 20
"""Most bytes of all string values of a file, arrays excluded."""

MAX_STRINGS = 1 << 21
"""Most strings in all string arrays of a file; the largest public vocabularies have 800,000."""

MAX_HEADER_BYTES = 256 << 20
"""Most bytes from the start of the file to the end of the tensor list."""

MAX_DIMENSIONS = 4
"""Most dimensions of a tensor; the fewest is 1."""

MAX_ELEMENTS = (1 << 63) - 1
"""Most elements of one tensor."""

MIN_ALIGNMENT_BYTES = 8
MAX_ALIGNMENT_BYTES = 1 << 30
DEFAULT_ALIGNMENT_BYTES = 32
"""Alignment of tensor data in bytes; an alignment is a power of two."""
