"""An open device with one command queue, which executes everything in the order of the commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accel.metal.device import Device
from accel.metal.objc import MetalError, ObjectiveC
from contract.errors import DeviceLost

PATIENCE_SECONDS = 600.0
"""Longest that memory operations wait for earlier commits."""
SLICE_SECONDS = 0.1
"""Time between two checks for a failure, after which the awaited event never comes."""
COMPLETED, FAILED = 4, 5
"""MTLCommandBufferStatus."""
READ_AND_WRITE = 3
"""MTLResourceUsage."""

QUEUE_METHODS = ("commandBuffer",)
BUFFER_METHODS = (
    *("computeCommandEncoder", "blitCommandEncoder", "encodeSignalEvent:value:"),
    *("commit", "status", "error"),
)
COMPUTE_METHODS = (
    *("useResources:count:usage:", "setComputePipelineState:", "setBuffer:offset:atIndex:"),
    "dispatchThreadgroups:threadsPerThreadgroup:",
    *("executeCommandsInBuffer:withRange:", "endEncoding"),
)
BLIT_METHODS = ("copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:", "endEncoding")
EVENT_METHODS = ("signaledValue", "waitUntilSignaledValue:timeoutMS:")

Encode = Callable[[Any], None]
"""Encodes commands into a command buffer."""


class Submission:
    """Command buffers that were committed together; they are released when they have ended."""

    def __init__(self, number: int, buffers: list[Any]) -> None:
        self.number = number
        self.buffers = buffers


class Queue:
    """The only queue of ``device``, which it owns. Every submission has a number. Raises MetalError
    when it cannot be created."""

    def __init__(self, objc: ObjectiveC, device: Device) -> None:
        self.objc = objc
        self.device = device
        self.submitted = 0
        self._running: list[Submission] = []
        self._handle = objc.create("the command queue", device.handle, "newCommandQueue")
        try:
            self._event = objc.create("an event", device.handle, "newSharedEvent")
        except MetalError:
            objc.release(self._handle)
            raise
        try:
            self._check_methods()
        except MetalError:
            objc.release(self._event)
            objc.release(self._handle)
            raise

    def submit(self, encodes: Sequence[Encode]) -> Submission:
        """Commit a command buffer for each function, after everything before them. Raises
        MetalError, and then nothing was committed."""
        objc = self.objc
        made: list[Any] = []
        number = self.submitted + 1
        try:
            with objc.pool():
                for encode in encodes:
                    made.append(objc.retain(objc.create("commands", self._handle, "commandBuffer")))
                    encode(made[-1])
                objc.send(made[-1], "encodeSignalEvent:value:", self._event, number)
                for buffer in made:
                    objc.send(buffer, "commit")
        except BaseException:
            for buffer in made:
                objc.release(buffer)
            raise
        self.submitted = number
        submission = Submission(number, made)
        self._running.append(submission)
        return submission

    @contextmanager
    def encoding(self, buffer: Any, kind: str) -> Iterator[Any]:
        """A block with an encoder of a command buffer, which always ends: an open encoder must not
        be released."""
        encoder = self.objc.create("an encoder", buffer, kind)
        try:
            yield encoder
        finally:
            self.objc.send(encoder, "endEncoding")

    def reached(self, submission: Submission) -> bool:
        """Whether a submission has ended. Raises DeviceLost when it has failed."""
        send = self.objc.send
        for buffer in submission.buffers:
            status = send(buffer, "status")
            if status == FAILED:
                with self.objc.pool():
                    said = self.objc.error_text(send(buffer, "error"))
                raise DeviceLost(f"{self.device.name}: {said}")
            if status != COMPLETED:
                return False
        self._forget(submission)
        return True

    def wait(self, submission: Submission, seconds: float) -> bool:
        """Sleep until a submission has ended, at most ``seconds``; returns whether it has. Raises
        DeviceLost when it has failed."""
        deadline = time.monotonic() + seconds
        while not self.reached(submission):
            if time.monotonic() > deadline:
                return False
            self._sleep(submission, deadline)
        return True

    def finish(self) -> None:
        """Wait for everything committed. Raises DeviceLost when it does not end."""
        while self._running:
            self.await_end(self._running[-1])
            # Everything before the last one has ended too, and reports failures.
            for submission in list(self._running):
                self.reached(submission)

    def await_end(self, submission: Submission) -> None:
        """Wait for one submission. Raises DeviceLost when it does not end."""
        if not self.wait(submission, PATIENCE_SECONDS):
            raise DeviceLost(
                f"{self.device.name}: what was committed did not end within {PATIENCE_SECONDS:g} s"
            )

    def drain(self, seconds: float) -> bool:
        """Wait until everything committed has ended, successfully or not; False after
        ``seconds``."""
        deadline = time.monotonic() + seconds
        for submission in list(self._running):
            for buffer in submission.buffers:
                while self.objc.send(buffer, "status") not in (COMPLETED, FAILED):
                    if time.monotonic() > deadline:
                        return False
                    self._sleep(submission, deadline)
            self._forget(submission)
        return True

    def close(self) -> None:
        """Release the device, of which nothing is in use. Safe to call twice."""
        if self._handle is None:
            return
        for submission in list(self._running):
            self._forget(submission)
        for handle in (self._event, self._handle, self.device.handle):
            self.objc.release(handle)
        self._handle = None

    def _sleep(self, submission: Submission, deadline: float) -> None:
        """Sleep until the submission's event comes, at most SLICE_SECONDS."""
        seconds = min(deadline - time.monotonic(), SLICE_SECONDS)
        milliseconds = max(1, int(seconds * 1000))
        event = "waitUntilSignaledValue:timeoutMS:"
        self.objc.send(self._event, event, submission.number, milliseconds)

    def _forget(self, submission: Submission) -> None:
        for buffer in submission.buffers:
            self.objc.release(buffer)
        submission.buffers = []
        self._running = [running for running in self._running if running is not submission]

    def _check_methods(self) -> None:
        """Check every method used of the queue, its buffers, encoders and event."""
        objc = self.objc
        with objc.pool():
            objc.check(self._event, EVENT_METHODS)
            objc.check(self._handle, QUEUE_METHODS)
            buffer = objc.create("commands", self._handle, "commandBuffer")
            objc.check(buffer, BUFFER_METHODS)
            with self.encoding(buffer, "computeCommandEncoder") as encoder:
                objc.check(encoder, COMPUTE_METHODS)
            with self.encoding(buffer, "blitCommandEncoder") as encoder:
                objc.check(encoder, BLIT_METHODS)
