"""Tuned kernels on the CPU, compiled as C++ over ``warp_emulator.h``: the bits without a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from accel.cuda.program import Source
from tests.needs import missing

EMULATOR = Path(__file__).with_name("warp_emulator.h")
BLOCKS = Path(__file__).with_name("block_emulator.cpp")
OPTIONS = ("-std=c++17", "-Og", "-ffp-contract=off", "-fPIC", "-w")
# Kernels use none of the C++ library. Without it C's headers are half as much to load for each.
KERNEL = ("-nostdinc++",)
LINUX = sys.platform == "linux"
# Most of linking is reading what libraries of the system define, of which kernels use little.
LINKED = ("-shared", "-nodefaultlibs") if LINUX else ("-shared",)
LIBRARIES = ("libstdc++.so.6", "libm.so.6") if LINUX else ()
BUILT = "kernels"
"""The folder of a test's folder that kernels are built into."""
TOGETHER = ("expert_token",)
"""Kernels of one device whose blocks exchange floats."""
SEEDS = count(1)
"""Of the order of the blocks of such launches, one after the other."""
MAX_TURNS = 20000
"""Turns of blocks after which a launch is taken to wait forever."""
ENTRY = re.compile(
    r'extern "C" __global__ void\s+(?:__cluster_dims__\((?P<cluster>\w+)[^)]*\)\s+)?'
    r"(?:__launch_bounds__\([^)]*\)\s+)?(?P<entry>\w+)\((?P<parameters>[^)]*)\)"
)


@dataclass(frozen=True, slots=True)
class Emulated:
    """Kernels of one source."""

    library: ctypes.CDLL

    def run(self, entry: str, grid: tuple[int, int, int], threads: int, *arguments: int) -> None:
        """Every block of a launch, or every cluster of them, one after the other; blocks of kernels
        in TOGETHER at once."""
        if entry in TOGETHER:
            done = self.run_together(entry, grid[0], threads, next(SEEDS), *arguments)
            assert done, "it waits for what never comes"
            return
        run = getattr(self.library, f"run_{entry}")
        run(*map(ctypes.c_uint, grid[:2]), ctypes.c_uint(threads), *map(ctypes.c_uint64, arguments))

    def run_together(
        self,
        entry: str,
        blocks: int,
        threads: int,
        seed: int,
        *arguments: int,
        device: int = 1,
        turns: int = MAX_TURNS,
    ) -> bool:
        """All blocks of a cooperative launch at once, in an order drawn from ``seed``, what they
        store for each other arriving late; False where they wait forever. Groups of ``device``
        blocks are late together."""
        run = getattr(self.library, f"run_together_{entry}")
        run.restype = ctypes.c_bool
        numbers = map(ctypes.c_uint, (blocks, threads, seed, device, turns))
        return bool(run(*numbers, *map(ctypes.c_uint64, arguments)))


def keep_kernels(folder: Path, cache: Path) -> None:
    """Have the kernels of tests in ``folder`` built in ``cache``, for other processes and runs too:
    under a name that changes with the emulator and with the compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True)
    texts = [path.read_bytes() for path in sorted(EMULATOR.parent.glob("*_emulator.*"))]
    parts = (version.stdout, repr((OPTIONS, KERNEL, LINKED)).encode(), *texts)
    kept = cache / f"emulated-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:20]}"
    kept.mkdir(parents=True, exist_ok=True)
    (folder / BUILT).symlink_to(kept, target_is_directory=True)


def emulate(source: Source, folder: Path) -> Emulated:
    """The kernels of ``source``, built once."""
    compiler = shutil.which("g++") or missing("there is no g++", "apt install g++")
    folder = folder / BUILT
    folder.mkdir(exist_ok=True)
    # Behind the headers of the system, which have other uses for such names.
    macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
    text = f'#include "{EMULATOR.name}"\n' + macros + source.text + _runners(source.text)
    name = hashlib.sha256(text.encode()).hexdigest()[:20]
    library = folder / f"{name}.so"
    if not library.exists():
        once = _compiled_once(compiler, folder)
        code = folder / f"{name}-{os.getpid()}.cpp"
        code.write_text(text, encoding="utf-8")
        blocks = str(once / BLOCKS.with_suffix(".o").name)
        _compile(compiler, *KERNEL, *LINKED, f"-I{once}", str(code), blocks, to=library)
        code.unlink()
    for needed in LIBRARIES:
        ctypes.CDLL(needed, ctypes.RTLD_GLOBAL)
    return Emulated(ctypes.CDLL(str(library)))


def _compiled_once(compiler: str, folder: Path) -> Path:
    """Where ``warp_emulator.h`` is found as the compiler keeps it, and what runs blocks: parsed and
    compiled once for all kernels."""
    once = folder / "once"
    if once.exists():
        return once
    with tempfile.TemporaryDirectory(dir=folder) as parent:
        made = Path(parent, once.name)
        made.mkdir()
        # What kernels call the most; options behind others count.
        blocks = made / BLOCKS.with_suffix(".o").name
        _compile(compiler, "-O3", "-c", str(BLOCKS), to=blocks)
        for one in EMULATOR.parent.glob("*_emulator.h"):
            shutil.copy(one, made)
        header = made / EMULATOR.name
        parsed = header.with_name(f"{header.name}.gch")
        _compile(compiler, *KERNEL, "-x", "c++-header", str(header), to=parsed)
        with suppress(OSError):  # another process was first
            made.rename(once)
    return once


def _compile(compiler: str, *words: str, to: Path) -> None:
    # Nobody finds half of it where a compiler was stopped, or where another process builds it.
    part = to.with_name(f"{to.name}.{os.getpid()}")
    command = [compiler, *OPTIONS, *words, "-o", str(part)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:4000]
    part.replace(to)


def _runners(text: str) -> str:
    """A function for every kernel that runs it with arguments of 64 bits, packets by address."""
    return "".join(_runner(**match.groupdict()) for match in ENTRY.finditer(text))


def _runner(cluster: str | None, entry: str, parameters: str) -> str:
    kinds = [re.sub(r"\w+$", "", one.strip()).strip() for one in parameters.split(",")]
    values = ", ".join(
        f"*({kind.replace('__grid_constant__', '')} *)arguments[{i}]"
        if "__grid_constant__" in kind
        else f"({kind})arguments[{i}]"
        for i, kind in enumerate(kinds)
    )
    names = ", ".join(f"uint64_t a{i}" for i in range(len(kinds)))
    stores = " ".join(f"arguments[{i}] = a{i};" for i in range(len(kinds)))
    row = "emulator::run_blocks(grid_x, threads, body);"
    if cluster:
        row = f"emulator::run_clusters(grid_x / ({cluster}), {cluster}, threads, body);"
    return f"""
namespace of_{entry} {{
static uint64_t arguments[{len(kinds)}];
static void body() {{ {entry}({values}); }}
}}
extern "C" void run_{entry}(unsigned grid_x, unsigned grid_y, unsigned threads, {names}) {{
    using namespace of_{entry};
    {stores}
    gridDim = {{grid_x, grid_y, 1}};
    blockDim = {{threads, 1, 1}};
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++) {row}
    emulator::end_launch(0, ~0u);
}}
extern "C" bool run_together_{entry}(unsigned blocks, unsigned threads, unsigned seed,
                                     unsigned device, unsigned turns, {names}) {{
    using namespace of_{entry};
    {stores}
    gridDim = {{blocks, 1, 1}};
    blockDim = {{threads, 1, 1}};
    blockIdx.y = 0;
    return emulator::run_together(blocks, threads, seed, device, turns, body);
}}
"""
