"""Types of methods: what the runtime says of them, and what is declared here."""

from __future__ import annotations

import pytest

from accel.metal.objc import ObjectiveC
from accel.metal.signatures import SIGNATURES, declared_kinds, kinds_of
from accel.metal.sim.fake_metal import FakeMetal
from tests.doubling import run_doubling
from tests.metal.conftest import OpenTier

ENCODINGS = {
    "@32@0:8Q16Q24": "newBufferWithLength:options:",
    "@48@0:8^v16Q24Q32@?40": "newBufferWithBytesNoCopy:length:options:deallocator:",
    "@40@0:8@16@24^@32": "newLibraryWithSource:options:error:",
    "@48@0:8@16Q24o^@32o^@40": ("newComputePipelineStateWithDescriptor:options:reflection:error:"),
    "v64@0:8{?=QQQ}16{?=QQQ}40": "dispatchThreadgroups:threadsPerThreadgroup:",
    "v40@0:8@16{_NSRange=QQ}24": "executeCommandsInBuffer:withRange:",
    "v40@0:8r^@16Q24Q32": "useResources:count:usage:",
    "B24@0:8q16": "supportsFamily:",
    "c32@0:8Q16Q24": "waitUntilSignaledValue:timeoutMS:",
    "r*16@0:8": "UTF8String",
    "@24@0:8r*16": "stringWithUTF8String:",
    "v20@0:8B16": "setFastMathEnabled:",
    "Vv16@0:8": "commit",
    "^v16@0:8": "contents",
}
"""As runtimes of 64 bits write them, with the offsets of arguments; qualifiers and the kind of BOOL
differ between systems."""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings_are_understood(encoding: str) -> None:
    assert kinds_of(encoding) == declared_kinds(ENCODINGS[encoding])


@pytest.mark.parametrize(
    ("encoding", "selector"),
    [
        ("@32@0:8Q16I24", "newBufferWithLength:options:"),
        ("@24@0:8Q16", "newBufferWithLength:options:"),
        ("v40@0:8{?=II}16@24@32", "dispatchThreadgroups:threadsPerThreadgroup:"),
        ("d16@0:8", "maxBufferLength"),
        ("", "commit"),
    ],
)
def test_other_types_are_told_apart(encoding: str, selector: str) -> None:
    assert kinds_of(encoding) != declared_kinds(selector)


def test_every_message_is_checked_before_it_is_sent(
    open_metal: OpenTier, mac: FakeMetal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a tier sends, opened and used, but for the few that objects of any system know."""
    sent: set[str] = set()
    message = ObjectiveC._message

    def noted(self: ObjectiveC, selector: str) -> object:
        sent.add(selector)
        return message(self, selector)

    monkeypatch.setattr(ObjectiveC, "_message", noted)
    run_doubling(open_metal())
    checked = {selector for _, selector in mac.metal._checked}
    everywhere = {"new", "stringWithUTF8String:", "UTF8String", "respondsToSelector:"}
    assert sent - checked <= everywhere
    assert sent <= set(SIGNATURES)
