"""The bytes of server-sent events without names."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from harness.serve.random_pool import random_bytes

encode = msgspec.json.encode
MARK_BYTES = 16
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def data_line(data: bytes) -> bytes:
    """One event."""
    return b"data: " + data + b"\n\n"


@dataclass
class LineTemplates:
    """Encodes the lines of a stream that differ in one text only. The rest of each kind of line is
    encoded once."""

    _cut: dict[Hashable, tuple[bytes, bytes]] = field(default_factory=dict)

    def line(self, kind: Hashable, make: Callable[[str], Any], text: str) -> bytes:
        """The line of ``make(text)``, where ``make`` is the same for all lines of a ``kind``."""
        cut = self._cut.get(kind)
        if cut is None:
            mark = random_bytes(MARK_BYTES).hex()
            before, _, after = data_line(encode(make(mark))).partition(encode(mark))
            cut = self._cut[kind] = before, after
        return b"%b%b%b" % (cut[0], encode(text), cut[1])
