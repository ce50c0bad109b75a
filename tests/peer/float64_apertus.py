"""Apertus in plain float64: xIELU in place of gates."""

import numpy as np

from tests.peer.float64_llama import Float64, Float64Llama


class Float64Apertus(Float64Llama):
    """The parameters of a layer are keys of the file."""

    def _feed_forward(self, h: Float64, layer: int) -> Float64:
        prefix = f"blk.{layer}.ffn_"
        p, n, b, e = (self.size(name, layer) for name in ("alpha_p", "alpha_n", "beta", "eps"))
        p, n = np.logaddexp(0.0, p), b + np.logaddexp(0.0, n)
        x = self._linear(h, f"{prefix}up")
        below = n * (np.expm1(np.minimum(x, e)) - x)
        return self._linear(np.where(x > 0, p * x * x, below) + b * x, f"{prefix}down")

    def size(self, name: str, layer: int) -> float:
        """A parameter of a layer."""
        return self._fields[f"xielu.{name}"].contents()[layer]
