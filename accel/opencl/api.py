"""The functions of OpenCL 1.2 that the tier uses, called through ctypes, and their errors.

A function that may take long releases Python's lock. The others do not, since taking the lock again
would take longer than the function."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_ulong, c_void_p
from pathlib import Path
from typing import Any

LIBRARY = "libOpenCL.so.1"
"""The library that finds drivers on Linux."""
CARRIER = "pyopencl"
"""A package whose wheels contain that library, for systems without it."""

_ERROR_NAMES = """
-1=DEVICE_NOT_FOUND -2=DEVICE_NOT_AVAILABLE -3=COMPILER_NOT_AVAILABLE
-4=MEM_OBJECT_ALLOCATION_FAILURE -5=OUT_OF_RESOURCES -6=OUT_OF_HOST_MEMORY
-7=PROFILING_INFO_NOT_AVAILABLE -11=BUILD_PROGRAM_FAILURE
-14=EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST -30=INVALID_VALUE -33=INVALID_DEVICE
-34=INVALID_CONTEXT -36=INVALID_COMMAND_QUEUE -38=INVALID_MEM_OBJECT -42=INVALID_BINARY
-43=INVALID_BUILD_OPTIONS -44=INVALID_PROGRAM -45=INVALID_PROGRAM_EXECUTABLE
-46=INVALID_KERNEL_NAME -48=INVALID_KERNEL -49=INVALID_ARG_INDEX -50=INVALID_ARG_VALUE
-51=INVALID_ARG_SIZE -52=INVALID_KERNEL_ARGS -54=INVALID_WORK_GROUP_SIZE
-55=INVALID_WORK_ITEM_SIZE -58=INVALID_EVENT -61=INVALID_BUFFER_SIZE -63=INVALID_GLOBAL_WORK_SIZE
-1001=PLATFORM_NOT_FOUND_KHR
"""
_ERRORS = {int(code): name for code, name in re.findall(r"(\S+)=(\S+)", _ERROR_NAMES)}
"""Names of the error codes that these functions return."""

_LONG = {
    "clGetPlatformIDs": (c_uint, c_void_p, c_void_p),
    "clGetDeviceIDs": (c_void_p, c_ulong, c_uint, c_void_p, c_void_p),
    "clBuildProgram": (c_void_p, c_uint, c_void_p, c_char_p, c_void_p, c_void_p),
    "clGetProgramInfo": (c_void_p, c_uint, c_size_t, c_void_p, c_void_p),
    "clGetProgramBuildInfo": (c_void_p, c_void_p, c_uint, c_size_t, c_void_p, c_void_p),
    "clEnqueueReadBuffer": (
        *(c_void_p, c_void_p, c_uint, c_size_t, c_size_t),
        *(c_void_p, c_uint, c_void_p, c_void_p),
    ),
    "clEnqueueWriteBuffer": (
        *(c_void_p, c_void_p, c_uint, c_size_t, c_size_t),
        *(c_void_p, c_uint, c_void_p, c_void_p),
    ),
    "clFinish": (c_void_p,),
    "clWaitForEvents": (c_uint, c_void_p),
    "clReleaseContext": (c_void_p,),
    "clReleaseProgram": (c_void_p,),
    "clReleaseCommandQueue": (c_void_p,),
}
_SHORT = {
    "clGetPlatformInfo": (c_void_p, c_uint, c_size_t, c_void_p, c_void_p),
    "clGetDeviceInfo": (c_void_p, c_uint, c_size_t, c_void_p, c_void_p),
    "clGetEventInfo": (c_void_p, c_uint, c_size_t, c_void_p, c_void_p),
    "clGetEventProfilingInfo": (c_void_p, c_uint, c_size_t, c_void_p, c_void_p),
    "clSetKernelArg": (c_void_p, c_uint, c_size_t, c_void_p),
    "clEnqueueNDRangeKernel": (
        *(c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_void_p),
        *(c_uint, c_void_p, c_void_p),
    ),
    "clEnqueueFillBuffer": (
        *(c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_size_t),
        *(c_uint, c_void_p, c_void_p),
    ),
    "clEnqueueMarkerWithWaitList": (c_void_p, c_uint, c_void_p, c_void_p),
    "clFlush": (c_void_p,),
    "clReleaseMemObject": (c_void_p,),
    "clReleaseKernel": (c_void_p,),
    "clReleaseEvent": (c_void_p,),
}
_LONG_MAKING = {
    "clCreateContext": (c_void_p, c_uint, c_void_p, c_void_p, c_void_p, c_void_p),
    "clCreateBuffer": (c_void_p, c_ulong, c_size_t, c_void_p, c_void_p),
    "clCreateProgramWithSource": (c_void_p, c_uint, c_void_p, c_void_p, c_void_p),
    "clCreateProgramWithBinary": (
        *(c_void_p, c_uint, c_void_p, c_void_p),
        *(c_void_p, c_void_p, c_void_p),
    ),
}
_SHORT_MAKING = {
    "clCreateCommandQueue": (c_void_p, c_void_p, c_ulong, c_void_p),
    "clCreateKernel": (c_void_p, c_char_p, c_void_p),
}


class Error(Exception):
    """An OpenCL function returned the error ``code``."""

    def __init__(self, function: str, code: int) -> None:
        self.code = code
        super().__init__(f"{function} failed: {_ERRORS.get(code, 'error')} ({code})")


class OpenCl:
    """The functions of a library, by their names without ``cl``.

    Each raises Error. Functions that create an object return its handle and have no argument for
    the error code."""

    def __init__(self, path: str) -> None:
        """Raises OSError when there is no such library, AttributeError when it lacks a function."""
        for library, functions, making in (
            (ctypes.CDLL(path), _LONG, _LONG_MAKING),
            (ctypes.PyDLL(path), _SHORT, _SHORT_MAKING),
        ):
            for name, arguments in functions.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, c_int
                function.errcheck = _check
                setattr(self, name[2:], function)
            for name, arguments in making.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, c_void_p
                setattr(self, name[2:], _making(name, function))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"cl{name} is not declared")


@functools.cache
def opencl() -> OpenCl:
    """The system's library, else the one in CARRIER. Raises OSError and AttributeError."""
    return OpenCl(library_path())


def library_path() -> str:
    """LIBRARY, or the path of the copy in CARRIER when the system has none. Loads the library."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        spec = importlib.util.find_spec(CARRIER)
        for package in spec.submodule_search_locations or () if spec else ():
            # The tool that made the wheel decides whether it is next to the package or in it.
            for folder in (Path(package, ".libs"), Path(f"{package}.libs")):
                for brought in folder.glob("libOpenCL*"):
                    return str(brought)
    return LIBRARY


def handles(values: Sequence[int]) -> Any:
    """A C array of handles."""
    return (c_void_p * len(values))(*values)


def information(function: Callable[..., Any], *of: int) -> bytes:
    """The bytes that a function ``clGet...Info`` returns for the arguments ``of``.

    The last argument is the parameter name. Raises Error."""
    size = c_size_t()
    function(*of, 0, None, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    function(*of, size.value, found, None)
    return found.raw


def text(answer: bytes) -> str:
    """Decode a text from ``information``."""
    return answer.rstrip(b"\0").decode(errors="replace")


def number(answer: bytes) -> int:
    """Decode a number from ``information``."""
    return int.from_bytes(answer, "little")


def _check(code: int, function: Any, _: tuple[Any, ...]) -> int:
    if code < 0:
        raise Error(function.__name__, code)
    return code


def _making(name: str, function: Any) -> Callable[..., int]:
    def make(*arguments: Any) -> int:
        code = c_int()
        handle: int | None = function(*arguments, ctypes.byref(code))
        if code.value < 0 or handle is None:
            raise Error(name, code.value)
        return handle

    return make
