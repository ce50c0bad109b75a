"""The types of the methods that are called, as Apple's headers declare them.

A message is a call of ``objc_msgSend`` with exactly the arguments of the method: on arm64 a wrong
type is no error but a wrong register. So these types are compared with the runtime's before a
method is first called."""

from __future__ import annotations

import re
from collections.abc import Mapping

DECLARATIONS = """
typedef void *id;
typedef void *SEL;
typedef void *Class;
typedef struct { uint64_t width, height, depth; } MTLSize;
typedef struct { uint64_t location, length; } NSRange;
Class objc_getClass(const char *name);
SEL sel_registerName(const char *name);
Class object_getClass(id object);
void *class_getInstanceMethod(Class kind, SEL selector);
const char *method_getTypeEncoding(void *method);
id objc_retain(id object);
void objc_release(id object);
void *objc_autoreleasePoolPush(void);
void objc_autoreleasePoolPop(void *pool);
void objc_msgSend(void);
"""
METAL_DECLARATIONS = "void *MTLCreateSystemDefaultDevice(void);"

NATURAL, INTEGER, TRUTH = "uint64_t", "int64_t", "_Bool"
SIZE, RANGE, ERROR = "MTLSize", "NSRange", "id *"

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "new": ("id",),
    "stringWithUTF8String:": ("id", "char *"),
    "UTF8String": ("char *",),
    "localizedDescription": ("id",),
    "respondsToSelector:": (TRUTH, "SEL"),
    # MTLDevice
    "name": ("id",),
    "supportsFamily:": (TRUTH, INTEGER),
    "hasUnifiedMemory": (TRUTH,),
    "recommendedMaxWorkingSetSize": (NATURAL,),
    "currentAllocatedSize": (NATURAL,),
    "maxBufferLength": (NATURAL,),
    "maxThreadgroupMemoryLength": (NATURAL,),
    "newCommandQueue": ("id",),
    "newSharedEvent": ("id",),
    "newBufferWithLength:options:": ("id", NATURAL, NATURAL),
    "newBufferWithBytesNoCopy:length:options:deallocator:": (
        *("id", "void *", NATURAL, NATURAL),
        "void *",
    ),
    "newLibraryWithSource:options:error:": ("id", "id", "id", ERROR),
    "newComputePipelineStateWithDescriptor:options:reflection:error:": (
        *("id", "id", NATURAL, ERROR, ERROR),
    ),
    "newIndirectCommandBufferWithDescriptor:maxCommandCount:options:": (
        *("id", "id", NATURAL, NATURAL),
    ),
    # MTLBuffer
    "contents": ("void *",),
    "gpuAddress": (NATURAL,),
    # MTLCompileOptions
    "setLanguageVersion:": ("void", NATURAL),
    "setMathMode:": ("void", INTEGER),
    "setMathFloatingPointFunctions:": ("void", INTEGER),
    "setFastMathEnabled:": ("void", TRUTH),
    # MTLLibrary and pipelines
    "newFunctionWithName:": ("id", "id"),
    "setComputeFunction:": ("void", "id"),
    "setMaxTotalThreadsPerThreadgroup:": ("void", NATURAL),
    "setSupportIndirectCommandBuffers:": ("void", TRUTH),
    "maxTotalThreadsPerThreadgroup": (NATURAL,),
    # MTLIndirectCommandBuffer
    "setCommandTypes:": ("void", NATURAL),
    "setInheritBuffers:": ("void", TRUTH),
    "setInheritPipelineState:": ("void", TRUTH),
    "setMaxKernelBufferBindCount:": ("void", NATURAL),
    "indirectComputeCommandAtIndex:": ("id", NATURAL),
    "setKernelBuffer:offset:atIndex:": ("void", "id", NATURAL, NATURAL),
    "concurrentDispatchThreadgroups:threadsPerThreadgroup:": ("void", SIZE, SIZE),
    "setBarrier": ("void",),
    # MTLCommandQueue and what is encoded
    "commandBuffer": ("id",),
    "computeCommandEncoder": ("id",),
    "useResources:count:usage:": ("void", "id *", NATURAL, NATURAL),
    "setComputePipelineState:": ("void", "id"),
    "setBuffer:offset:atIndex:": ("void", "id", NATURAL, NATURAL),
    "dispatchThreadgroups:threadsPerThreadgroup:": ("void", SIZE, SIZE),
    "executeCommandsInBuffer:withRange:": ("void", "id", RANGE),
    "blitCommandEncoder": ("id",),
    "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:": (
        *("void", "id", NATURAL, "id", NATURAL, NATURAL),
    ),
    "endEncoding": ("void",),
    "encodeSignalEvent:value:": ("void", "id", NATURAL),
    "commit": ("void",),
    "status": (NATURAL,),
    "error": ("id",),
    # MTLSharedEvent
    "signaledValue": (NATURAL,),
    "waitUntilSignaledValue:timeoutMS:": (TRUTH, NATURAL, NATURAL),
}
"""For each selector the method's result, then its arguments after receiver and selector."""

KINDS = {
    "id": "pointer",
    "SEL": "pointer",
    "char *": "pointer",
    "void *": "pointer",
    "id *": "pointer",
    "void": "nothing",
    TRUTH: "8 bits",
    NATURAL: "64 bits",
    INTEGER: "64 bits",
    SIZE: "3 x 64 bits",
    RANGE: "2 x 64 bits",
}
CODES = {
    **dict.fromkeys("@#:*^", "pointer"),
    **dict.fromkeys("QqLl", "64 bits"),
    **dict.fromkeys("BcC", "8 bits"),
    "v": "nothing",
    "i": "32 bits",
    "I": "32 bits",
    "f": "binary32",
    "d": "binary64",
}
TOKEN = re.compile(r"[rnNoORVA]*(\{(?P<fields>[^{}]*)\}|\^*(\{[^{}]*\}|@\?|.))\d*")


def kinds_of(encoding: str) -> tuple[str, ...]:
    """The kinds of register for a method's result and arguments, from its type encoding such as
    ``@32@0:8Q16Q24``."""
    found = []
    for token in TOKEN.finditer(encoding):
        code = token[1]
        fields = token["fields"]
        if fields is not None:
            words = fields.partition("=")[2]
            found.append(f"{len(words)} x 64 bits" if set(words) <= set("Qq") else code)
        else:
            found.append(CODES.get(code[0], code))
    return (found[0], *found[3:]) if found else ()


def declared_kinds(selector: str) -> tuple[str, ...]:
    """The kinds of register for a signature of ``SIGNATURES``."""
    return tuple(KINDS[kind] for kind in SIGNATURES[selector])
