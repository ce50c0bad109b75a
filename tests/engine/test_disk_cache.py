"""A server that is restarted answers from pages on disk, with the bits of a cold run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SyntheticModel
from tests.engine.disk_engines import WHOLE, files, life, lived
from tests.engine.small_engine import ALL_TIERS as TIERS
from tests.families_table import DENSE, GEMMAS, HYBRIDS
from tests.named_tiers import on_each

MODELS = {
    "dense": DENSE["qwen3"],
    "hybrid": HYBRIDS["qwen35"],
    "window": GEMMAS["gemma3"],
}


@pytest.mark.parametrize(("tier", "name"), on_each(TIERS, MODELS, "dense"))
def test_a_restarted_server_gives_the_bits_of_a_cold_one(
    synthetic_model: SyntheticModel, name: str, tier: str, tmp_path: Path
) -> None:
    model = synthetic_model(**dict(MODELS[name]) | {"quant": "q8_0"})
    folder = tmp_path / "cache"
    with life(model, None, tier=tier) as cold:
        expected = cold.ask()
    with life(model, folder, tier=tier) as first:
        assert first.ask() == expected
        assert first.from_disk == 0
    with life(model, folder, tier=tier) as second:
        assert second.ask() == expected
        assert second.from_disk == second.loads.reused[1] == WHOLE
        assert second.counts.tokens == WHOLE
        assert second.ask() == expected
        assert second.from_disk == 0, "the second time it is in memory"
        second.engine.memory.check([])
    assert not [*first.lines, *second.lines]


def test_the_end_of_a_prompt_makes_room_before_its_beginning(
    synthetic_model: SyntheticModel, tmp_path: Path
) -> None:
    """The states of a hybrid, too, whatever order they were written in."""
    for kind in ("dense", "hybrid"):
        model = synthetic_model(**dict(MODELS[kind]) | {"quant": "q8_0"})
        folder = tmp_path / kind
        lived(model, folder)
        times = [path.stat().st_mtime_ns for path in files(folder)]
        assert times == sorted(times, reverse=True)
        assert len(set(times)) == WHOLE // 16
        states = {path.stem: path.stat().st_mtime_ns for path in files(folder, ".state")}
        pages = {path.stem: path.stat().st_mtime_ns for path in files(folder)}
        assert bool(states) == (kind == "hybrid")
        assert all(used < pages[name] for name, used in states.items())
