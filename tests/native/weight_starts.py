"""What a model computes on a tier, and the cache folder afterwards."""

from collections.abc import Callable
from pathlib import Path

from accel.native.tier import NativeTier
from accel.native.weight_cache import UNSYNCED
from reference.limits import Limits
from reference.model.open import open_model
from tests.model_runs import SHORT, Outcome, generate
from tests.patience import wait_until

Open = Callable[[], NativeTier]
LIMITS = Limits(1, 32, 2, step_tokens=8, step_rows=1)


def outcome(path: Path, tier: NativeTier) -> Outcome:
    """What a model computes on a tier."""
    model = open_model(path)
    with model.file:
        return generate(model, tier, SHORT)


def entries(folder: Path) -> list[Path]:
    """Everything in the folder but locks, once what is written in the background is written."""
    wait_until(lambda: not any(folder.glob(f"*{UNSYNCED}")))
    return sorted(path for path in folder.iterdir() if path.suffix != ".lock")
