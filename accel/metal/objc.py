"""The Objective-C runtime and Metal.framework through cffi: messages with exact signatures.

A method whose name begins with ``new`` returns an object the caller must release once; any other
method returns an object of the innermost pool, which must be retained to live longer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accel.metal import signatures
from contract.errors import TierError, TierUnavailable
from contract.extras import install_command

TIER = "metal"
RUNTIME = "/usr/lib/libobjc.A.dylib"
FRAMEWORKS = (
    # Without it a program without windows has no default device.
    "/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics",
    "/System/Library/Frameworks/Foundation.framework/Foundation",
    "/System/Library/Frameworks/Metal.framework/Metal",
)
NO_METAL = "this system has no Metal.framework"
NO_METAL_HINT = "Metal is part of macOS; --device simulated runs the tier without a GPU"


class MetalError(TierError):
    """Metal refused ``purpose`` with the message ``said``."""

    def __init__(self, purpose: str, said: str) -> None:
        self.purpose = purpose
        self.said = said
        super().__init__(f"{purpose}: {said}")


class NoObject(MetalError):
    """A method returned no object, which means that memory ran out."""

    def __init__(self, purpose: str) -> None:
        super().__init__(purpose, "Metal made no object, for want of memory as a rule")


class ObjectiveC:
    """The functions of one runtime; ``metal`` has MTLCreateSystemDefaultDevice.

    ``simulated`` says that the runtime is not Apple's; ``loaded`` are libraries that must stay
    loaded."""

    def __init__(self, ffi: Any, runtime: Any, metal: Any, simulated: bool = False) -> None:
        self.ffi = ffi
        self.runtime = runtime
        self.metal = metal
        self.simulated = simulated
        self.loaded: list[Any] = []
        self._messages: dict[str, tuple[Any, Any]] = {}
        self._checked: set[tuple[Any, str]] = set()

    def send(self, receiver: Any, selector: str, *arguments: Any) -> Any:
        """Send one message; its types are those of ``SIGNATURES``."""
        message = self._messages.get(selector)
        if message is None:
            message = self._messages[selector] = self._message(selector)
        function, name = message
        return function(receiver, name, *arguments)

    def create(self, purpose: str, receiver: Any, selector: str, *arguments: Any) -> Any:
        """Send a message that returns a new object. Raises NoObject naming ``purpose``."""
        made = self.send(receiver, selector, *arguments)
        if made == self.ffi.NULL:
            raise NoObject(purpose)
        return made

    def tried(self, purpose: str, receiver: Any, selector: str, *arguments: Any) -> Any:
        """Send a message that returns a new object or an NSError. Raises MetalError."""
        error = self.ffi.new("id *")
        with self.pool():
            made = self.send(receiver, selector, *arguments, error)
            if made == self.ffi.NULL:
                raise MetalError(purpose, self.error_text(error[0]))
        return made

    def new(self, name: str) -> Any:
        """A new object of class ``name``, owned by the caller. Raises NoObject."""
        return self.create(name, self.kind(name), "new")

    def kind(self, name: str) -> Any:
        """The class ``name``. Raises MetalError if this system has none of that name."""
        found = self.runtime.objc_getClass(name.encode())
        if found == self.ffi.NULL:
            raise MetalError(name, "this version of macOS has no such class")
        return found

    def string(self, text: str) -> Any:
        """An NSString in the innermost pool."""
        characters = self.ffi.new("char[]", text.encode())
        kind = self.kind("NSString")
        return self.create("a string", kind, "stringWithUTF8String:", characters)

    def text(self, string: Any) -> str:
        """The text of an NSString, empty for nil."""
        if string == self.ffi.NULL:
            return ""
        return str(self.ffi.string(self.send(string, "UTF8String")).decode(errors="replace"))

    def error_text(self, error: Any) -> str:
        """The description of an NSError, or a text for nil."""
        if error == self.ffi.NULL:
            return "Metal gave no reason"
        return self.text(self.send(error, "localizedDescription"))

    def responds(self, receiver: Any, selector: str) -> bool:
        """Whether an object has a method."""
        name = self.runtime.sel_registerName(selector.encode())
        return bool(self.send(receiver, "respondsToSelector:", name))

    def check(self, receiver: Any, selectors: Sequence[str]) -> None:
        """Raise MetalError unless the object has these methods, with the types of ``SIGNATURES``.

        A method that the runtime only resolves at the call counts as declared."""
        kind = self.runtime.object_getClass(receiver)
        for selector in selectors:
            if (kind, selector) in self._checked:
                continue
            if not self.responds(receiver, selector):
                raise MetalError(selector, "this version of macOS has no such method")
            name = self.runtime.sel_registerName(selector.encode())
            method = self.runtime.class_getInstanceMethod(kind, name)
            if method != self.ffi.NULL:
                encoding = self.ffi.string(self.runtime.method_getTypeEncoding(method)).decode()
                if signatures.kinds_of(encoding) != signatures.declared_kinds(selector):
                    raise MetalError(selector, f"its types here are {encoding}, not the known ones")
            self._checked.add((kind, selector))

    def retain(self, handle: Any) -> Any:
        """Add a reference to an object, and return the object."""
        return self.runtime.objc_retain(handle)

    def release(self, handle: Any) -> None:
        """Remove a reference; nil is allowed."""
        self.runtime.objc_release(handle)

    @contextmanager
    def owned(self, handle: Any) -> Iterator[Any]:
        """A block that ends by releasing ``handle``."""
        try:
            yield handle
        finally:
            self.release(handle)

    @contextmanager
    def pool(self) -> Iterator[None]:
        """A block with an autorelease pool."""
        pool = self.runtime.objc_autoreleasePoolPush()
        try:
            yield
        finally:
            self.runtime.objc_autoreleasePoolPop(pool)

    def _message(self, selector: str) -> tuple[Any, Any]:
        gives, *takes = signatures.SIGNATURES[selector]
        types = ", ".join(["id", "SEL", *takes])
        function = self.ffi.cast(f"{gives} (*)({types})", self.runtime.objc_msgSend)
        return function, self.runtime.sel_registerName(selector.encode())


def import_cffi() -> Any:
    """The module cffi. Raises TierUnavailable."""
    try:
        import cffi
    except ImportError as error:
        raise TierUnavailable(TIER, f"{error}", install_command("metal")) from None
    return cffi


def load_metal() -> ObjectiveC:
    """The runtime and the framework of this machine. Raises TierUnavailable."""
    if sys.platform != "darwin":
        raise TierUnavailable(TIER, NO_METAL, NO_METAL_HINT)
    ffi = import_cffi().FFI()
    ffi.cdef(signatures.DECLARATIONS + signatures.METAL_DECLARATIONS)
    try:
        runtime = ffi.dlopen(RUNTIME)
        frameworks = [ffi.dlopen(path) for path in FRAMEWORKS]
    except OSError as error:
        raise TierUnavailable(TIER, f"{NO_METAL} ({error})", NO_METAL_HINT) from None
    found = ObjectiveC(ffi, runtime, frameworks[-1])
    found.loaded = frameworks
    return found
