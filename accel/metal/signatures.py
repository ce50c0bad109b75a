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
SIZE, RANGE = "MTLSize", "NSRange"

_METHODS = """
id = new localizedDescription name newCommandQueue newSharedEvent commandBuffer
id = computeCommandEncoder blitCommandEncoder error
id,char * = stringWithUTF8String:
char * = UTF8String
_Bool,SEL = respondsToSelector:
_Bool,int64_t = supportsFamily:
_Bool = hasUnifiedMemory
uint64_t = recommendedMaxWorkingSetSize currentAllocatedSize maxBufferLength
uint64_t = maxThreadgroupMemoryLength gpuAddress maxTotalThreadsPerThreadgroup status signaledValue
id,uint64_t,uint64_t = newBufferWithLength:options:
id,void *,uint64_t,uint64_t,void * = newBufferWithBytesNoCopy:length:options:deallocator:
id,id,id,id * = newLibraryWithSource:options:error:
id,id,uint64_t,id *,id * = newComputePipelineStateWithDescriptor:options:reflection:error:
id,id,uint64_t,uint64_t = newIndirectCommandBufferWithDescriptor:maxCommandCount:options:
void * = contents
void,uint64_t = setLanguageVersion: setMaxTotalThreadsPerThreadgroup: setCommandTypes:
void,uint64_t = setMaxKernelBufferBindCount:
void,int64_t = setMathMode: setMathFloatingPointFunctions:
void,_Bool = setFastMathEnabled: setSupportIndirectCommandBuffers: setInheritBuffers:
void,_Bool = setInheritPipelineState:
id,id = newFunctionWithName:
void,id = setComputeFunction: setComputePipelineState:
id,uint64_t = indirectComputeCommandAtIndex:
void,id,uint64_t,uint64_t = setKernelBuffer:offset:atIndex: setBuffer:offset:atIndex:
void,MTLSize,MTLSize = concurrentDispatchThreadgroups:threadsPerThreadgroup:
void,MTLSize,MTLSize = dispatchThreadgroups:threadsPerThreadgroup:
void = setBarrier endEncoding commit
void,id *,uint64_t,uint64_t = useResources:count:usage:
void,id,NSRange = executeCommandsInBuffer:withRange:
void,id,uint64_t,id,uint64_t,uint64_t = copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:
void,id,uint64_t = encodeSignalEvent:value:
_Bool,uint64_t,uint64_t = waitUntilSignaledValue:timeoutMS:
"""
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    selector: tuple(types.split(","))
    for types, selectors in re.findall("(.+) = (.+)", _METHODS)
    for selector in selectors.split()
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
