"""Exported plans for tests: making them, the C library through ctypes, and compiled C programs."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.native.c_library import FOLDER, INCLUDE, SOURCES, definitions
from accel.native.plan_export import sealed
from accel.native.plan_file import ABI, HEADER
from contract.dtypes import DEFAULT_KV
from harness.cli.export_plan_command import export
from harness.host.options import SessionOptions
from harness.tiers import TierOptions
from tests.needs import machine_lacks

CONTEXT, CHUNK, SLOTS, THREADS = 96, 8, 2, 2
HEADER_TEXT = (INCLUDE / "zinc_rt.h").read_text(encoding="utf-8")
CODES = {name: int(number) for name, number in re.findall(r"ZINC_RT_(\w+) = (\d+)", HEADER_TEXT)}
FOREVER = 2**64 - 1
IN_FLIGHT = 4
LAST_TOKEN = -1

ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class PlanRecord(ctypes.Structure):
    """``zinc_rt_plan``."""

    _fields_ = (("state", ctypes.c_void_p), ("text", ctypes.c_char * 256))


class OptionsRecord(ctypes.Structure):
    """``zinc_rt_options``."""

    _fields_ = (
        ("threads", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("weights", ctypes.c_char_p),
        ("kernels", ctypes.c_char_p),
        ("allocate", ALLOCATE),
        ("release", RELEASE),
        ("context", ctypes.c_void_p),
    )


class InfoRecord(ctypes.Structure):
    """``zinc_rt_info``."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("abi", "arithmetic", "slots", "context", "pages")),
        *((name, ctypes.c_uint32) for name in ("slot_pages", "page_positions", "tokens", "rows")),
        *((name, ctypes.c_uint32) for name in ("vocab", "recent", "threads", "buffers")),
        ("recurrent", ctypes.c_uint32),
        ("memory_bytes", ctypes.c_uint64),
        ("weights_bytes", ctypes.c_uint64),
        *((name, ctypes.c_char_p) for name in ("model", "kv_dtype", "variant", "digest")),
    )


class BufferRecord(ctypes.Structure):
    """``zinc_rt_buffer``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("memory", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class StepRecord(ctypes.Structure):
    """``zinc_rt_step``."""

    _fields_ = (
        ("tokens", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("token", "row", "sampling", "pages", "logits")),
    )


SAMPLING = np.dtype(
    [
        *((name, "<f4") for name in ("temperature", "top_p", "min_p", "repeat_penalty")),
        *((name, "<f4") for name in ("presence_penalty", "frequency_penalty")),
        ("top_k", "<i4"),
        ("repeat_last_n", "<i4"),
        ("seed", "<u8"),
    ]
)
"""``zinc_rt_sampling``."""


class Refused(Exception):
    """A code other than OK, by its name, and the plan's text."""

    def __init__(self, code: int, text: str) -> None:
        self.name = next(name for name, number in CODES.items() if number == code)
        self.text = text
        super().__init__(f"{self.name}: {text}")


class CPlan:
    """A plan through the C library; every method raises Refused."""

    def __init__(self, library: Path) -> None:
        self.library: Any = ctypes.CDLL(str(library))
        self.record = PlanRecord()
        self._owned: Any = None

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function whose first parameter is the plan."""
        code = self.library[f"zinc_rt_{name}"](ctypes.byref(self.record), *arguments)
        if code != CODES["OK"]:
            raise Refused(code, self.record.text.decode(errors="replace"))

    def open(
        self,
        path: Path,
        *,
        abi: int = ABI,
        threads: int = THREADS,
        weights: Path | None = None,
        kernels: Path | None = None,
        allocate: Callable[..., Any] | None = None,
        release: Callable[..., Any] | None = None,
    ) -> CPlan:
        """Open the plan at ``path``."""
        options = OptionsRecord(
            threads,
            0,
            None if weights is None else bytes(weights),
            None if kernels is None else bytes(kernels),
            ALLOCATE(0) if allocate is None else ALLOCATE(allocate),
            RELEASE(0) if release is None else RELEASE(release),
        )
        self._owned = options
        self.call("open", ctypes.c_uint32(abi), bytes(path), ctypes.byref(options))
        return self

    def info(self) -> Any:
        """The sizes of the plan."""
        info = InfoRecord()
        self.call("get_info", ctypes.byref(info))
        return info

    def buffers(self) -> dict[str, tuple[NDArray[np.uint8], bool]]:
        """Every buffer by name: its memory, and whether it may be written."""
        found = {}
        for index in range(self.info().buffers):
            buffer = BufferRecord()
            self.call("get_buffer", ctypes.c_uint32(index), ctypes.byref(buffer))
            memory = (ctypes.c_uint8 * buffer.bytes).from_address(buffer.memory)
            name, writable = buffer.name.decode(), bool(buffer.writable)
            found[name] = np.ctypeslib.as_array(memory), writable
        return found

    def submit(
        self,
        tokens: Sequence[tuple[int, int, int]],
        rows: Sequence[int] = (),
        *,
        sampling: NDArray[np.void] | None = None,
        pages: NDArray[np.int32] | None = None,
        logits: NDArray[np.float32] | None = None,
    ) -> int:
        """Submit a step of (token, slot, position); returns its event. ``logits`` must stay."""
        query = np.array([(*token, 0) for token in tokens], np.int32).reshape(-1, 4)
        row = np.array(rows, np.uint32)
        given = (query, row, sampling, pages, logits)
        step = StepRecord(
            len(tokens), len(rows), *(None if a is None else a.ctypes.data for a in given)
        )
        event = ctypes.c_uint64()
        self.call("submit", ctypes.byref(step), ctypes.byref(event))
        return event.value

    def wait(self, event: int, rows: int = 0, nanoseconds: int = FOREVER) -> list[int]:
        """Wait for a step; returns the sampled tokens."""
        tokens = np.full(max(rows, 1), 1 << 30, np.int32)
        self.call(
            "wait",
            ctypes.c_uint64(event),
            ctypes.c_uint64(nanoseconds),
            ctypes.c_void_p(tokens.ctypes.data),
        )
        return [int(token) for token in tokens[:rows]]

    def step(
        self, tokens: Sequence[tuple[int, int, int]], rows: Sequence[int] = (), **more: Any
    ) -> list[int]:
        """Submit a step and wait for it."""
        return self.wait(self.submit(tokens, rows, **more), len(rows))

    def close(self) -> None:
        """Close the plan."""
        self.call("close")


def options(tier: str = "native", slots: int = SLOTS) -> SessionOptions:
    """The sizes of every plan here, and of the sessions they are compared with."""
    return SessionOptions(
        tier=tier,
        tier_options=TierOptions(threads=THREADS),
        context=CONTEXT,
        kv_dtype=DEFAULT_KV.name,
        chunk=CHUNK,
        slots=slots,
        all_logits=True,
    )


def exported(model: Path, folder: Path) -> Path:
    """The plan of a model file, with its weights, in ``folder``."""
    path = folder / f"{model.stem}.plan"
    export(model, options(), path)
    return path


def changed(plan: bytes, **fields: Any) -> bytes:
    """A plan with other fields of its header, and the digest of its new bytes."""
    data = bytearray(plan)
    header = np.frombuffer(data, HEADER, 1)
    for name, value in fields.items():
        header[name] = value
    return sealed(bytes(data))


def c_compiler() -> list[str]:
    """The command of the system's C compiler, or that of the package ``ziglang``."""
    return ["cc"] if shutil.which("cc") else [sys.executable, "-m", "ziglang", "cc"]


def compiled(output: Path, sources: Sequence[Path], *flags: str, include: Path = INCLUDE) -> Path:
    """A program of C sources; the header is in the folder ``include``."""
    command = [*c_compiler(), "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I", str(include)]
    ended = subprocess.run(
        [*command, *map(str, sources), *flags, "-pthread", "-ldl", "-o", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return output


def sanitized(folder: Path, program: Path) -> Path:
    """A program and the library's sources in one file, with the address and undefined-behaviour
    sanitizers; skips where the compiler has none."""
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    found = subprocess.run(
        [*c_compiler(), *flags, str(probe), "-o", str(folder / "probe")],
        capture_output=True,
        check=False,
    )
    if found.returncode or subprocess.run([folder / "probe"], check=False).returncode:
        machine_lacks("compiler with sanitizers")
    macros = [f"-D{name}={value}" for name, value in definitions().items()]
    sources = [program, *(FOLDER / source for source in SOURCES)]
    return compiled(
        folder / f"{program.stem}-sanitized", sources, *flags, *macros, "-I", str(FOLDER / "abi")
    )


def run(*words: object) -> tuple[int, str, str]:
    """The exit code, the output and the errors of a program, which no Python module can help."""
    ended = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={"PATH": "", "ASAN_OPTIONS": "allocator_may_return_null=1"},
    )
    return ended.returncode, ended.stdout, ended.stderr
