"""Files that another program cuts while they are mapped: an error that names the file, for the one
model that reads it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.weight_starts import entries, outcome
from tests.paths import ROOT

SCRIPT = """
import os, signal, sys
from pathlib import Path
from accel.native import model_weights, tier, weight_cache
from accel.native.pool import WorkerPool
from accel.native.tier import Choices, NativeTier
from contract.errors import ModelFileError
from reference.model.gguf.shard import Shard
from reference.model.open import open_model
from tests.model_runs import SHORT, generate

Shard.check_unchanged = lambda shard: None
weight_cache.MIN_BYTES = 1
if sys.argv[6] == "step":
    tier.COPIED_BYTES = 0
kernels, folder, path, other = map(Path, sys.argv[1:5])
cut, moment = Path(sys.argv[5]), sys.argv[6]
submit, steps = WorkerPool.submit, 0

def cut_first(pool, job):
    # The step that is about to run was checked before, and reads what is gone.
    global steps
    steps += bool(job.input) if moment in ("step", "copied") else moment == "upload"
    if steps == 3 and pool is tier._pool:
        os.truncate(cut, 4096)
    return submit(pool, job)

def choices():
    return Choices(threads=2, cache=kernels, weights=folder)

with NativeTier(choices=choices()) as beside:
    second = open_model(other)
    expected = generate(second, beside, SHORT)[0]
    with NativeTier(choices=choices()) as tier:
        WorkerPool.submit = cut_first
        try:
            generate(open_model(path), tier, SHORT)
        except ModelFileError as error:
            print(error.path, error.where, error.problem, sep="|", flush=True)
    assert generate(second, beside, SHORT)[0] == expected
if moment == "no file":
    os.kill(os.getpid(), signal.SIGBUS)
"""


def cut_under(
    kernel_cache: Path, folder: Path, model: Path, other: Path, cut: Path, moment: str
) -> subprocess.CompletedProcess[str]:
    """The end of a process in which ``cut`` loses its bytes in a step or an upload of a model."""
    paths = map(str, (kernel_cache, folder, model, other, cut))
    command = [sys.executable, "-c", SCRIPT, *paths, moment]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("moment", ["step", "upload"])
def test_a_model_file_that_is_cut_is_an_error_of_its_model(
    kernel_cache, open_native, folder, model_path, tiny_model_path, moment
):
    """It names the file and a byte behind its end. The model beside it answers as before, and no
    weight that was not read is kept."""
    open_native(threads=1)
    done = cut_under(kernel_cache, folder, model_path, tiny_model_path, model_path, moment)
    assert done.returncode == 0, done.stderr
    path, where, problem = done.stdout.strip().split("|")
    assert path == str(model_path)
    assert int(where.removeprefix("byte ")) >= 4096
    assert "4096 bytes now" in problem
    assert len(entries(folder)) == (2 if moment == "step" else 1)


def test_a_cut_model_file_that_no_step_reads_is_no_error(
    kernel_cache, open_native, folder, model_path, tiny_model_path
):
    """All its weights are arranged or copied."""
    open_native(threads=1)
    done = cut_under(kernel_cache, folder, model_path, tiny_model_path, model_path, "copied")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_cache_file_that_is_cut_is_an_error_of_its_model(
    kernel_cache, open_one, folder, model_path, tiny_model_path
):
    """The next start arranges the weights anew."""
    expected = outcome(model_path, open_one())
    (entry,) = entries(folder)
    done = cut_under(kernel_cache, folder, model_path, tiny_model_path, entry, "step")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(entry))
    assert outcome(model_path, open_one())[0] == expected[0]


def test_a_signal_that_is_no_lost_page_ends_the_process(
    kernel_cache, open_native, folder, model_path
):
    """As it does without the tier."""
    open_native(threads=1)
    done = cut_under(kernel_cache, folder, model_path, model_path, model_path, "no file")
    assert done.returncode == -signal.SIGBUS
