"""The step inputs that give the adapters of each token."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats, Ints, Records
from contract.lazy_dataclass import dataclass
from contract.records import record

ADAPTER_SCALES = "request.adapter_scales"
"""The input with the scales of each token's adapters, which come from its request."""
ADAPTERS = record("i4 id, f4 scale")
"""An entry of the stacked tensors, and the scale of its contribution."""


def adapter_entries(chosen: tuple[tuple[int, float], ...], combined: int) -> Records:
    """ADAPTERS[combined] of adapters (index, scale). Unused entries add nothing: the first
    ``combined`` entries of the stacked tensors are zeros, and no entry is used twice."""
    entries = np.zeros(combined, ADAPTERS)
    entries["id"] = np.arange(combined)
    for number, (index, scale) in enumerate(chosen):
        entries[number] = combined + index, scale
    return entries


@dataclass(frozen=True, slots=True)
class AdapterInputs:
    """The two inputs, with ``combined`` elements per token; None if the graph has none."""

    ids: Ints | None
    scales: Floats | None
    combined: int

    def put(self, adapters: Records, tokens: int) -> None:
        """Write ADAPTERS[tokens, combined] of a step. Raises ValueError if the graph has no such
        inputs."""
        if self.ids is None or self.scales is None:
            raise ValueError("a step has adapters, the limits allow none")
        count = tokens * self.combined
        self.ids[:count] = adapters["id"].reshape(-1)
        self.scales[:count] = adapters["scale"].reshape(-1)
