"""What a stream of server-sent events says."""

import json
from collections.abc import Sequence
from typing import Any


def lines_of(body: bytes) -> list[bytes]:
    """The data lines of a stream."""
    return [line for line in body.split(b"\n") if line.startswith(b"data: ")]


def data_of(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The objects of data lines, without the line that ends them."""
    texts = (line.removeprefix(b"data: ") for line in lines)
    return [json.loads(text) for text in texts if text != b"[DONE]"]
