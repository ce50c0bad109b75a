"""BARRIER: orders in-place writes before later reads; the CPU tier runs in order anyway."""

from __future__ import annotations


def barrier() -> None:
    """Nothing to compute."""
