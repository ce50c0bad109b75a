"""Cases that only ``ci/test --all`` runs, since a compiler takes long for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_except(names: Iterable[str], *short: str) -> list[Any]:
    """Parameters of those names, marked ``long`` but for ``short``."""
    return [pytest.param(name, marks=[] if name in short else [pytest.mark.long]) for name in names]
