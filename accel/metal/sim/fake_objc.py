"""The simulated Objective-C runtime: classes whose methods are functions of this process.

A message is sent as to a real runtime: the tier calls ``objc_msgSend`` with the types it assumes,
which jumps to a function with the types of the method's encoding."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accel.metal.objc import import_cffi
from accel.metal.signatures import DECLARATIONS, TOKEN
from accel.metal.sim.fake_compiler import FakeCompiler

RUNTIME_DECLARATIONS = """
typedef struct { void *host, *device; } Pages;
const char *class_getName(Class kind);
Class objc_allocateClassPair(Class parent, const char *name, size_t extra);
void objc_registerClassPair(Class kind);
_Bool class_addMethod(Class kind, SEL selector, void *implementation, const char *types);
id class_createInstance(Class kind, size_t extra);
id objc_autorelease(id object);
_Bool fake_responds(id object, SEL selector, SEL queried);
void fake_listen(void (*problems)(const char *), void (*released)(void *));
long fake_alive(void);
const char *fake_name_of(long number);
long fake_pools(void);
_Bool fake_map(uint64_t nbytes, Pages *pages);
void *fake_alias(void *host, uint64_t nbytes);
void fake_unmap(void *address, uint64_t nbytes);
_Bool fake_give(void *address, uint64_t nbytes, int access);
int run(void *arguments, unsigned groups, unsigned threads);
int fake_run(void *launch, void *arguments, unsigned groups, unsigned threads, void **address);
"""
VALUES = {"Q": "uint64_t", "q": "int64_t", "B": "_Bool", "v": "void"}
STRUCTURES = {"{?=QQQ}": "MTLSize", "{_NSRange=QQ}": "NSRange"}

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a simulated class. ``types`` is its encoding in Apple's runtime."""

    selector: str
    types: str
    function: Callable[..., Any]
    of_class: bool = False


def method(
    selector: str, types: str, of_class: bool = False
) -> Callable[[Callable[..., Any]], Method]:
    """Make a function ``(state, *arguments)`` the method of ``selector``."""

    def made(function: Callable[..., Any]) -> Method:
        return Method(selector, types, function, of_class)

    return made


class FakeObjc:
    """One simulated runtime. ``problems`` are mistakes that real ones answer by a crash or not at
    all; ``calls`` are the messages since it was set to a list. Methods of classes get ``owner``."""

    def __init__(self, compiler: FakeCompiler) -> None:
        self.ffi = import_cffi().FFI()
        self.ffi.cdef(DECLARATIONS + RUNTIME_DECLARATIONS)
        self.library = self._own_copy(compiler.runtime())
        self.problems: list[str] = []
        self.calls: list[str] | None = None
        self.owner: Any = None
        self._states: dict[int, Any] = {}
        self._callbacks: list[Any] = []
        ffi = self.ffi
        problem = ffi.callback("void(char *)", lambda text: self.tell(ffi.string(text).decode()))
        gone = ffi.callback("void(void *)", self._released)
        self._callbacks += [problem, gone]
        self.library.fake_listen(problem, gone)

    def tell(self, problem: str) -> None:
        """Record a mistake of the caller."""
        self.problems.append(problem)

    def add_class(self, name: str, methods: Iterator[Method]) -> None:
        """Add a class of this name, whose objects ``make`` makes."""
        library = self.library
        parent = library.objc_getClass(b"NSObject")
        kind = library.objc_allocateClassPair(parent, name.encode(), 0)
        library.objc_registerClassPair(kind)
        for each in methods:
            holder = library.object_getClass(kind) if each.of_class else kind
            self._add(holder, name, each)

    def add_root(self) -> None:
        """Add NSObject, which knows the methods of an object."""
        kind = self.library.objc_allocateClassPair(self.ffi.NULL, b"NSObject", 0)
        self.library.objc_registerClassPair(kind)
        selector = self.library.sel_registerName(b"respondsToSelector:")
        responds = self.ffi.cast("void *", self.library.fake_responds)
        self.library.class_addMethod(kind, selector, responds, b"B@::")

    def make(self, name: str, state: Any) -> int:
        """The address of a new object with ``state``, owned by the caller."""
        kind = self.library.objc_getClass(name.encode())
        address = _number(self.ffi, self.library.class_createInstance(kind, 0))
        self._states[address] = state
        return address

    def pooled(self, address: int) -> int:
        """Give an object to the innermost pool."""
        self.library.objc_autorelease(self.pointer(address))
        return address

    def retain(self, address: int) -> None:
        """Add a reference."""
        self.library.objc_retain(self.pointer(address))

    def release(self, address: int) -> None:
        """Remove a reference."""
        self.library.objc_release(self.pointer(address))

    def state(self, address: int, kind: type[S], what: str) -> S | None:
        """The state of an argument; None for nil, or if it is no live object of ``kind``, which is
        recorded as a problem."""
        found = self._states.get(address)
        if isinstance(found, kind):
            return found
        if address:
            self.tell(f"{what} is no {kind.__name__} that is alive")
        return None

    def pointer(self, address: int) -> Any:
        """An address as a C pointer."""
        return self.ffi.cast("void *", address)

    def alive(self) -> list[str]:
        """Class names of the objects that were not released."""
        ffi, library = self.ffi, self.library
        names = [library.fake_name_of(n) for n in range(library.fake_alive())]
        return sorted(ffi.string(name).decode() for name in names)

    def _released(self, pointer: Any) -> None:
        state = self._states.pop(_number(self.ffi, pointer), None)
        if hasattr(state, "released"):
            state.released()

    def _add(self, kind: Any, name: str, each: Method) -> None:
        codes = [token[1] for token in TOKEN.finditer(each.types)]
        gives, *takes = [STRUCTURES.get(c) or VALUES.get(c, "uint64_t") for c in codes]
        signature = f"{gives}({', '.join(takes)})"
        called = partial(self._called, f"{name} {each.selector}", each.function)
        implementation = self.ffi.callback(signature, called)
        self._callbacks.append(implementation)
        selector = self.library.sel_registerName(each.selector.encode())
        address = self.ffi.cast("void *", implementation)
        self.library.class_addMethod(kind, selector, address, each.types.encode())

    def _called(
        self, name: str, function: Callable[..., Any], me: int, _: int, *arguments: Any
    ) -> Any:
        if self.calls is not None:
            self.calls.append(name)
        return function(self._states.get(me, self.owner), *arguments)

    def _own_copy(self, library: Path) -> Any:
        """The library with its own state: loaded twice from one file it would share it."""
        with tempfile.TemporaryDirectory() as folder:
            return self.ffi.dlopen(shutil.copy(library, folder))


def _number(ffi: Any, pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def methods_of(kind: type) -> Iterator[Method]:
    """The methods declared in a class of states."""
    return (value for value in vars(kind).values() if isinstance(value, Method))
