"""Finds tokens that appear in text as themselves: control, unknown and user-defined tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""The character offsets [start, end) of a part of a text."""

Fragment = tuple[int, int, int | None]
"""The start, end and token id of a part of a text; the id is None for ordinary text."""


def partition(
    text: str, specials: Iterable[tuple[str, int, bool]], control_spans: Sequence[Span]
) -> list[Fragment]:
    """Split ``text`` into special tokens and the ordinary text between them.

    ``specials`` are (token text, id, is control), longest text first: each claims every occurrence
    in unclaimed text, scanning from the left. A control token is found only where one span of
    ``control_spans`` (sorted, disjoint, not touching) contains all of it."""
    fragments: list[Fragment] = [(0, len(text), None)] if text else []
    starts = [start for start, _ in control_spans]

    def may_be_control(start: int, end: int) -> bool:
        index = bisect_right(starts, start) - 1
        return index >= 0 and end <= control_spans[index][1]

    for literal, token, is_control in specials:
        if (is_control and not control_spans) or literal not in text:
            continue
        parts: list[Fragment] = []
        for fragment in fragments:
            start, end, claimed = fragment
            if claimed is not None:
                parts.append(fragment)
                continue
            search = start
            while (found := text.find(literal, search, end)) >= 0:
                after = found + len(literal)
                if is_control and not may_be_control(found, after):
                    search = found + 1
                    continue
                if found > start:
                    parts.append((start, found, None))
                parts.append((found, after, token))
                start = search = after
            if start < end:
                parts.append((start, end, None))
        fragments = parts
    return fragments
