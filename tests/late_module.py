"""Modules that are imported when a test uses them.

Every process of a run imports all files of tests; a client that takes seconds to load is needed by
few processes."""

import importlib
from typing import Any


class LateModule:
    """Has the public attributes of the module of that name. Pytest looks for others in everything
    that a file of tests has, such as ``__wrapped__``, which must import nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
