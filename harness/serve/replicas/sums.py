"""The same facts of several engines as those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from contract.types import Tenant


def summed(values: Sequence[Any]) -> Any:
    """Numbers added, field by field, name by name and place by place; of anything else, tenants
    too, the first."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, bool | Tenant) or first is None:
        return first
    if isinstance(first, list | tuple):
        return type(first)(summed(parts) for parts in zip(*values, strict=False))
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
