"""A simulated GPU of Intel's: a library of C with the functions of Level Zero that the tier calls,
which checks every call and executes the modules of SPIR-V it is given."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cffi

from accel.intel.api import LevelZero, load_level_zero
from accel.intel.runtime import Choices
from accel.intel.tier import IntelTier
from accel.native.compile import Compiler, find_compiler
from accel.native.names import Target
from accel.native.variants import machine
from tests.intel.spirv_c import translated
from tests.intel.spirv_types import Untranslated
from tests.needs import machine_lacks, need_device

FOLDER = Path(__file__).parent
HEADER = FOLDER.parents[1] / "accel" / "intel" / "ze_api.h"
PREFIX = Path(os.environ.get("LEVEL_ZERO_PREFIX", "/usr"))
"""Where Level Zero's loader and headers may be installed."""
SOURCES = ("fake_device.c", "fake_lists.c")
TARGET = Target("linux", "x86_64")
CONTROL = """
typedef struct { uint64_t memory_bytes, max_buffer_bytes;
    uint32_t drivers, integrated, fp16, spirv_minor, group_items, computes, hangs, looks, lost;
} BEHAVIOUR;
void fake_begin(const BEHAVIOUR *, const char *(*)(const uint8_t *, size_t, const char **));
BEHAVIOUR *fake_behaviour(void);
const char *fake_problems(void);
void fake_forget(void);
int fake_calls(void);
const char *fake_call(int);
void fake_fail(const char *, int, int);
int fake_leaked(void);
"""
KERNEL_OPTIONS = ("-w", "-O0", "-fvisibility=default")
"""Compiling takes longer than running."""
USUAL = {
    "memory_bytes": 1 << 30, "max_buffer_bytes": 1 << 29, "drivers": 1, "fp16": 1, "spirv_minor": 2,
    "group_items": 1024, "computes": 1,
}  # fmt: skip
"""The behaviour of a GPU that does everything right."""


@dataclass(frozen=True)
class Builder:
    """Compiles C to libraries in the folder ``cache``."""

    cache: Path
    compiler: Compiler

    def fake(self) -> Path:
        """The library of the simulated driver."""
        texts = {name: (FOLDER / name).read_text() for name in SOURCES}
        target = self._target("".join(texts.values()).encode())
        return target if target.exists() else self._built(target, texts, ("-Wall", "-Wextra"))

    def kernel(self, code: bytes) -> Path:
        """The library of a module of SPIR-V. Raises Untranslated."""
        target = self._target(code)
        if target.exists():
            return target
        return self._built(target, {"kernel.c": translated(code)}, KERNEL_OPTIONS)

    def _target(self, contents: bytes) -> Path:
        """The file of a library, whose name is a digest of what it is made from."""
        names = (
            *(FOLDER / "fake.h", FOLDER / "kernel.h", FOLDER / "spirv_c.py"),
            *(FOLDER / "spirv_types.py", HEADER),
        )
        words = [*self.compiler.compile_command(TARGET, []), *KERNEL_OPTIONS]
        data = contents + "".join(words).encode() + b"".join(n.read_bytes() for n in names)
        return self.cache / f"{hashlib.sha256(data).hexdigest()}.so"

    def driver(self, include: Path, target: Path) -> Path:
        """The simulated driver as a real loader opens it, made with the headers in ``include``."""
        texts = {name: (FOLDER / name).read_text() for name in (*SOURCES, "driver_tables.c")}
        return self._built(target, texts, ("-I", str(include)))

    def _built(self, target: Path, texts: dict[str, str], options: tuple[str, ...]) -> Path:
        command = self.compiler.compile_command(TARGET, [])
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache) as folder:
            made = []
            for name, text in texts.items():
                source = Path(folder, name)
                source.write_text(text)
                made.append(str(source.with_suffix(".o")))
                include = ["-I", str(FOLDER), "-I", str(HEADER.parent)]
                self._run([*command, *options, *include, str(source), "-o", made[-1]], folder)
            library = str(Path(folder, "library.so"))
            self._run([*self.compiler.link_command(TARGET), library, *made], folder)
            os.replace(library, target)
        return target

    @staticmethod
    def _run(command: list[str], folder: str) -> None:
        zig = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), f"{folder}/zig")
        subprocess.run(command, check=True, cwd=folder, env={**os.environ, **zig})


class Simulated:
    """One machine. ``zero`` is its library; ``behaviour`` are the fields of ``BEHAVIOUR`` in
    fake.h, which a test may set at any time. ``driver`` is that of ``Builder.driver`` where the
    machine's own loader opens it."""

    def __init__(self, cache: Path, driver: Path | None = None, **behaviour: int) -> None:
        self._builder = Builder(cache / "intel", find_compiler())
        self._ffi = _control()
        self._texts: list[Any] = []
        if driver is not None:
            self._fake: Any = self._ffi.dlopen(str(driver))
            self._begin(behaviour)
            self.zero: LevelZero = load_level_zero()
            return
        # Each copy is a library with a state of its own.
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder, "libze_loader.so.1")
            shutil.copyfile(self._builder.fake(), own)
            self.zero = load_level_zero((str(own),))
            self._fake = self._ffi.dlopen(str(own))
        self._begin(behaviour)

    def _begin(self, behaviour: dict[str, int]) -> None:
        signature = "char *(uint8_t *, size_t, char **)"
        self._translate = self._ffi.callback(signature, self._translated)
        given = self._ffi.new("BEHAVIOUR *", {**USUAL, **behaviour})
        self._fake.fake_begin(
            given,
            self._ffi.cast(
                "const char *(*)(const uint8_t *, size_t, const char **)", self._translate
            ),
        )
        self.behaviour: Any = self._fake.fake_behaviour()

    @property
    def problems(self) -> list[str]:
        """Every rule that was broken, with the function that noticed it."""
        return self._ffi.string(self._fake.fake_problems()).decode().splitlines()

    @property
    def leaked(self) -> int:
        """Objects and allocations that were not destroyed."""
        return int(self._fake.fake_leaked())

    @property
    def calls(self) -> list[str]:
        """The functions that were called since ``forget``."""
        numbers = range(self._fake.fake_calls())
        return [self._ffi.string(self._fake.fake_call(n)).decode() for n in numbers]

    def forget(self) -> None:
        """Forget calls and problems."""
        self._fake.fake_forget()

    def fail(self, function: str, number: int = 1, result: str = "ERROR_UNKNOWN") -> None:
        """The next call number ``number`` of a function gives an error."""
        self._fake.fake_fail(function.encode(), number, self.zero.constant(f"RESULT_{result}"))

    def _translated(self, code: Any, nbytes: int, log: Any) -> Any:
        """The path of the library of a module; NULL and a log where there is none."""
        try:
            path = self._builder.kernel(bytes(self._ffi.buffer(code, nbytes)))
        except (Untranslated, ValueError) as error:
            self._texts.append(self._ffi.new("char[]", str(error).encode()))
            log[0] = self._texts[-1]
            return self._ffi.NULL
        self._texts.append(self._ffi.new("char[]", str(path).encode()))
        return self._texts[-1]


@cache
def _control() -> Any:
    ffi = cffi.FFI()
    ffi.cdef(CONTROL)
    return ffi


def new_gpu(cache: Path, **behaviour: int) -> Simulated:
    """A machine with a simulated GPU; skips where it cannot run."""
    if not (sys.platform == "linux" and machine() == "x86_64"):
        machine_lacks("x86-64 processor with Linux, whose code the simulated GPU runs")
    return need_device(lambda: Simulated(cache, **behaviour))


@contextmanager
def intel_tier(cache: Path, **choices: Any) -> Iterator[IntelTier]:
    """A tier on a machine where nothing goes wrong and nothing is left over."""
    gpu = new_gpu(cache)
    with IntelTier(choices=Choices(cache=cache / "intel", **choices), zero=gpu.zero) as tier:
        yield tier
    assert (gpu.problems, gpu.leaked) == ([], 0)
