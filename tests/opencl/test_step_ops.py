"""What opens, closes and reports a step, by work-groups: the code of accelerators."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from accel.opencl.device import Device
from accel.opencl.tier import OpenClTier
from contract.opcodes import Opcode
from contract.records import LAST_TOKEN
from harness.parity import Case, compare, generate
from harness.parity.operands import fill
from tests.opencl.conftest import OpenTier
from tests.opencl.work_groups import open_work_groups

OPCODES = (
    Opcode.LOAD_REQUEST_STATE,
    Opcode.STORE_REQUEST_STATE,
    Opcode.STREAM_OUT,
    Opcode.COPY_ROWS,
    Opcode.VERIFY_K,
    Opcode.SELECT_ROWS,
)


def cases() -> Iterator[Case]:
    """The parity suite's, of several seeds."""
    for opcode in OPCODES:
        yield from generate(opcode, repeats=3)


@pytest.fixture
def work_groups(
    open_opencl: OpenTier, device: Device, monkeypatch: pytest.MonkeyPatch
) -> OpenClTier:
    """A tier that takes its device for an accelerator."""
    return open_work_groups(open_opencl, device, monkeypatch)


def test_work_groups_keep_the_books_as_defined(work_groups: OpenClTier) -> None:
    """Slots with several tokens or rows in a step keep the last one's, whoever is first."""
    for case in cases():
        assert compare(work_groups, case) == {}, str(case)


def test_the_cases_have_tokens_only_the_device_knows() -> None:
    """Else the slot's last token would never be read."""
    loads = [case for case in cases() if case.opcode is Opcode.LOAD_REQUEST_STATE]
    assert any(np.any(fill(case)["query"][:, 0] == LAST_TOKEN) for case in loads)
