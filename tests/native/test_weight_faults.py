"""Faults while weights are arranged: the same bits, nothing lost, and a clear word or none."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from accel.native import weight_cache
from accel.native.weight_cache import PARTIAL, SYNCED, UNSYNCED
from contract.errors import ModelFileError
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.full_disk import largest_file
from tests.model_runs import assert_same
from tests.native.weight_starts import LIMITS, entries, outcome
from tests.needs import machine_lacks
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS


def test_a_folder_that_cannot_be_written_is_done_without(model_path, open_native, folder, expected):
    """One line says so."""
    folder.parent.mkdir()
    folder.write_bytes(b"a file")
    tier = open_native(threads=2, weights=folder)
    lines: list[str] = []
    tier._weights.progress = lines.append
    assert_same(expected, outcome(model_path, tier))
    assert len(lines) == 1
    assert "cannot be stored" in lines[0]
    assert folder.read_bytes() == b"a file"


def test_a_folder_that_cannot_be_entered_has_no_entries(tmp_path, model_path):
    """Such as one of another user; root may enter any, but none has so long a name."""
    folder = tmp_path / ("n" * 300) / "weights"
    assert not weight_cache.has_entry(folder, model_path)
    assert weight_cache.usage(folder) == (0, 0)
    assert weight_cache.remove_entries(folder, [model_path]) == 0


def test_a_full_disk_leaves_nothing_behind(model_path, open_one, folder, expected):
    """The space is reserved before anything is written; one line says that there is none."""
    tier = open_one()
    lines: list[str] = []
    tier._weights.progress = lines.append
    with largest_file(100_000):
        assert_same(expected, outcome(model_path, tier))
    assert entries(folder) == []
    assert len(lines) == 1
    assert_same(expected, outcome(model_path, open_one()))
    assert len(entries(folder)) == 1


def test_a_disk_is_not_filled(model_path, open_one, folder, monkeypatch):
    """What would leave less room than it takes is not written."""
    monkeypatch.setattr(weight_cache, "FREE_SHARE", 1 << 60)
    outcome(model_path, open_one())
    assert entries(folder) == []


def test_an_interrupt_leaves_nothing_behind(model_path, open_one, open_native, folder, expected):
    """The same tier goes on, and the next start arranges."""
    tier, idle, seen = open_one(), open_native(threads=2), 0

    def interrupt(nbytes: int) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            raise KeyboardInterrupt

    model = open_model(model_path)
    with model.file:
        with pytest.raises(KeyboardInterrupt):
            ModelRunner(model, tier, LIMITS, interrupt)
        ModelRunner(model, idle, LIMITS).close()
    assert seen == 5
    assert entries(folder) == []
    assert tier.allocated_bytes == idle.allocated_bytes
    assert_same(expected, outcome(model_path, tier))
    assert len(entries(folder)) == 1


def test_a_broken_weight_is_refused_and_not_stored(model_path, open_one, folder):
    """By the name of its tensor."""
    with open_model(model_path).file as file:
        tensor = next(t for t in file.tensors.values() if t.dtype.name == "q4_k")
        start = file.tensor_bytes(tensor.name).ctypes.data
        base = np.frombuffer(file.shards[0].mapping, np.uint8).ctypes.data
    with model_path.open("r+b") as raw:
        raw.seek(start - base + 144)
        raw.write(b"\xff\x7f")
    time.sleep(0.05)
    model = open_model(model_path)
    with model.file, pytest.raises(ModelFileError, match=f"{tensor.name}.*\n?.*row"):
        ModelRunner(model, open_one(), LIMITS)
    assert entries(folder) == []


SCRIPT = """
import os, signal, sys
from pathlib import Path
from accel.native import model_weights, weight_cache
from accel.native.tier import Choices, NativeTier
from reference.model.open import open_model
from tests.model_runs import SHORT, generate

weight_cache.MIN_BYTES = 1
fill, how = model_weights.ModelWeights._fill, sys.argv[4]

def noted(self, weights, target):
    print("arranged", flush=True)
    if how == "kill":
        target[: target.nbytes // 2] = 1
        os.kill(os.getpid(), signal.SIGKILL)
    return fill(self, weights, target)

model_weights.ModelWeights._fill = noted
choices = Choices(threads=2, cache=Path(sys.argv[1]), weights=Path(sys.argv[2]))
with NativeTier(choices=choices, progress=print) as tier:
    model = open_model(Path(sys.argv[3]))
    print(generate(model, tier, SHORT)[0], flush=True)
"""


def script(kernel_cache: Path, folder: Path, model_path: Path, how: str = "") -> list[str]:
    """The command of a process that runs the model."""
    return [sys.executable, "-c", SCRIPT, *map(str, (kernel_cache, folder, model_path)), how]


def test_two_processes_arrange_once(model_path, kernel_cache, folder, expected):
    """The second waits for the first and maps its file."""
    command = script(kernel_cache, folder, model_path)
    started = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    lines = [process.communicate(timeout=PROCESS_SECONDS)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert [found[-1] for found in lines] == [str(expected[0])] * 2
    assert sum(line == "arranged" for found in lines for line in found) == 1
    # A process may end before its entry is on disk: then the entry keeps its first name.
    (entry,) = (path for path in folder.iterdir() if path.suffix != ".lock")
    assert entry.suffix in (SYNCED, UNSYNCED)


def test_a_killed_process_leaves_no_entry(model_path, kernel_cache, open_one, folder, expected):
    """What it had written is removed by the next start."""
    command = script(kernel_cache, folder, model_path, "kill")
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, timeout=PROCESS_SECONDS, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert [path.suffix for path in entries(folder)] == [PARTIAL]
    assert_same(expected, outcome(model_path, open_one()))
    assert [path.suffix for path in entries(folder)] == [SYNCED]


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "with the entry"])
def test_a_read_only_file_system(model_path, kernel_cache, open_one, folder, expected, filled):
    """An entry is used; without one a line says why none is written."""
    mounted = ["unshare", "--mount", "--map-root-user", "sh", "-c", READ_ONLY, str(folder)]
    folder.mkdir(parents=True)
    if filled:
        outcome(model_path, open_one())
        entries(folder)
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        machine_lacks("way to mount a folder read-only")
    command = [*mounted, *script(kernel_cache, folder, model_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[-1:] == [str(expected[0])], done.stderr
    assert [("Read-only file system" in line) for line in lines[:-1]] == ([] if filled else [True])
