"""How many blocks of a launch share what they read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accel.cuda.device import cluster_grid
from tests.cuda.emulated_step import DEVICE, OLDER

WIDE = replace(DEVICE, multiprocessors=132)


@pytest.mark.parametrize(
    ("tiles", "blocks", "want"),
    [
        (768, 132, (2, 132)),
        (5, 132, (2, 10)),
        (1, 132, (2, 2)),
        (9496, 132, (2, 132)),
        (256, 45, (2, 44)),
        (45, 45, (1, 45)),
    ],
)
def test_clusters_leave_no_block_more_to_do(tiles: int, blocks: int, want: tuple[int, int]) -> None:
    """Where one that is left over would, there are none."""
    assert cluster_grid(tiles, blocks, WIDE) == want


def test_older_devices_have_none() -> None:
    """Nor does a grid there have more blocks than tiles."""
    assert cluster_grid(768, 132, replace(OLDER, multiprocessors=132)) == (1, 132)
    assert cluster_grid(5, 132, replace(OLDER, multiprocessors=132)) == (1, 5)
