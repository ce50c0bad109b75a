"""YaRN's frequencies in plain float64."""

import numpy as np
from numpy.typing import NDArray


def yarn_frequencies(base: float, dims: int, factor: float, trained: int) -> NDArray[np.float64]:
    """Slow pairs turn ``factor`` times slower, fast ones as trained, between them a mixture."""
    pairs = dims // 2
    pair = np.arange(pairs)
    frequency = float(base) ** (-pair / pairs)
    first, last = (
        pairs * np.log(trained / (turns * 2 * np.pi)) / np.log(base) for turns in (32.0, 1.0)
    )
    first, last = max(np.floor(first), 0), min(np.ceil(last), dims - 1)
    slow = np.clip((pair - first) / max(0.001, last - first), 0, 1)
    return frequency * (1 - slow) + frequency / factor * slow
