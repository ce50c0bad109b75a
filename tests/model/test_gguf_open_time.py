"""How long opening a model with a very large vocabulary takes, against a plain walk of it."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest

from reference.model.gguf import StringArray, open_gguf, write_gguf

TOKENS = 262_144
MERGES = 514_906


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory) -> Path:
    """A file with as many tokens, scores and merges as the largest published vocabulary."""
    path = tmp_path_factory.mktemp("vocabulary") / "model.gguf"
    metadata = {
        "tokenizer.ggml.tokens": [b"token%d" % i for i in range(TOKENS)],
        "tokenizer.ggml.scores": np.zeros(TOKENS, np.float32),
        "tokenizer.ggml.merges": [b"mer ge%d" % i for i in range(MERGES)],
    }
    write_gguf(path, metadata, {})
    return path


def plain_walk_seconds(path: Path) -> float:
    """Only stepping from string to string, with the whole file in memory and no check at all."""
    with open_gguf(path) as file:
        arrays = [value for value in file.metadata.values() if isinstance(value, StringArray)]
        starts = [(int(strings.offsets[0]), len(strings)) for strings in arrays]
    content = path.read_bytes()
    unpack_from = struct.Struct("<Q").unpack_from
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for position, count in starts:
            for _ in range(count):
                position += 8 + unpack_from(content, position)[0]
        best = min(best, time.perf_counter() - began)
    return best


def test_open_large_vocabulary(benchmark, large_vocabulary: Path) -> None:
    """Everything is found; the time is reported as a multiple of the plain walk, not judged."""

    def open_and_count() -> tuple[int, ...]:
        with open_gguf(large_vocabulary) as file:
            return tuple(len(value) for value in file.metadata.values())

    counts = benchmark.pedantic(open_and_count, rounds=3, iterations=1, warmup_rounds=1)
    assert counts == (TOKENS, TOKENS, MERGES)
    if benchmark.stats is not None:
        seconds = benchmark.stats.stats.min
        ratio = seconds / plain_walk_seconds(large_vocabulary)
        benchmark.extra_info["times_plain_walk"] = round(ratio, 2)
        print(f"\nopened in {seconds:.3f} s, {ratio:.2f} times a plain walk")
