"""The CPU tier with binary64 attention, so that the rounding of rule R6 hides no wrong formula."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from reference.cpu import kernels
from reference.cpu.attention import AttentionShape
from reference.exact.kv_storage import loaded
from tests.ops.paged import softmax_attention


@contextmanager
def binary64_attention() -> Iterator[None]:
    """Inside, engines of the CPU tier attend in binary64 and round only the result."""
    with mock.patch.object(kernels, "paged_attention", _attention):
        yield


def _attention(
    q: NDArray[np.float32], kv: NDArray[Any], page_table: NDArray[np.int32],
    query: NDArray[np.int32], shape: AttentionShape, y: NDArray[np.float32],
    sinks: NDArray[np.float32] | None = None, threads: int | None = None,
) -> None:  # fmt: skip
    group = shape.heads // shape.kv_heads
    rows = q.reshape(len(q), shape.heads, shape.head_dim)
    for token, (_, slot, position, _) in enumerate(query):
        pages = page_table[slot, : position // PAGE_TOKENS + 1]
        stored = np.moveaxis(loaded(kv[pages]), 1, 0)
        flat = stored.reshape(2, -1, shape.kv_heads, shape.head_dim)
        first = max(0, position + 1 - shape.window) if shape.window else 0
        if shape.window < 0:
            first = position - position % -shape.window
        keys, values = flat[:, first : position + 1]
        for head in range(shape.heads):
            attended = softmax_attention(
                rows[token, head], keys[:, head // group], values[:, head // group], shape.scale,
                shape.soft_cap, -np.inf if sinks is None else float(sinks[head]),
            )  # fmt: skip
            y[token, head * shape.head_dim : (head + 1) * shape.head_dim] = attended
