"""Weights arranged by the device: the bytes that the layout's definition gives."""

from __future__ import annotations

import numpy as np
import pytest

from contract.dtypes import WEIGHT_DTYPES, DType, StorageClass
from contract.ir.nodes import BufferDecl, BufferKind

pytest.importorskip("pyopencl", reason="needs pip install 'zinc-rt[opencl]'")

from accel.opencl import arrange
from accel.opencl import tier as tier_module
from accel.opencl.launcher import Mode
from accel.opencl.tier import OpenClTier
from accel.packets.layouts import Layout, repack

from dataclasses import replace
import time
QUANTIZED = tuple(d for d in WEIGHT_DTYPES if d.storage is not StorageClass.FLOAT)
SHAPES = ((1,1,1),(1,16,1),(1,37,3),(3,19,2),(2,48,5),(1,100,1))

@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("way", ["cpu","banked"])
def test_bytes(open_opencl, dtype, way):
    tier = open_opencl(shared_addresses=None if way=="cpu" else False)
    rng=np.random.default_rng(0)
    for m, rows, units in SHAPES:
        cols=units*dtype.block_elements
        data = rng.integers(0,256,(m*rows, dtype.row_bytes(cols)),np.uint8)
        decl = BufferDecl("w", BufferKind.WEIGHT, dtype, (m,rows,cols) if m>1 else (rows,cols))
        b = tier.upload(decl, data)
        got = tier._memory.read(b.matrix.allocation,0,b.matrix.allocation.nbytes)
        exp = repack(dtype,data,m)
        assert (got.reshape(exp.bytes.shape)==exp.bytes).all(), (m,rows,units)
        tier.free(b)
