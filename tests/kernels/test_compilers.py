"""Every module of the kernel dialect compiles as CUDA. As GLSL all are compiled already: see
``tests/vulkan/test_build.py``."""

import pytest

from accel.kernels.source import Language, Module, Traits, module_source, modules
from tests.needs import need_module

OLDEST, NEWEST = "sm_80", "sm_90a"
QUICK = ("--std=c++17", "--Ofast-compile=max")
"""Hardly optimized: what is told is the same."""
NATIVE = Traits(dot=True)
MODULES = modules()
ONE_OF_EACH = tuple({module.op: module for module in MODULES}.values())
OPS = tuple(module.op for module in ONE_OF_EACH)
FORMATS = {op: [module for module in MODULES if module.op == op] for op in OPS}
"""The modules of each op."""
MANY = [op for op in OPS if len(FORMATS[op]) > 1]


def built_always(module: Module, architecture: str) -> bool:
    """Every op and every format for the newest, though only products and KV writes in each, and
    some ops for the oldest. GLSL's compiler is given all of them; the rest are soak tests."""
    if architecture == OLDEST:
        return OPS.index(module.op) % 4 == 0
    if module.op in ("matmul", "kv_write_batched") or module.op not in MANY:
        return True
    return FORMATS[module.op].index(module) % 4 == MANY.index(module.op) % 4


def marks_of(module: Module, architecture: str) -> list[pytest.MarkDecorator]:
    """``ci/test`` compiles each op once for the newest."""
    if not built_always(module, architecture):
        return [pytest.mark.soak]
    short = architecture == NEWEST and module in ONE_OF_EACH
    return [] if short else [pytest.mark.long]


BUILT = [
    pytest.param(module, architecture, marks=marks_of(module, architecture))
    for module, architecture in (
        *((module, NEWEST) for module in MODULES),
        *((module, OLDEST) for module in ONE_OF_EACH),
    )
]


def built_by_nvrtc(text: str, architecture: str) -> str:
    """What NVRTC says, nothing if all is well."""
    nvrtc = need_module("cuda.bindings.nvrtc", "cuda")
    options = [f"--gpu-architecture={architecture}", "--fmad=false", *QUICK]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    try:
        nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.decode().strip("\0")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def test_every_op_and_every_format_are_built():
    always = [module for module in MODULES if built_always(module, NEWEST)]
    assert {module.op for module in always} == set(OPS)
    assert {module.dtype for module in always} == {module.dtype for module in MODULES}


@pytest.mark.parametrize(("module", "architecture"), BUILT, ids=str)
def test_cuda(module, architecture):
    """Without a warning: everything for the newest, where a step's launches overlap, and every
    op in one format for the oldest."""
    assert built_by_nvrtc(module_source(Language.CUDA, module, NATIVE), architecture) == ""


def test_an_error_in_cuda_is_found_where_it_is():
    """The compiler names the kernel's file and line."""
    text = module_source(Language.CUDA, Module("add")).replace("A(a) + A(b)", "A(a) +")
    assert "add.k(6)" in built_by_nvrtc(text, OLDEST)
