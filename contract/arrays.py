"""Arrays by the type of their elements, as annotations name them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Records = NDArray[np.void]
"""Elements of a record of several fields, such as those of ``contract.records``."""
