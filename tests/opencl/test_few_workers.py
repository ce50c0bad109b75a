"""A processor of many cores, of which a step uses some: as many as are fastest then."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel.opencl.tier import OpenClTier
from accel.packets.device_op import Split
from accel.packets.ops import OPS
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from tests.needs import need_device
from tests.patience import PROCESS_SECONDS

THREADS = 8


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory) -> Path:
    """One whose logits take a worker longer than it takes to start with the next op."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    write_synthetic(path, sized_spec("tiny", quant="q8_0", vocab=16384))
    return path


@pytest.mark.parametrize("workers", [3, 8])
def test_tokens_are_those_of_the_largest_logits(workers, wide_model):
    """PoCL is told of more threads than there are cores."""
    need_device(lambda: OpenClTier().close())
    program = [sys.executable, "-m", "tests.opencl.sampled_by_few"]
    done = subprocess.run(
        [*program, str(wide_model), str(THREADS), str(workers)],
        env={**os.environ, "POCL_MAX_PTHREAD_COUNT": str(THREADS)},
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tokens, largest = json.loads(done.stdout.splitlines()[-1])
    assert tokens == largest


def test_who_divides_parts_does_not_divide_columns():
    """Parts are as many as the device has workers, whatever number of them a step has: a worker's
    part is not its share of the columns."""
    for op in OPS:
        if op.name.endswith("_part"):
            assert {operand.split for operand in op.operands} <= {Split.ANY}, op.name
