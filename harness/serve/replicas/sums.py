"""The same facts of several engines as those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


def summed(values: Sequence[Any]) -> Any:
    """Numbers added, field by field and name by name; of anything else the first."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, bool) or first is None:
        return first
    if isinstance(first, int | float):
        return sum(values)
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        total = {n: summed([value[n] for value in values if n in value]) for n in names}
        return Counter(total) if isinstance(first, Counter) else total
    if is_dataclass(first) and not isinstance(first, type):
        parts = {
            one.name: summed([getattr(value, one.name) for value in values])
            for one in fields(first)
            if one.init
        }
        return type(first)(**parts)
    return first
