"""BARRIER: orders in-place writes before later reads. The CPU tier runs nodes in order anyway."""

from __future__ import annotations


def barrier() -> None:
    """Do nothing."""
