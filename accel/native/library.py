"""Finds the native library for this machine, checks that its file is complete, and loads it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accel.digests import DIGEST_BYTES, digest
from accel.native.names import DIGEST_CHARACTERS, PROCESSOR, TIER, Target, library_name, this_target
from accel.native.variants import VARIANTS, WORDS, Variant, machine, usable
from accel.packets.build import Progress
from accel.user_folders import user_folder
from contract.cached_files import (
    PARTIAL,
    CachedFile,
    has_writer,
    least_used,
    partial_file,
    partial_name,
    remove_abandoned,
)
from contract.errors import TierUnavailable, system_words
from contract.lazy_dataclass import dataclass
from contract.processors import processors

PACKAGED = Path(__file__).with_name("built")
"""The folder of the libraries that a wheel contains."""
VARIANT_SETTING = "ZINC_RT_NATIVE_VARIANT"
"""Environment variable with the name of the variant to use, whatever the processor is."""
TRAILER = b"zinc-rt native library 2"
"""Ends a library in the cache, followed by the digest of all bytes before it."""
TRAILER_BYTES = len(TRAILER) + DIGEST_BYTES
READ_BYTES = 1 << 16
"""Bytes read at a time: memory for a whole library would be kept by the process."""
CACHED_BUILDS = 8
"""Most libraries of one variant in the cache; each is built from another version of the texts."""
LOCK_SECONDS = 300.0
"""Longest wait for another process that builds the same library."""


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library. Calls of ``quick`` hold Python's lock, those of ``handle`` do not."""

    path: Path
    variant: Variant
    handle: Any
    quick: Any


def default_cache() -> Path:
    """The folder of libraries that were built on this machine."""
    return user_folder("cache") / TIER


def find_library(cache: Path | None, progress: Progress | None = None) -> Library:
    """The library for this processor; it is built when neither the wheel nor the cache has it.

    ``cache`` is the folder of libraries that were built before, None to store none. Raises
    TierUnavailable and BuildError."""
    target = this_target(machine())
    variant = choose_variant(processor_words(target, cache))

    def build() -> bytes:
        from accel.native.compile import build_library, find_compiler

        compiler = find_compiler()
        if progress is not None:
            progress(f"compiling the native library for {variant.name}")
        return build_library(variant, target, compiler, processors())

    path, handle = _loaded(variant.name, target, cache, build)
    return Library(path, variant, handle, ctypes.PyDLL(None, handle=handle._handle))


def processor_words(target: Target, cache: Path | None) -> tuple[int, ...]:
    """Features of this machine as ``processor.c`` reports them. Raises as ``find_library``."""

    def build() -> bytes:
        from accel.native.compile import build_processor_library, find_compiler

        return build_processor_library(target, find_compiler())

    _, handle = _loaded(PROCESSOR, target, cache, build)
    words = (ctypes.c_uint64 * WORDS)()
    handle.zinc_processor(words)
    return tuple(words)


def choose_variant(words: tuple[int, ...]) -> Variant:
    """The variant that ZINC_RT_NATIVE_VARIANT names, else the fastest that runs. Raises
    TierUnavailable for a variant that is unknown or cannot run here."""
    runs = usable(words, machine())
    named = os.environ.get(VARIANT_SETTING, "")
    names = ", ".join(variant.name for variant in runs)
    if named:
        for variant in runs:
            if variant.name == named:
                return variant
        known = any(variant.name == named for variant in VARIANTS)
        problem = "this processor cannot run it" if known else "there is no such variant"
        raise TierUnavailable(TIER, f"{VARIANT_SETTING}={named}: {problem}", f"choose of {names}")
    if not runs:
        raise TierUnavailable(
            TIER, "this processor is older than every variant of its library", "use the cpu tier"
        )
    return runs[0]


def _loaded(
    name: str, target: Target, cache: Path | None, build: Callable[[], bytes]
) -> tuple[Path, Any]:
    """The library of this name from the wheel or the cache, else a new one."""
    file = library_name(name, target)
    packaged = PACKAGED / file
    if packaged.exists():
        return _opened(packaged)
    if cache is None:
        return _opened_once(file, build())
    path = cache / file
    data = stored_library(path, build)
    return _opened(path) if data is None else _opened_once(file, data)


def stored_library(path: Path, build: Callable[[], bytes]) -> bytes | None:
    """Build the library at ``path`` of the cache unless it is there; its bytes where they cannot
    be stored."""
    if not _is_complete(path):
        with _lock(path):
            # Another process may have built it while this one waited for the lock.
            if not _is_complete(path):
                data = build()
                if not _store(path, data):
                    return data
    return None


def _opened(path: Path) -> tuple[Path, Any]:
    """Load a library; a copy of it where the folder may hold no programs (noexec)."""
    try:
        return path, _open(path)
    except TierUnavailable:
        return _opened_once(path.name, path.read_bytes())


@functools.cache
def _open(path: Path) -> Any:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        reason = f"its library cannot be loaded ({system_words(error)})"
        remedy = "set TMPDIR to a folder in which programs may run"
        raise TierUnavailable(TIER, reason, remedy) from None


def _opened_once(file: str, data: bytes) -> tuple[Path, Any]:
    """Load a library that cannot be stored; its file is removed at once."""
    import tempfile

    try:
        with tempfile.TemporaryDirectory(
            prefix="zinc-rt-native-", ignore_cleanup_errors=True
        ) as folder:
            path = Path(folder) / file
            path.write_bytes(data)
            return path, _open(path)
    except OSError as error:
        reason = f"its library cannot be written ({error.strerror})"
        raise TierUnavailable(TIER, reason, "free some disk space, or set TMPDIR") from None


def _is_complete(path: Path) -> bool:
    """Whether a file of the cache is complete and unchanged."""
    found = digest()
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size - TRAILER_BYTES
            while left > 0 and (part := file.read(min(left, READ_BYTES))):
                found.update(part)
                left -= len(part)
            return file.read() == TRAILER + found.digest()
    except OSError:
        return False


def _store(path: Path, data: bytes) -> bool:
    """Write a library; False if the folder cannot be written or the disk is full.

    The caller holds the lock of ``path``, or waited too long for it: a partial file without a
    writer is that of a process that was killed."""
    partial = partial_name(path)
    try:
        for stale in path.parent.glob(f"{path.name}.*{PARTIAL}"):
            if not has_writer(stale):
                stale.unlink(missing_ok=True)
        remove_abandoned(path.parent)
        with partial_file(partial) as file:
            file.write(data + TRAILER + digest(data).digest())
            file.close()
            os.chmod(partial, 0o755)
            os.replace(partial, path)
    except OSError:
        return False
    _remove_old(path)
    return True


def _remove_old(path: Path) -> None:
    """Remove the oldest libraries of the same variant, so that CACHED_BUILDS remain: ``path``,
    whatever the clock says, and others."""
    name = path.stem.rpartition("-")[0]
    digest = "[0-9a-f]" * DIGEST_CHARACTERS
    with contextlib.suppress(OSError):
        found = path.parent.glob(f"{name}-{digest}{path.suffix}")
        others = [CachedFile(one, 0, one.stat().st_mtime_ns) for one in found if one != path]
        for other in least_used(others, 0, CACHED_BUILDS - 1):
            other.path.unlink()
            Path(f"{other.path}.lock").unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """The lock of the one process that builds; nothing is locked in a folder that is read-only."""
    import filelock

    lock = filelock.FileLock(f"{path}.lock", timeout=LOCK_SECONDS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, filelock.Timeout):
        yield
        return
    try:
        yield
    finally:
        lock.release()
