"""A second pair of hands: the mock GPU of tinygrad reads the same packets and runs the same code.

Needs a checkout of https://github.com/tinygrad/tinygrad (its wheel has no tests), whose folder
ZINC_RT_TINYGRAD names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.tier import AmdTier
from accel.amd.tools.build import COMPILER
from accel.amd.tools.trace import Trace, Tracer
from harness.parity.execute import compare
from tests.amd.code import need_program
from tests.amd.test_packets import changed, traced
from tests.amd.test_tier import DEPENDENT
from tests.needs import machine_lacks

pytestmark = pytest.mark.soak

FOLDER = os.environ.get("ZINC_RT_TINYGRAD", "")
READER = Path(__file__).with_name("tinygrad_reader.py")
SECONDS = 600


def gone_through(trace: Trace, path: Path) -> int:
    """How many submissions leave the same bytes in memory."""
    if not Path(FOLDER, "test", "mockgpu").is_dir():
        machine_lacks("checkout of tinygrad (ZINC_RT_TINYGRAD)")
    trace.save(path)
    environment = os.environ | {
        "PYTHONPATH": FOLDER,
        "DEV": "MOCK+AMD::gfx1201",
        "CC": need_program(COMPILER),
    }
    command = [sys.executable, str(READER), str(path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, cwd=path.parent
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_packets(tmp_path):
    """Those of the packet tests; a digest changed is noticed."""
    trace = traced("t1")
    count = len(trace.submissions)
    assert gone_through(trace, tmp_path / "packets.npz") == count
    other = changed(trace, 6, digests=trace.submissions[6].digests ^ 1)
    assert gone_through(other, tmp_path / "changed.npz") == 6


def test_an_op_of_several_launches(tmp_path):
    """A step of a norm and two products: recording, buffer, waits between launches, fence."""
    kernel = FakeKernel()
    with AmdTier(kernel=kernel) as tier:
        tracer = Tracer(tier._device, tier._runtime.queue)
        tracer.attach()
        assert compare(tier, DEPENDENT) == {}
        tier._runtime.queue.observer = None
    assert len(tracer.trace.submissions) == 1
    assert gone_through(tracer.trace, tmp_path / "op.npz") == 1
