"""Every way a tier runs on a machine without an accelerator: what tests of all tiers go through."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from accel.amd.runtime import Choices as AmdChoices
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.fake_machine import Behaviour
from accel.amd.tier import AmdTier
from accel.cuda.program import Compiler
from accel.cuda.runtime import Choices as CudaChoices
from accel.cuda.tier import CudaTier
from accel.intel.runtime import Choices as IntelChoices
from accel.intel.tier import IntelTier
from accel.kernels.source import Traits
from accel.metal.runtime import Choices as MetalChoices
from accel.metal.tier import MetalTier
from accel.native.tier import Choices as NativeChoices
from accel.native.tier import NativeTier
from accel.opencl.tier import OpenClTier
from accel.packets.arenas import ArenaKind, ArenaMemory
from accel.vulkan.api import load_vulkan
from accel.vulkan.tier import VulkanTier
from contract.tier import Tier
from contract.types import Request
from reference.cpu.tier import CpuTier
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_nvrtc import FakeNvrtc
from tests.intel.simulated import new_gpu
from tests.metal.conftest import new_mac
from tests.model_runs import FEW, REQUESTS, SHORT
from tests.needs import need_device
from tests.opencl.conftest import WAYS as OPENCL_WAYS
from tests.opencl_parts import HALF_OF_THEM, SOME, holding, is_usual, portable
from tests.vulkan.conftest import WAYS as VULKAN_WAYS

OpenTier = Callable[..., Tier]
"""``open_it(memory_bytes=None)``: a tier that may take so much memory."""
SCRATCH, INPUTS = "scratch", "inputs of a step"


@dataclass(frozen=True)
class Way:
    """``opening(cache)`` is a machine on which tiers are opened and closed, clean at its end.

    ``grows`` is the memory that steps share, ``requests`` are what a model is asked on it, none
    where it does not have the kernels of every op."""

    opening: Callable[[Path], AbstractContextManager[OpenTier]]
    grows: tuple[str, ...] = ()
    requests: tuple[Request, ...] = ()


@contextmanager
def _cpu(cache: Path) -> Iterator[OpenTier]:
    yield lambda memory_bytes=None: CpuTier()


@contextmanager
def _opencl(cache: Path, way: str) -> Iterator[OpenTier]:
    choices = replace(OPENCL_WAYS[way], cache=cache)

    def open_it(memory_bytes: int | None = None) -> Tier:
        return need_device(lambda: OpenClTier(choices=replace(choices, memory_bytes=memory_bytes)))

    with holding(SOME, not is_usual(choices)):
        yield open_it


@contextmanager
def _portable(cache: Path) -> Iterator[OpenTier]:
    choices = replace(OPENCL_WAYS["persistent"], cache=cache)
    with portable(), holding(HALF_OF_THEM):
        yield lambda memory_bytes=None: need_device(lambda: OpenClTier(choices=choices))


@contextmanager
def _native(cache: Path) -> Iterator[OpenTier]:
    def open_it(memory_bytes: int | None = None) -> Tier:
        choices = NativeChoices(memory_bytes=memory_bytes, cache=cache)
        return need_device(lambda: NativeTier(choices=choices))

    yield open_it


@cache
def _vulkan_library() -> Any:
    return need_device(load_vulkan)


@contextmanager
def _vulkan(cache: Path, way: str) -> Iterator[OpenTier]:
    library, choices = _vulkan_library(), replace(VULKAN_WAYS[way], cache=cache)

    def open_it(memory_bytes: int | None = None) -> Tier:
        chosen = replace(choices, memory_bytes=memory_bytes)
        return need_device(lambda: VulkanTier(choices=chosen, vulkan=library))

    yield open_it


@contextmanager
def _metal(cache: Path) -> Iterator[OpenTier]:
    mac = new_mac(cache)
    yield lambda memory_bytes=None: MetalTier(
        choices=MetalChoices(memory_bytes=memory_bytes), metal=mac.metal
    )
    assert (mac.problems, mac.leaked, mac.taken) == ([], [], 0)


@contextmanager
def _intel(cache: Path) -> Iterator[OpenTier]:
    gpu = new_gpu(cache)
    choices = IntelChoices(traits=Traits(), cache=cache / "intel")
    yield lambda memory_bytes=None: IntelTier(
        choices=replace(choices, memory_bytes=memory_bytes), zero=gpu.zero
    )
    assert (gpu.problems, gpu.leaked) == ([], 0)


@contextmanager
def _amd(cache: Path, tier: str) -> Iterator[OpenTier]:
    """What a GPU is tested for before it is used, which takes longer than a test's steps, has tests
    of its own."""
    kernels: list[FakeKernel] = []

    def open_it(memory_bytes: int | None = None) -> Tier:
        kernels.append(FakeKernel(Behaviour(checked=True)))
        choices = AmdChoices(memory_bytes, native=True, matrices=True)
        return AmdTier(choices=choices, kernel=kernels[-1], tier=tier)

    yield open_it
    assert not any(kernel.leaked for kernel in kernels)


@contextmanager
def _cuda(cache: Path) -> Iterator[OpenTier]:
    driver = FakeDriver()
    yield lambda memory_bytes=None: CudaTier(
        choices=CudaChoices(memory_bytes=memory_bytes),
        binding=driver,
        compiler=Compiler(FakeNvrtc()),
    )


@contextmanager
def _cuda_device(cache: Path) -> Iterator[OpenTier]:
    def open_it(memory_bytes: int | None = None) -> Tier:
        choices = CudaChoices(memory_bytes=memory_bytes, cache=cache)
        return need_device(lambda: CudaTier(choices=choices))

    yield open_it


def _opencl_way(way: str, *grows: str) -> Way:
    return Way(partial(_opencl, way=way), (SCRATCH, *grows), REQUESTS)


def _vulkan_way(way: str) -> Way:
    return Way(partial(_vulkan, way=way), (SCRATCH, INPUTS), SHORT)


WAYS = {
    "cpu": Way(_cpu), "native": Way(_native, (SCRATCH,), REQUESTS),
    "opencl": _opencl_way("persistent"), "opencl-banked": _opencl_way("banked", INPUTS),
    "vulkan": _vulkan_way("shared"), "vulkan-own-memory": _vulkan_way("own-memory"),
    "metal-simulated": Way(_metal, (SCRATCH,), FEW),
    "intel-simulated": Way(_intel, (SCRATCH,), FEW),
    "amd-kfd": Way(partial(_amd, tier="t1"), (SCRATCH,), FEW),
    "amd-userq": Way(partial(_amd, tier="t2"), (SCRATCH,), FEW),
    "cuda-emulated": Way(_cuda, (SCRATCH, INPUTS)),
}  # fmt: skip
"""One way for each kind of memory and queue. None is called as a tier that needs its device."""
OTHERS = {
    "opencl-one-worker": _opencl_way("one-worker"),
    "opencl-launch": _opencl_way("launch"),
    "opencl-banked-launch": _opencl_way("banked-launch", INPUTS),
    "opencl-integers": _opencl_way("integer-remedies"),
    "vulkan-integers": _vulkan_way("integer-remedies"),
    "cuda": Way(_cuda_device, (SCRATCH, INPUTS), REQUESTS),
}
"""What computes otherwise, but has memory and a queue like one of WAYS, or needs its device."""
BY_NAME = WAYS | OTHERS | {"opencl-portable": Way(_portable)}
"""And what computes otherwise on other processors."""
DEVICES = [name for name in WAYS if name != "cpu"]
"""Those on the base of device tiers."""
MODELS = [name for name, way in WAYS.items() if way.requests]
SOAKING = ("opencl-banked-launch",)


def used_bytes(tier: Any) -> int:
    """Memory that somebody has of the tier."""
    memory = getattr(tier, "_memory", None)
    if isinstance(memory, ArenaMemory):
        kinds = ArenaKind.MODEL, ArenaKind.STEPS
        arenas = [arena for arena in memory._arenas if arena.kind in kinds]
        return sum(arena.nbytes - arena.ranges.free_bytes for arena in arenas)
    used: int = getattr(memory, "used", tier.allocated_bytes)
    return used
