"""Amounts of bytes as text, in the decimal units of download sites and disks."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Bytes with three digits: 98,362,432 is ``98.4 MB``."""
    scaled, units = float(count), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while scaled >= 999.5 and unit != "TB":
        scaled, unit = scaled / 1000, next(units)
    return f"{scaled:.3g} {unit}"
