"""Tables of tests that lie in a file of their own: JSON, a row a line."""

import json
from pathlib import Path
from typing import Any


def table(test: str, name: str) -> dict[str, Any]:
    """The tables by name in ``NAME.json`` beside the file of a test."""
    tables: dict[str, Any] = json.loads(Path(test).with_name(f"{name}.json").read_text())
    return tables
