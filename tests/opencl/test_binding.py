"""What the tier needs of OpenCL's objects beyond what its own tests show."""

from pathlib import Path

import numpy as np
import pytest

from accel.opencl import api
from accel.opencl import binding as cl

COPY = """
__kernel void copy(__global const uint *from, __global uint *to, uint add) {
    to[get_global_id(0)] = from[get_global_id(0)] + add;
}
__kernel void other(__global uint *to) { to[0] = 1; }
"""


@pytest.fixture
def queue(device) -> cl.CommandQueue:
    """A queue of the first device that keeps times."""
    return cl.CommandQueue(cl.Context([device.handle]), device.handle, cl.PROFILING_ENABLE)


@pytest.fixture
def program(queue) -> cl.Program:
    """COPY, built."""
    return cl.Program(queue.context, COPY).build("-cl-std=CL1.2")


@pytest.mark.parametrize("place", ["{}/.libs/libOpenCL-1.so", "{}.libs/libOpenCL-1.so.1.0.0"])
def test_a_package_may_bring_the_library(place, tmp_path, monkeypatch):
    """Where the system has none, it is the one in the wheel or beside it."""
    carrier = tmp_path / "carrier_of_opencl"
    brought = Path(place.format(carrier))
    for folder in (carrier, brought.parent):
        folder.mkdir()
    (carrier / "__init__.py").touch()
    brought.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(api, "CARRIER", carrier.name)
    assert api.library_path() == api.LIBRARY
    monkeypatch.setattr(api, "LIBRARY", "libNoSuchLibrary.so.9")
    assert api.library_path() == str(brought)


def test_an_error_names_function_and_code(queue):
    """Whether it comes as a result or through a pointer."""
    with pytest.raises(cl.Error, match=r"clCreateBuffer failed: INVALID_BUFFER_SIZE \(-61\)"):
        cl.Buffer(queue.context, cl.READ_WRITE, 0)
    buffer = cl.Buffer(queue.context, cl.READ_WRITE, 8)
    with pytest.raises(cl.Error, match=r"clEnqueueReadBuffer failed: INVALID_VALUE \(-30\)"):
        cl.enqueue_copy(queue, np.empty(16, np.uint8), buffer)


def test_a_kernel_reads_and_writes_buffers(queue, program):
    """With offsets on either side, a filled rest, and times of the device."""
    numbers = np.arange(8, dtype=np.uint32)
    source = cl.Buffer(queue.context, cl.READ_ONLY | cl.COPY_HOST_PTR, hostbuf=numbers)
    target = cl.Buffer(queue.context, cl.READ_WRITE, 64)
    cl.enqueue_fill_buffer(queue, target, np.array([7], np.uint32), 0, 64)
    cl.enqueue_copy(queue, source, np.array([90, 91], np.uint32), dst_offset=4)
    kernel = cl.Kernel(program, "copy")
    kernel.set_args(source, target, np.uint32(100))
    event = cl.enqueue_nd_range_kernel(queue, kernel, (8,), None)
    event.wait()
    assert event.command_execution_status == cl.COMPLETE
    assert 0 < event.profile.start <= event.profile.end
    found = np.zeros(8, np.uint32)
    cl.enqueue_copy(queue, found, target, src_offset=16)
    assert found.tolist() == [104, 105, 106, 107, 7, 7, 7, 7]
    cl.enqueue_copy(queue, found, target)
    assert found.tolist() == [100, 190, 191, 103, 104, 105, 106, 107]


def test_arguments_are_checked(program):
    """One too many is refused; a buffer may be left out."""
    kernel = cl.Kernel(program, "other")
    kernel.set_args(None)
    with pytest.raises(cl.Error, match="INVALID_ARG_INDEX"):
        kernel.set_args(None, np.uint32(1))
    with pytest.raises(cl.Error, match="clCreateKernel failed"):
        cl.Kernel(program, "neither")


@pytest.mark.parametrize("blocking", [False, True])
def test_an_event_given_up_waits_for_the_hosts_memory(queue, blocking):
    """The device may still be at it; not so when the copy has ended, or somebody waited."""
    buffer = cl.Buffer(queue.context, cl.READ_WRITE, 64)
    waited: list[int] = []
    for wait in (False, True):
        event = cl.enqueue_copy(queue, buffer, np.zeros(64, np.uint8), is_blocking=blocking)
        really = event._wait_for
        event._wait_for = lambda *events, really=really: waited.append(really(*events))
        if wait:
            event.wait()
        del event
    assert len(waited) == (1 if blocking else 2)


def test_a_buffer_is_released_once(queue):
    """By hand, and then not again at its end."""
    buffer = cl.Buffer(queue.context, cl.READ_WRITE, 64)
    released: list[int] = []
    really = buffer._give_back
    buffer._give_back = lambda handle: released.append(really(handle))
    buffer.release()
    del buffer
    assert len(released) == 1


def test_a_prepared_launch_runs_as_often_as_it_is_called(queue, program):
    """With the arguments its kernel has then, and in the order of the queue."""
    numbers = np.arange(8, dtype=np.uint32)
    first = cl.Buffer(queue.context, cl.READ_WRITE | cl.COPY_HOST_PTR, hostbuf=numbers)
    second = cl.Buffer(queue.context, cl.READ_WRITE, numbers.nbytes)
    there, back = cl.Kernel(program, "copy"), cl.Kernel(program, "copy")
    there.set_args(first, second, np.uint32(3))
    back.set_args(second, first, np.uint32(4))
    starts = [cl.prepared_launch(queue, kernel, 8, 4) for kernel in (there, back)]
    for start in starts * 2:
        start()
    found = np.empty_like(numbers)
    cl.enqueue_copy(queue, found, first)
    np.testing.assert_array_equal(found, numbers + 14)
    wrong = cl.prepared_launch(queue, there, 8, 3)
    with pytest.raises(cl.Error, match="clEnqueueNDRangeKernel failed: INVALID_WORK_GROUP_SIZE"):
        wrong()
