"""Modules that are imported when a test uses them.

Every process of a run imports all files of tests; a client that takes seconds to load is needed by
few processes."""

import importlib
from typing import Any


class LateModule:
    """Has the attributes of the module of that name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
