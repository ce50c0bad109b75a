"""Bounds on what a GGUF file may ask for, each far above any published model.

They keep time and memory of opening a hostile file small whatever its counts and lengths say.
All are per file; a split model may carry them once per shard, except the number of tensors.
"""

from __future__ import annotations

MAX_KEYS = 65_536
"""Metadata entries."""

MAX_TENSORS = 65_536
"""Tensors, over all shards."""

MAX_SHARDS = 512
"""Files of one split model (each costs two file descriptors)."""

MAX_KEY_BYTES = 65_535
"""Bytes of one metadata key."""

MAX_TENSOR_NAME_BYTES = 255
"""Bytes of one tensor name (ggml itself is built with 63 or 127)."""

MAX_TEXT_BYTES = 40 << 20
"""Bytes of all string values of a file that are not in an array."""

MAX_STRINGS = 1 << 21
"""Strings in all string arrays of a file; the largest public vocabularies have 800,000."""

MAX_HEADER_BYTES = 256 << 20
"""Bytes from the start of the file to the end of the tensor list."""

MAX_DIMENSIONS = 4
"""Dimensions of a tensor; the least is 1."""

MAX_ELEMENTS = (1 << 63) - 1
"""Elements of one tensor."""

MIN_ALIGNMENT_BYTES = 8
MAX_ALIGNMENT_BYTES = 1 << 30
DEFAULT_ALIGNMENT_BYTES = 32
"""Bytes; an alignment is a power of two."""
