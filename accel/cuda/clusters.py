"""Blocks that run side by side and reach each other's shared memory."""

from __future__ import annotations

from accel.cuda.device import Device

LEAST_CAPABILITY = (9, 0)
SIZE = 2
"""Blocks of a cluster. Multiprocessors always come in twos; clusters of four leave some of them
without a block, since a cluster lies within one part of the device."""


def cluster_grid(tiles: int, blocks: int, device: Device) -> tuple[int, int]:
    """Blocks of a cluster and of a grid of at most ``blocks`` that take ``tiles`` in turn: clusters
    share each of theirs where no block has more to do than by itself."""
    alone = min(tiles, blocks)
    clusters = max(1, min(tiles, blocks // SIZE))
    if device.capability < LEAST_CAPABILITY or -(-tiles // clusters) > SIZE * -(-tiles // alone):
        return 1, alone
    return SIZE, clusters * SIZE
