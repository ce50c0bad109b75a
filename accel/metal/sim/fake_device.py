"""The simulated MTLDevice, its libraries and pipelines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.metal.sim.fake_commands import FakeQueue, FakeSharedEvent
from accel.metal.sim.fake_compiler import CompileError, entry_of
from accel.metal.sim.fake_encoders import FakeCommands, FakePipeline
from accel.metal.sim.fake_machine import FakeString, Machine, buffer_of_pages, new_buffer
from accel.metal.sim.fake_objc import Method, method

MAX_ITEMS = 1024
LANGUAGE_3 = 3 << 16


def sets(selector: str, kind: str, name: str) -> Method:
    """The method that sets attribute ``name`` of a state to a value of type ``kind``."""
    return method(selector, f"v@:{kind}")(lambda state, value: setattr(state, name, value))


def reports(selector: str, kind: str, name: str) -> Method:
    """The method of a device that returns ``name`` of the machine's behaviour."""
    return method(selector, f"{kind}@:")(lambda device: getattr(device.machine.behaviour, name))


@dataclass(slots=True)
class FakeSettings:
    """An MTLCompileOptions; Metal compiles with fast math by default."""

    machine: Machine
    fast: bool = True
    language: int = 0

    set_language = sets("setLanguageVersion:", "Q", "language")
    set_fast = sets("setFastMathEnabled:", "B", "fast")


class FakeNewerSettings(FakeSettings):
    """The options that macOS 15 adds."""

    @method("setMathMode:", "v@:q")
    def set_mode(self, mode: int) -> None:
        self.fast = mode != 0

    @method("setMathFloatingPointFunctions:", "v@:q")
    def set_functions(self, functions: int) -> None:
        if functions != 1:
            self.fast = True


@dataclass(slots=True)
class FakeFunction:
    """An MTLFunction of the library at ``path``."""

    machine: Machine
    path: Path


@dataclass(slots=True)
class FakeLibrary:
    """An MTLLibrary of one kernel."""

    machine: Machine
    path: Path
    entry: str

    @method("newFunctionWithName:", "@@:@")
    def new_function(self, name: int) -> int:
        requested = self.machine.objc.state(name, FakeString, "a function's name")
        if requested is None or requested.text != self.entry:
            return 0
        function = FakeFunction(self.machine, self.path)
        return self.machine.make("newFunctionWithName:", "MTLFunction", function)


@dataclass(slots=True)
class FakePipelineDescriptor:
    """An MTLComputePipelineDescriptor."""

    machine: Machine
    function: FakeFunction | None = None
    items: int = MAX_ITEMS
    indirect: bool = False

    @method("setComputeFunction:", "v@:@")
    def set_function(self, function: int) -> None:
        self.function = self.machine.objc.state(function, FakeFunction, "a compute function")

    set_items = sets("setMaxTotalThreadsPerThreadgroup:", "Q", "items")
    set_indirect = sets("setSupportIndirectCommandBuffers:", "B", "indirect")


@dataclass(slots=True)
class FakeCommandsDescriptor:
    """An MTLIndirectCommandBufferDescriptor, with Metal's defaults."""

    machine: Machine
    types: int = 0
    inherits_buffers: bool = True
    inherits_pipeline: bool = True
    bindings: int = 0

    set_types = sets("setCommandTypes:", "Q", "types")
    set_inherits_buffers = sets("setInheritBuffers:", "B", "inherits_buffers")
    set_inherits_pipeline = sets("setInheritPipelineState:", "B", "inherits_pipeline")
    set_bindings = sets("setMaxKernelBufferBindCount:", "Q", "bindings")


@dataclass(slots=True)
class FakeDevice:
    """An MTLDevice."""

    machine: Machine

    @method("name", "@@:")
    def name(self) -> int:
        return self.machine.string(self.machine.behaviour.name)

    @method("supportsFamily:", "B@:q")
    def supports(self, family: int) -> bool:
        return family in self.machine.behaviour.families

    unified = reports("hasUnifiedMemory", "B", "unified")
    recommended = reports("recommendedMaxWorkingSetSize", "Q", "memory_bytes")

    @method("currentAllocatedSize", "Q@:")
    def allocated(self) -> int:
        return self.machine.taken

    longest = reports("maxBufferLength", "Q", "max_buffer_bytes")
    group_memory = reports("maxThreadgroupMemoryLength", "Q", "group_memory_bytes")

    @method("newCommandQueue", "@@:")
    def new_queue(self) -> int:
        return self.machine.make("newCommandQueue", "MTLCommandQueue", FakeQueue(self.machine))

    @method("newSharedEvent", "@@:")
    def new_event(self) -> int:
        return self.machine.make("newSharedEvent", "MTLSharedEvent", FakeSharedEvent(self.machine))

    @method("newBufferWithLength:options:", "@@:QQ")
    def new_buffer(self, nbytes: int, options: int) -> int:
        return self._buffer("newBufferWithLength:options:", options, nbytes, 0)

    @method("newBufferWithBytesNoCopy:length:options:deallocator:", "@@:^vQQ@?")
    def new_view(self, pointer: int, nbytes: int, options: int, deallocator: int) -> int:
        selector = "newBufferWithBytesNoCopy:length:options:deallocator:"
        return self._buffer(selector, options, nbytes, pointer)

    def _buffer(self, selector: str, options: int, nbytes: int, pointer: int) -> int:
        machine = self.machine
        if options:
            machine.objc.tell(f"buffer options {options}: the simulation has shared ones alone")
            return 0
        if machine.behaviour.refuse(selector):
            return 0
        state = (
            buffer_of_pages(machine, pointer, nbytes) if pointer else new_buffer(machine, nbytes)
        )
        return machine.objc.make("MTLBuffer", state) if state is not None else 0

    @method("newLibraryWithSource:options:error:", "@@:@@^@")
    def new_library(self, source: int, options: int, error: int) -> int:
        machine = self.machine
        text = machine.objc.state(source, FakeString, "a source")
        settings = machine.objc.state(options, FakeSettings, "compile options")
        if text is None:
            return 0
        if settings is not None and settings.language < LANGUAGE_3:
            machine.objc.tell("addresses of buffers are of Metal 3")
        try:
            path = machine.compiler.kernel(text.text, settings is None or settings.fast)
        except CompileError as problem:
            return machine.fail(error, f"program_source: {problem}")
        library = FakeLibrary(machine, path, entry_of(text.text))
        selector = "newLibraryWithSource:options:error:"
        made = machine.make(selector, "MTLLibrary", library)
        return made or machine.fail(error, "Compiler encountered an internal error")

    @method("newComputePipelineStateWithDescriptor:options:reflection:error:", "@@:@Q^@^@")
    def new_pipeline(self, descriptor: int, options: int, reflection: int, error: int) -> int:
        machine = self.machine
        requested = machine.objc.state(descriptor, FakePipelineDescriptor, "a pipeline descriptor")
        if requested is None or requested.function is None:
            return machine.fail(error, "computeFunction must not be nil")
        launch = machine.launch(requested.function.path)
        items = min(requested.items, machine.behaviour.pipeline_items)
        pipeline = FakePipeline(machine, launch, items, requested.indirect)
        selector = "newComputePipelineStateWithDescriptor:options:reflection:error:"
        made = machine.make(selector, "MTLComputePipelineState", pipeline)
        return made or machine.fail(error, "XPC_ERROR_CONNECTION_INTERRUPTED")

    @method("newIndirectCommandBufferWithDescriptor:maxCommandCount:options:", "@@:@QQ")
    def new_commands(self, descriptor: int, count: int, options: int) -> int:
        machine = self.machine
        requested = machine.objc.state(descriptor, FakeCommandsDescriptor, "a commands descriptor")
        if requested is None:
            return 0
        bindings = 0 if requested.inherits_buffers else requested.bindings
        if requested.types != 1 << 5 or requested.inherits_pipeline or not count:
            machine.objc.tell("the simulation has concurrent dispatches alone, each whole")
            return 0
        selector = "newIndirectCommandBufferWithDescriptor:maxCommandCount:options:"
        commands = FakeCommands(machine, count, bindings)
        return machine.make(selector, "MTLIndirectCommandBuffer", commands)


def string_methods() -> tuple[Any, ...]:
    """The methods of NSString and NSError, and of classes that make objects."""

    def of_text(machine: Machine, characters: int) -> int:
        ffi = machine.objc.ffi
        text = ffi.string(ffi.cast("char *", characters)).decode()
        return 0 if machine.behaviour.refuse("stringWithUTF8String:") else machine.string(text)

    return (
        method("stringWithUTF8String:", "@#:r*", of_class=True)(of_text),
        method("UTF8String", "r*@:")(FakeString.utf8),
        method("localizedDescription", "@@:")(lambda error: error.machine.string(error.said)),
    )


def new(kind: type, name: str) -> Any:
    """The method ``new`` of a class of states."""
    return method("new", "@#:", of_class=True)(
        lambda machine: machine.make("new", name, kind(machine))
    )
