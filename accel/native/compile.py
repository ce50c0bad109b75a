"""Compiles the native library with the clang of the pip package ``ziglang``, or with the clang
that ZINC_RT_CC names."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, PIPE
from threading import Event

from accel.native.names import TIER, Target
from accel.native.sources import library_units, processor_unit
from accel.native.variants import Variant
from accel.packets.build import BuildError
from contract.errors import TierUnavailable, system_words
from contract.lazy_dataclass import dataclass

COMPILER_SETTING = "ZINC_RT_CC"
"""Environment variable: the command of a clang to use instead of zig's."""
COMPILER_REMEDY = f"pip install ziglang, or set {COMPILER_SETTING} to a clang"
FLAGS = (
    *("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden"),
    # OpenCL's char is signed; that of C is unsigned on Linux on ARM.
    "-fsigned-char",
    # Every floating-point operation is rounded by itself and in the order of the text.
    *("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno"),
    *("-fno-sanitize=all", "-fno-stack-protector", "-g0"),
    *("-Wno-unknown-pragmas", "-Wno-psabi"),
    *("-DNATIVE_DIVIDE=1", "-DNATIVE_SQRT=1", "-DDOT_VNNI=0"),
)
ZIG_SYSTEMS = {"linux": "linux-gnu.2.28", "macos": "macos.11.0", "windows": "windows-gnu"}
"""Zig's name of each system, with the oldest version that is supported."""

NO_ROOM = ("No space left on device", "Disk quota exceeded")
"""The words of a system whose disk is full."""
WAIT_ON_ADDRESS = "-lapi-ms-win-core-synch-l1-2-0"


@dataclass(frozen=True, slots=True)
class Compiler:
    """A clang. ``command`` begins every call; ``is_zig`` says whether it is zig's."""

    command: tuple[str, ...]
    is_zig: bool

    def compile_command(self, target: Target, cpu: Sequence[str]) -> list[str]:
        """The command; the caller adds the source file and the object file."""
        if not self.is_zig:
            return [*self.command, *FLAGS, *cpu, "-c"]
        triple = f"{target.machine}-{ZIG_SYSTEMS[target.system]}"
        return [*self.command, "cc", *FLAGS, "-target", triple, *cpu, "-c"]

    def link_command(self, target: Target) -> list[str]:
        """The command; the caller adds the library file and the object files."""
        if not self.is_zig:
            return [*self.command, "-shared", "-pthread", "-s", "-o"]
        if target.system == "linux":
            # The library uses the C library of the process that loads it, so none is linked.
            return [*self.command, "ld.lld", "-shared", "-s", "-z", "noexecstack", "-o"]
        triple = f"{target.machine}-{ZIG_SYSTEMS[target.system]}"
        libraries = [WAIT_ON_ADDRESS] if target.system == "windows" else []
        return [*self.command, "cc", "-target", triple, "-shared", "-s", *libraries, "-o"]

    def cpu_flags(self, variant: Variant | None) -> list[str]:
        """Flags for the instruction set of a variant; None is the oldest of the architecture."""
        if variant is None:
            return []
        return [f"-mcpu={variant.cpu}"] if self.is_zig else variant.march.split()


def find_compiler() -> Compiler:
    """The compiler that ZINC_RT_CC names, else zig's. Raises TierUnavailable without either."""
    named = os.environ.get(COMPILER_SETTING, "").strip()
    if named:
        return Compiler(tuple(shlex.split(named)), is_zig=False)
    spec = find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise TierUnavailable(TIER, "there is no compiler to build its library", COMPILER_REMEDY)
    zig = Path(spec.submodule_search_locations[0]) / ("zig.exe" if os.name == "nt" else "zig")
    return Compiler((str(zig),), is_zig=True)


def build_library(variant: Variant, target: Target, compiler: Compiler, jobs: int) -> bytes:
    """The bytes of the library of a variant. Raises BuildError and TierUnavailable."""
    return _built(library_units(), compiler.cpu_flags(variant), target, compiler, jobs)


def build_processor_library(target: Target, compiler: Compiler) -> bytes:
    """The bytes of the library that reports features. Raises as ``build_library``."""
    return _built(processor_unit(), compiler.cpu_flags(None), target, compiler, 1)


def _built(
    units: dict[str, str], cpu: Sequence[str], target: Target, compiler: Compiler, jobs: int
) -> bytes:
    try:
        with tempfile.TemporaryDirectory(prefix="zinc-rt-native-") as name:
            folder = Path(name)
            for unit, text in units.items():
                (folder / f"{unit}.c").write_text(text, encoding="utf-8")
            begin = compiler.compile_command(target, cpu)
            commands = {unit: [*begin, f"{unit}.c", "-o", f"{unit}.o"] for unit in units}
            _run_all(commands, folder, jobs)
            library = f"library{target.suffix}"
            objects = [f"{unit}.o" for unit in units]
            run_compiler([*compiler.link_command(target), library, *objects], folder, "the library")
            return (folder / library).read_bytes()
    except (OSError, BuildError) as error:
        words = system_words(error)
        if isinstance(error, BuildError):
            said = [full for full in NO_ROOM if full in error.log]
            if not said:
                raise
            words = said[0]
        reason = f"its library could not be built: {words}"
        raise TierUnavailable(TIER, reason, "free some disk space, or set TMPDIR") from None


def _run_all(commands: dict[str, list[str]], folder: Path, jobs: int) -> None:
    """Run the command of each unit, ``jobs`` at a time. An error or an interrupt ends all."""
    children: set[subprocess.Popen[bytes]] = set()
    failed = Event()

    def started(child: subprocess.Popen[bytes]) -> None:
        children.add(child)
        if failed.is_set():
            child.kill()

    with ThreadPoolExecutor(max(1, jobs), "native build") as threads:
        try:
            runs = [
                threads.submit(_run, command, folder, unit, started)
                for unit, command in commands.items()
            ]
            for run in runs:
                run.result()
        except BaseException:
            failed.set()
            threads.shutdown(wait=False, cancel_futures=True)
            for child in tuple(children):
                child.kill()
            raise


def run_compiler(command: list[str], folder: Path, purpose: str) -> None:
    """Run a command of a compiler in a folder. Raises BuildError, which says ``purpose`` was
    compiled."""
    # In a thread: an interrupt would leave a process running that the main thread just starts.
    _run_all({purpose: command}, folder, 1)


def _run(
    command: list[str],
    folder: Path,
    purpose: str,
    started: Callable[[subprocess.Popen[bytes]], None],
) -> None:
    """As ``run_compiler``, in this thread; ``started`` receives the process."""
    # Zig's default cache folders may be read-only, and nothing in them is needed again.
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(folder / "zig"))
    # NO_ROOM is looked for in the compiler's words, so they are not translated.
    own = {**os.environ, **caches, "LC_ALL": "C"}
    with subprocess.Popen(command, cwd=folder, env=own, stdout=DEVNULL, stderr=PIPE) as child:
        try:
            started(child)
            log = child.communicate()[1]
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        text = log.decode(errors="replace") or f"exit status {child.returncode}"
        raise BuildError("native", purpose, text)
