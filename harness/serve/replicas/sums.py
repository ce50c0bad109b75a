"""Sums the statistics of several engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from contract.types import Tenant


def summed(values: Sequence[Any]) -> Any:
    """The sum of records, field by field, key by key and index by index. Of rates and percentiles
    it is the largest, of anything that is no number the first."""
    values = [value for value in values if value is not None] or [None]
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, bool | Tenant):
        return first
    if isinstance(first, list | tuple):
        parts = [summed(parts) for parts in zip(*values, strict=False)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, int | float):
        return sum(values)
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        total = {n: summed([value[n] for value in values if n in value]) for n in names}
        return Counter(total) if isinstance(first, Counter) else total
    if is_dataclass(first) and not isinstance(first, type):
        named = {
            one.name: _of_all(one.name, [getattr(value, one.name) for value in values])
            for one in fields(first)
            if one.init
        }
        return type(first)(**named)
    return first


def _of_all(name: str, values: Sequence[Any]) -> Any:
    """One field of the sum."""
    if not name.endswith("_rate") and not name.startswith(("p50_", "p99_")):
        return summed(values)
    return max((value for value in values if value is not None), default=None)
