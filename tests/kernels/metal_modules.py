"""Metal texts of the kernel dialect as C++: a tier whose launches they are."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import Language, Module, module_of, module_source
from accel.opencl.launcher import LaunchContext, Recording
from accel.opencl.modules import ModuleLauncher
from accel.packets.step import Op
from tests.needs import missing

SHIM = Path(__file__).parent / "metal"
OPTIONS = (
    *("-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Werror"),
    *("-Wno-attributes", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-variable"),
)
ADDRESS = ctypes.c_uint64

Run = Callable[..., int]


class MetalError(Exception):
    """What the compiler says of a text, or what a launch did wrong."""


def compiled(module: Module, text: str, folder: Path) -> Run:
    """The module's launch as a function of scratch, inputs, packets, index and groups."""
    gcc = shutil.which("g++") or missing("g++ is not installed", "apt-get install g++")
    source, library = folder / f"{module}.cpp", folder / f"{module}.so"
    tail = f'#define ENTRY {module.entry}\n#include "run.h"\n'
    source.write_text(text + tail, encoding="utf-8")
    command = [gcc, *OPTIONS, "-I", str(SHIM), "-o", str(library), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise MetalError(result.stderr)
    run = ctypes.CDLL(str(library)).run
    run.argtypes = [ADDRESS, ADDRESS, ADDRESS, ctypes.c_uint32, ctypes.c_uint32]
    return run  # type: ignore[no-any-return]


class MetalLauncher(ModuleLauncher):
    """Launches of C++ on the host's memory, done when they are enqueued. ``folder`` holds what is
    compiled."""

    folder: Path

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._runs: dict[Module, Run] = {}

    def run_of(self, module: Module) -> Run:
        """Compiles a module when it is first wanted."""
        if module not in self._runs:
            text = module_source(Language.METAL, module, self._traits)
            self._runs[module] = compiled(module, text, self.folder)
        return self._runs[module]

    def record(self, packets: NDArray[np.void], address: int, ops: Sequence[Op]) -> Recording:
        """See Launcher."""
        launches = []
        for op in ops:
            module = module_of(op)
            groups = op.launch_groups(module.group_size, self._groups)
            launches.append((self.run_of(module), groups))
        return _Recording(self.launch, launches, address)

    def run_alone(self, module: Module, packet: NDArray[np.void], buffers: Sequence[Any]) -> None:
        """See ModuleLauncher."""
        _checked(self.run_of(module)(0, 0, packet.ctypes.data, 0, self._groups))


class _Recording:
    def __init__(
        self, launch: LaunchContext, launches: Sequence[tuple[Run, int]], address: int
    ) -> None:
        self._launch = launch
        self._launches = launches
        self._address = address

    def enqueue(self, inputs: int, tokens: int) -> Any:
        """See Recording."""
        launch = self._launch
        launch.queue.finish()
        for index, (run, groups) in enumerate(self._launches):
            _checked(run(launch.scratch.shared, inputs, self._address, index, groups))
        return launch.cl.enqueue_marker(launch.queue)


def _checked(together: int) -> None:
    if not together:
        raise MetalError("some items of a group met at a barrier that others passed by")
