"""A word that tells a tier to end a step early."""

from __future__ import annotations

import ctypes


class CancelToken:
    """Tells that a step need not be finished. Any thread may cancel it, at any time, also once the
    step has ended.

    The word is 0 until then; threads in C read it at ``address``, so the token must outlive the
    step."""

    __slots__ = ("_word", "address")

    def __init__(self) -> None:
        self._word = ctypes.c_uint32()
        self.address = ctypes.addressof(self._word)

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._word.value != 0

    def cancel(self) -> None:
        """Let the step end at its next op."""
        self._word.value = 1
