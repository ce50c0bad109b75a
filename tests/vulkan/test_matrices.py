"""Matrix units: which devices have them, and products that are made for them, whose work the items
of a subgroup do here."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.kernels.matrix_tiles import FEW_PRODUCT, WIDE_PRODUCT, WIDE_PRODUCTS
from accel.kernels.product_check import matrices_agree
from accel.kernels.source import (
    PLANE_OPS,
    PLANE_PRODUCT,
    Language,
    Module,
    Traits,
    matrix_modules,
    module_source,
    plane_modules,
)
from accel.packets import fused
from accel.packets.rules import lower_graph
from accel.vulkan import program as program_module
from accel.vulkan.api import Vulkan
from accel.vulkan.build import Build, compiled, kernel_file
from accel.vulkan.device import Instance
from accel.vulkan.expanded_tiles import PLANES_FROM, TILED
from accel.vulkan.launcher import launch_packet
from accel.vulkan.matrices import EXTENSION, GROUP_MEMORY_BYTES, SHAPE, VENDORS, has_matrices
from accel.vulkan.matrix_tiles import SMALL_BUCKETS
from accel.vulkan.tier import VulkanTier
from contract.dtypes import I12, Q4_K, Q5_1
from contract.kernel import KernelHeader, decode_kernel
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from harness.parity.cases import Case, all_cases
from harness.parity.execute import build_graph, compare
from tests.long_cases import long_except
from tests.vulkan.conftest import Library

FORMAT = Q4_K


def pretended(vulkan: Vulkan, **changes: Any) -> bool:
    """Whether a device counts as having matrix units that has all it takes but for ``changes``."""
    told = {
        "items": 32, "operations": 0x10, "matrices": 1, "model": 1, "function": True, "type": 3,
        "scope": 3,
    }  # fmt: skip
    told |= {"vendor": min(VENDORS), "extensions": {EXTENSION}, "memory": GROUP_MEMORY_BYTES}
    told |= changes
    ffi = vulkan.ffi

    @ffi.callback("PFN_GetCooperativeMatrixProperties")  # type: ignore[untyped-decorator]
    def listed(device: Any, count: Any, entries: Any) -> int:
        count[0] = 2
        if entries != ffi.NULL:
            shape = entries[1]
            shape.MSize, shape.NSize, shape.KSize = SHAPE
            shape.AType = shape.BType = told["type"]
            shape.CType = shape.ResultType = 5
            shape.scope = told["scope"]
        return 0

    def properties(real: Any, device: Any, chain: Any) -> None:
        eleven = ffi.cast("VkPhysicalDeviceVulkan11Properties *", chain.pNext)
        eleven.subgroupSize = told["items"]
        eleven.subgroupSupportedOperations = told["operations"]

    def features(real: Any, device: Any, chain: Any) -> None:
        twelve = ffi.cast("VkPhysicalDeviceVulkan12Features *", chain.pNext)
        twelve.vulkanMemoryModel = told["model"]
        kind = "VkPhysicalDeviceCooperativeMatrixFeaturesKHR *"
        ffi.cast(kind, twelve.pNext).cooperativeMatrix = told["matrices"]

    def address(real: Any, instance: Any, name: Any) -> Any:
        return ffi.cast("void *", listed) if told["function"] else ffi.NULL

    instead = {
        "vkGetPhysicalDeviceProperties2": properties,
        "vkGetPhysicalDeviceFeatures2": features,
        "vkGetInstanceProcAddr": address,
    }
    with Instance(vulkan) as instance:
        device = instance.devices()[0]
        faked = replace(
            device,
            extensions=frozenset(told["extensions"]),
            group_memory_bytes=told["memory"],
            cache_key=replace(device.cache_key, vendor=told["vendor"]),
        )
        return has_matrices(Vulkan(ffi, Library(vulkan.library, instead)), instance.handle, faked)


def test_a_device_that_has_everything_has_matrix_units(vulkan):
    assert pretended(vulkan)


@pytest.mark.parametrize(
    "change",
    [
        {"items": 64},
        {"operations": 0xF},
        {"matrices": 0},
        {"model": 0},
        {"function": False},
        {"type": 7},
        {"scope": 2},
        {"vendor": 0x8086},
        {"extensions": set()},
        {"memory": 32 << 10},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_missing_is_enough(vulkan, change):
    """Other subgroups, no feature, no function, bytes without signs, a device nobody has tried."""
    assert not pretended(vulkan, **change)


def with_units(monkeypatch: pytest.MonkeyPatch, spoil: tuple[str, str] = ("", "")) -> None:
    """Modules for matrix units are what items do instead, ``spoil`` replaced in their text."""
    real = program_module.kernel_of
    made: dict[str, KernelHeader] = {}

    def kernel_of(name: str) -> KernelHeader:
        if not name.endswith(".matrix"):
            return real(name)
        if name not in made:
            known = (*matrix_modules(vulkan=True), *plane_modules())
            module = next(m for m in known if name == f"{m}.matrix")
            text = module_source(Language.VULKAN, module, Traits(dot=True)).replace(*spoil)
            text = text.replace("#define UNROLL [[unroll]]", "#define UNROLL")
            build = Build(module, dot=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Build, "text", property(lambda self: text))
                made[name] = decode_kernel(kernel_file(build, compiled(build)))
        return made[name]

    monkeypatch.setattr(program_module, "kernel_of", kernel_of)
    monkeypatch.setattr(program_module, "_check_limits", lambda header, device: None)
    monkeypatch.setattr("accel.kernels.product_check.FORMATS", (FORMAT,))


def agree(tier: VulkanTier) -> bool:
    runtime = tier._runtime
    launch = partial(launch_packet, runtime.memory, runtime.program)
    return matrices_agree(runtime.memory, launch, every=True)


@pytest.mark.parametrize(
    "wide",
    [
        pytest.param((), marks=pytest.mark.long, id="small"),
        pytest.param(WIDE_PRODUCTS, marks=pytest.mark.soak, id="all"),
    ],
)
def test_a_device_is_asked_for_the_bits_of_packed_dots(tier, monkeypatch, wide):
    """A processor's compiler takes half a minute for wide tiles, whose bits tests of kernels
    have."""
    with_units(monkeypatch)
    monkeypatch.setattr("accel.kernels.product_check.WIDE_PRODUCTS", wide)
    assert agree(tier)
    assert {*wide, FEW_PRODUCT, PLANE_PRODUCT} <= {m.op for m, _ in tier._runtime.program._kernels}


WRONG = ("rows.stride * ELEMENT_ROW(e)", "rows.stride * (ELEMENT_ROW(e) ^ 8u)")


@pytest.mark.parametrize("spoil", [("", ""), WRONG], ids=["right", "wrong"])
def test_a_device_that_multiplies_wrong_is_noticed(open_vulkan, monkeypatch, spoil):
    """Elements are not where the kernel looks for them. Of a format with one kernel, which a
    processor's compiler has soon; the others are those of the next test."""
    with_units(monkeypatch, spoil)
    monkeypatch.setattr("accel.kernels.product_check.FORMATS", (Q5_1,))
    assert agree(open_vulkan()) == (spoil != WRONG)


class HeldHere:
    """Memory of the host in place of a device's; what is allocated stays in ``allocated``."""

    def __init__(self) -> None:
        self.allocated: list[SimpleNamespace] = []

    def adopt(self, what: str, data: NDArray[np.uint8]) -> SimpleNamespace:
        return SimpleNamespace(address=0, nbytes=data.nbytes, bytes=data)

    def allocate(self, what: str, nbytes: int) -> SimpleNamespace:
        self.allocated.append(self.adopt(what, np.zeros(nbytes, np.uint8)))
        return self.allocated[-1]

    def write(self, allocation: SimpleNamespace, offset: int, data: NDArray[np.uint8]) -> None:
        allocation.bytes[offset : offset + data.nbytes] = data

    def read(self, allocation: SimpleNamespace, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return allocation.bytes[offset : offset + nbytes].copy()

    def free(self, allocation: SimpleNamespace) -> None:
        """Nothing is given back."""


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("wrong", [None, "matmul_tiles", FEW_PRODUCT, WIDE_PRODUCT, PLANE_PRODUCT])
def test_every_kernel_is_compared_with_packed_dots(monkeypatch, wrong, silent):
    """Kernels that write the same agree, but not where one of them has another bit, or writes
    nothing."""
    memory = HeldHere()
    launched = []

    def launch(module: Module, packet: Any, groups: int) -> None:
        launched.append(module.op)
        if module.op.startswith("expand") or (module.op == wrong and silent):
            return
        memory.allocated[0].bytes[:] = 0
        memory.allocated[0].bytes[-4] = module.op == wrong

    monkeypatch.setattr("accel.kernels.product_check.FORMATS", (FORMAT,))
    assert matrices_agree(cast(Any, memory), launch, every=True) is (wrong is None)
    assert wrong is None or wrong in launched


MANY = [
    case
    for case in all_cases(1)
    if case.opcode is Opcode.MATMUL and case.dtype == FORMAT and case.sizes["tokens"] == 17
]


STEPS: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "tiles": ({"matrix_tiles.SMALL_BUCKETS": (16,)}, {"matmul_tiles"}, {*PLANE_OPS}),
    "small tiles": ({}, {"matmul_few"}, {"matmul_tiles"}),
    "wide tiles": (
        {"matrix_tiles.WIDE_FROM": 17, "matrix_tiles.MIN_ROWS": 1},
        *({WIDE_PRODUCT}, {"matmul_tiles"}),
    ),
    "narrow tiles": (
        {"matrix_tiles.WIDE_FROM": 17, "matrix_tiles.MIN_ROWS": 1 << 20},
        *({"matmul_narrow"}, {"matmul_tiles"}),
    ),
    "planes": (
        {"expanded_tiles.FORMATS": (FORMAT,), "expanded_tiles.PLANES_FROM": 17,
         "expanded_tiles.MIN_ROWS": 1},
        *({*PLANE_OPS}, {"matmul_tiles"}),
    ),
}  # fmt: skip
"""What steps of MANY are multiplied in where these constants are others, and in what not."""


@pytest.mark.parametrize("name", long_except(STEPS, "tiles", "small tiles", "planes"))
def test_steps_of_many_tokens_are_multiplied_in_tiles(open_vulkan, monkeypatch, name):
    """Of the whole tier: lowered, fused, launched, equal to the definition."""
    constants, used, unused = STEPS[name]
    with_units(monkeypatch)
    for constant, value in constants.items():
        monkeypatch.setattr(f"accel.vulkan.{constant}", value)
    tier = open_vulkan(traits=Traits(dot=True, matrix=True))
    for case in MANY:
        assert compare(tier, case) == {}, str(case)
    modules = {module.op for module, _ in tier._runtime.program._kernels}
    assert used <= modules
    assert not unused & modules


@pytest.mark.parametrize("most", [*SMALL_BUCKETS, TILED])
def test_such_steps_have_forms_of_their_own(open_vulkan, most):
    """Where there are matrix units, which are worth it from fewer tokens on than packed dots, and
    larger steps are expanded."""
    units, dots = (open_vulkan(traits=Traits(dot=True, matrix=m)) for m in (True, False))
    largest = ShapeKey(PLANES_FROM if most == TILED else SMALL_BUCKETS[-1] + 1, 4)
    assert ShapeKey(most, 4) in units.buckets(largest)
    assert ShapeKey(most, 4) not in dots.buckets(largest)
    assert (ShapeKey(most, 4) in units.buckets(ShapeKey(PLANES_FROM - 1, 4))) == (most != TILED)


PROMPTS = [
    case
    for case in all_cases(1)
    if case.opcode is Opcode.FLASH_ATTN_BATCHED
    and case.dtype == I12
    and case.sizes["tokens"] == 17
    and case.sizes["head_dim"] in (64, 128)
]


def has_whole_queries(case: Case) -> bool:
    """Whether queries are all columns of their operand."""
    return build_graph(case).nodes[0].operands["q"].columns is None


@pytest.mark.long
def test_many_queries_are_attended_in_tiles(open_vulkan, monkeypatch):
    """The same of attention, of which a few cases do, each window among them; they have fewer
    tokens than it takes."""
    with_units(monkeypatch)
    monkeypatch.setattr(fused, "ATTENTION_TILES_FROM", PROMPTS[0].sizes["tokens"])
    tier = open_vulkan(traits=Traits(dot=True, matrix=True))
    tiled = [case for case in PROMPTS if has_whole_queries(case) and not case.params["soft_cap"]]
    windows = {case.params["window"]: case for case in tiled}
    assert min(windows) < 0 < max(windows)
    for case in windows.values():
        problems = compare(tier, case)
        assert not problems, f"{case}: {problems}"
    modules = {module.op for module, _ in tier._runtime.program._kernels}
    assert "flash_attn_tiles" in modules


def test_queries_are_attended_in_tiles_where_they_are_whole_vectors(monkeypatch):
    """Every other case has them within wider rows."""
    monkeypatch.setattr(fused, "ATTENTION_TILES_FROM", PROMPTS[0].sizes["tokens"])
    found = set()
    for case in PROMPTS:
        if case.params["soft_cap"] == 0.0:
            key = ShapeKey(case.sizes["tokens"], 0)
            step = lower_graph(build_graph(case), key, 128, "vulkan")
            tiles = fused.fuse(step, True, attention=True).ops[0].name == "flash_attn_tiles"
            found.add((has_whole_queries(case), tiles))
    assert found == {(True, True), (False, False)}
