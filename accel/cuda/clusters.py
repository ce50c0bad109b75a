"""Clusters: blocks that run at the same time and access each other's shared memory."""

from __future__ import annotations

from accel.cuda.device import Device

LEAST_CAPABILITY = (9, 0)
SIZE = 2
"""Blocks of a cluster. Multiprocessors come in pairs; clusters of four leave some without a block,
since a cluster lies within one part of the device."""


def cluster_grid(tiles: int, blocks: int, device: Device) -> tuple[int, int]:
    """Blocks of a cluster, and of a grid of at most ``blocks``, that compute ``tiles`` in turn.

    A cluster is used where sharing tiles gives no block more work than without one.
    """
    alone = min(tiles, blocks)
    clusters = max(1, min(tiles, blocks // SIZE))
    if device.capability < LEAST_CAPABILITY or -(-tiles // clusters) > SIZE * -(-tiles // alone):
        return 1, alone
    return SIZE, clusters * SIZE
