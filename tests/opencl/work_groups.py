"""A tier that takes a processor for an accelerator: the code in which a work-group shares a row."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import pytest

from accel.opencl import program, runtime
from accel.opencl import tier as tier_module
from accel.opencl.device import Device
from accel.opencl.launcher import Mode
from accel.opencl.tier import OpenClTier
from contract.dtypes import DType
from tests.opencl.conftest import OpenTier


def open_work_groups(
    open_opencl: OpenTier,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    ops: Sequence[str],
    formats: Collection[DType] = (),
) -> OpenClTier:
    """A tier that launches ``ops`` in work-groups, its products knowing ``formats`` only.

    A processor's compiler takes minutes for work-groups of the whole program.
    """
    monkeypatch.setattr(tier_module, "find_device", lambda name: replace(device, is_cpu=False))
    monkeypatch.setattr(runtime, "step_files", partial(program.step_files, ops))
    text = program.kernel_text

    def chosen(name: str) -> str:
        return products_of(text(name), formats) if name == "matmul.cl" else text(name)

    monkeypatch.setattr(program, "kernel_text", chosen)
    return open_opencl(mode=Mode.LAUNCH)


def products_of(text: str, formats: Collection[DType]) -> str:
    """The text of ``matmul.cl`` without the code of all but ``formats``."""
    known = {dtype.name.upper() for dtype in formats}
    cases = r"\n *ROWS_CASE\((\w+)\)(?=\n)"
    return re.sub(cases, lambda case: case[0] if case[1] in known else "", text)
