"""The inputs of a step that say which adapters each of its tokens uses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.lazy_dataclass import dataclass

ADAPTER_SCALES = "request.adapter_scales"
"""Beside the adapters of each token, the input with their scales: those of its request."""
ADAPTERS = np.dtype([("id", np.int32), ("scale", np.float32)])
"""An entry of the stacked tensors, and the scale of what it adds."""


def adapter_entries(chosen: tuple[tuple[int, float], ...], combined: int) -> NDArray[np.void]:
    """ADAPTERS[combined] of adapters (index, scale). What is left adds nothing: the first
    ``combined`` entries of the stacked tensors are zeros, and no entry is used twice."""
    entries = np.zeros(combined, ADAPTERS)
    entries["id"] = np.arange(combined)
    for number, (index, scale) in enumerate(chosen):
        entries[number] = combined + index, scale
    return entries


@dataclass(frozen=True, slots=True)
class AdapterInputs:
    """The two inputs, of which each token has ``combined`` elements; None if the graph reads
    none."""

    ids: NDArray[np.int32] | None
    scales: NDArray[np.float32] | None
    combined: int

    def put(self, adapters: NDArray[np.void], tokens: int) -> None:
        """Write ADAPTERS[tokens, combined] of a step. Raises ValueError if the graph reads
        none."""
        if self.ids is None or self.scales is None:
            raise ValueError("a step has adapters, the limits allow none")
        count = tokens * self.combined
        self.ids[:count] = adapters["id"].reshape(-1)
        self.scales[:count] = adapters["scale"].reshape(-1)
