"""A base class for objects that close at the end of a ``with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class ContextManager(ABC):
    """A context manager that calls ``close`` when its block ends."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release all resources the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()
