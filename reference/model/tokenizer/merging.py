"""Pair merging: the one loop behind byte-pair encoding and SentencePiece's score merge."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol


class Priorities(Protocol):
    """The priorities of pairs of symbols, by their text."""

    def get(self, text: bytes, /) -> float | None:
        """The priority of a pair, None for a pair that does not merge."""


def merge_pairs(symbols: list[bytes], priorities: Priorities, separator: bytes) -> list[bytes]:
    """Merge adjacent symbols until no adjacent pair has a priority.

    The next pair to merge is the one with the lowest ``priorities[left + separator + right]``, the
    leftmost of equals (Sennrich et al. 2016). Symbols are not empty. A linked list of symbols and a
    heap of candidate pairs make n symbols cost O(n log n) for any merges.
    """
    texts = list(symbols)
    count = len(symbols)
    if count < 2:
        return symbols
    following = list(range(1, count + 1))
    preceding = list(range(-1, count - 1))
    priority_of = priorities.get

    candidates = []
    for left in range(count - 1):
        priority = priority_of(symbols[left] + separator + symbols[left + 1])
        if priority is not None:
            size = len(symbols[left]) + len(symbols[left + 1])
            candidates.append((priority, left, left + 1, size))
    heapify(candidates)

    while candidates:
        _, left, right, size = heappop(candidates)
        left_text, right_text = texts[left], texts[right]
        # The size of a pair has changed if one of its symbols was merged since.
        if not left_text or not right_text or len(left_text) + len(right_text) != size:
            continue
        merged = left_text + right_text
        texts[left] = merged
        texts[right] = b""
        after = following[right]
        following[left] = after
        if after < count:
            preceding[after] = left
            after_text = texts[after]
            priority = priority_of(merged + separator + after_text)
            if priority is not None:
                heappush(candidates, (priority, left, after, size + len(after_text)))
        before = preceding[left]
        if before >= 0:
            before_text = texts[before]
            priority = priority_of(before_text + separator + merged)
            if priority is not None:
                heappush(candidates, (priority, before, left, len(before_text) + size))
    return [text for text in texts if text]
