"""The driver API with every call checked, and contexts."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence
from threading import local
from types import ModuleType
from typing import Any

from contract.errors import TierUnavailable
from contract.extras import install_command

TIER = "cuda"

DRIVER_HINT = "install NVIDIA's driver, version 580 or newer"
LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
NO_DRIVER = f"there is no CUDA driver ({LIBRARY})"
NO_CUDA_DEVICE = "there is no CUDA device"
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
NOT_READY = "CUDA_ERROR_NOT_READY"
NO_DEVICE = "CUDA_ERROR_NO_DEVICE"
_P, _A, _N = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
QUICK: dict[str, tuple[str, Sequence[Any]]] = {
    "cuCtxSetCurrent": ("cuCtxSetCurrent", (_P,)),
    "cuEventQuery": ("cuEventQuery", (_P,)),
    "cuEventRecord": ("cuEventRecord", (_P, _P)),
    "cuGraphLaunch": ("cuGraphLaunch", (_P, _P)),
    "cuMemcpyDtoHAsync": ("cuMemcpyDtoHAsync_v2", (_P, _A, _N, _P)),
    "cuMemcpyHtoDAsync": ("cuMemcpyHtoDAsync_v2", (_A, _P, _N, _P)),
    "cuStreamWaitEvent": ("cuStreamWaitEvent", (_P, _P, ctypes.c_uint)),
}
"""The symbols and arguments of functions that have no results, for ``Driver.quick``."""


class CudaError(Exception):
    """A call of the driver failed. ``name`` is the name of the CUresult."""

    def __init__(self, function: str, name: str) -> None:
        self.function = function
        self.name = name
        super().__init__(f"{function} answered {name}")


class Driver:
    """The functions of ``cuda.bindings.driver``, which return a status and their results, and those
    of ``library`` that are quick."""

    def __init__(self, binding: Any, library: ctypes.PyDLL | None = None) -> None:
        self.binding = binding
        self._success = binding.CUresult.CUDA_SUCCESS
        self._quick = {} if library is None else _declared(library)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call ``function`` and return its results: None, one value or a tuple. Raises
        CudaError."""
        status, *values = getattr(self.binding, function)(*arguments)
        if status != self._success:
            raise CudaError(function, status.name)
        if len(values) == 1:
            return values[0]
        return tuple(values) or None

    def quick(self, function: str, *arguments: Any) -> None:
        """As ``call``, for a function in QUICK that does not wait for the device. It keeps Python's
        lock: a thread that releases it gets it back after all other threads that want it, and a
        step makes ten such calls."""
        quick = self._quick.get(function)
        if quick is None:
            self.call(function, *arguments)
        elif status := quick(*map(int, arguments)):
            raise CudaError(function, self.binding.CUresult(status).name)


def _declared(library: ctypes.PyDLL) -> dict[str, Callable[..., int]]:
    """The functions in QUICK by their names in the binding."""
    declared = {}
    for name, (symbol, arguments) in QUICK.items():
        declared[name] = function = getattr(library, symbol)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return declared


def import_binding() -> ModuleType:
    """``cuda.bindings.driver``; TierUnavailable without a driver or the extra.

    The driver is tested first, since importing the binding is slow."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        raise TierUnavailable(TIER, NO_DRIVER, DRIVER_HINT) from None
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TierUnavailable(
            TIER, f"cuda-bindings is missing ({error})", install_command("cuda")
        ) from None
    module: ModuleType = driver
    return module


def open_driver(binding: Any = None) -> Driver:
    """The driver, initialized; ``binding`` replaces ``cuda.bindings.driver``. Raises
    TierUnavailable when the library or the driver is missing or does not start."""
    if binding is None:
        driver = Driver(import_binding(), ctypes.PyDLL(LIBRARY))
    else:
        driver = Driver(binding)
    try:
        driver.call("cuInit", 0)
    except CudaError as error:
        reason = NO_CUDA_DEVICE if error.name == NO_DEVICE else str(error)
        raise TierUnavailable(TIER, reason, DRIVER_HINT) from None
    return driver


class _Thread(local):
    """The context that is current in a thread, known only in blocks of several calls."""

    current: Context | None = None
    calling = False

    def __enter__(self) -> None:
        self.calling = True

    def __exit__(self, *_: object) -> None:
        self.calling, self.current = False, None


_THREAD = _Thread()


class Context:
    """A context on one device. A fault breaks it, and destroying it is the only recovery.

    Any thread may call: the context is made current for each call."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        self.binding = driver.binding
        device = driver.call("cuDeviceGet", ordinal)
        self._handle = driver.call("cuCtxCreate", None, 0, device)
        self.closed = False

    def call(self, function: str, *arguments: Any) -> Any:
        """As ``Driver.call``, in this context."""
        self._enter()
        return self._driver.call(function, *arguments)

    def quick(self, function: str, *arguments: Any) -> None:
        """As ``Driver.quick``, in this context."""
        self._enter()
        self._driver.quick(function, *arguments)

    def _enter(self) -> None:
        if _THREAD.current is not self:
            self._driver.quick("cuCtxSetCurrent", self._handle)
            if _THREAD.calling:
                _THREAD.current = self

    @staticmethod
    def many_calls() -> _Thread:
        """A block of many calls of this thread, between which no other library makes a context
        current."""
        return _THREAD

    def when_gone(self, owner: object, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function(*arguments)`` when ``owner`` is collected as garbage, if the context
        still exists.

        The collector may run in the middle of another context's ``call``, so the current context is
        restored afterwards."""
        weakref.finalize(owner, self._aside, function, *arguments)

    def _aside(self, function: Callable[..., object], *arguments: Any) -> None:
        if self.closed:
            return
        self._driver.call("cuCtxPushCurrent", self._handle)
        before, _THREAD.current = _THREAD.current, None
        try:
            function(*arguments)
        finally:
            self._driver.call("cuCtxPopCurrent")
            _THREAD.current = before

    def access_peer(self, other: Context) -> None:
        """Let kernels access the memory of a context on another device. Raises CudaError."""
        self.call("cuCtxEnablePeerAccess", other._handle, 0)

    def close(self) -> None:
        """Destroy the context with everything in it; safe to call twice and after a fault."""
        if not self.closed:
            self.closed = True
            self._driver.call("cuCtxDestroy", self._handle)

    def abandon(self) -> None:
        """Leave alone a context in which a kernel still runs, since destroying it would wait for
        the kernel.

        The driver frees its memory when the process ends."""
        self.closed = True


class Handle:
    """A driver object that function ``destroy`` ends when the handle is collected as garbage."""

    def __init__(self, context: Context, value: Any, destroy: str) -> None:
        self.value = value
        context.when_gone(self, context.call, destroy, value)
