"""The GPUs that amdkfd lists in ``/sys``, and the sizes that a queue on one of them needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from accel.amd.kernel import Kernel

NODES = "/sys/devices/virtual/kfd/kfd/topology/nodes"
PAGE = 4096
EOP_BYTES = 4096
WAVES_PER_CU = 32
VGPR_BYTES = 0x60000
"""Vector registers of a CU of the supported GPUs; SAVED_PER_CU includes all else of a CU that is
saved."""
SAVED_PER_CU = VGPR_BYTES + 0x4000 + 0x10000 + 0x1000
CONTROL_PER_WAVE = 12
CONTROL_HEAD = 48
DEBUG_PER_WAVE = 32
DEBUG_ALIGNMENT = 64
PUBLIC_HEAP = 1
"""``heap_type`` of a GPU's memory that the host can map entirely."""
UNNAMED = "ip discovery"
"""The kernel's name for GPUs that list their parts themselves, as all of these do."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One node. ``properties`` are those the kernel reports."""

    node: str
    gpu_id: int
    name: str
    properties: Mapping[str, int]
    memory_bytes: int
    """Bytes of its own memory that the host can access: 0 without a resizable BAR."""

    @property
    def target(self) -> int:
        """Major, minor and stepping as a decimal number."""
        return self.properties.get("gfx_target_version", 0)

    @property
    def architecture(self) -> str:
        """The compiler's name of the architecture."""
        major, rest = divmod(self.target, 10000)
        minor, stepping = divmod(rest, 100)
        return architecture(major, minor, stepping)

    @property
    def render_node(self) -> str:
        """The file of the graphics driver."""
        return f"/dev/dri/renderD{self.properties['drm_render_minor']}"

    @property
    def compute_units(self) -> int:
        """Compute units of one of its dies."""
        dies = max(self.properties.get("num_xcc", 1), 1)
        return self.properties["simd_count"] // self.properties["simd_per_cu"] // dies

    @property
    def control_stack_bytes(self) -> int:
        """Bytes that a preempted queue needs for the order of its waves."""
        if stated := self.properties.get("ctl_stack_size"):
            return stated
        return _pages(CONTROL_HEAD + CONTROL_PER_WAVE * WAVES_PER_CU * self.compute_units)

    @property
    def save_bytes(self) -> int:
        """Bytes that a preempted queue needs in all."""
        if stated := self.properties.get("cwsr_size"):
            return stated
        return self.control_stack_bytes + _pages(self.compute_units * SAVED_PER_CU)

    @property
    def save_area_bytes(self) -> int:
        """Bytes of the allocation for a preempted queue, the debugger's part included."""
        waves = WAVES_PER_CU * self.compute_units
        debug = -(-DEBUG_PER_WAVE * waves // DEBUG_ALIGNMENT) * DEBUG_ALIGNMENT
        return _pages(self.save_bytes + debug)


def architecture(major: int, minor: int, stepping: int) -> str:
    """The compiler's name of an architecture."""
    return f"gfx{major}{minor:x}{stepping:x}"


def gpus(kernel: Kernel) -> Iterator[Gpu]:
    """Every GPU. Raises OSError if there is no amdkfd."""
    for node in kernel.names(NODES):
        folder = f"{NODES}/{node}"
        if gpu_id := int(kernel.read_text(f"{folder}/gpu_id")):
            properties = _properties(kernel.read_text(f"{folder}/properties"))
            name = kernel.read_text(f"{folder}/name").strip()
            gpu = Gpu(node, gpu_id, name, properties, _memory(kernel, folder))
            yield replace(gpu, name=gpu.architecture) if name in ("", UNNAMED) else gpu


def _memory(kernel: Kernel, folder: str) -> int:
    banks = (
        _properties(kernel.read_text(f"{folder}/mem_banks/{bank}/properties"))
        for bank in kernel.names(f"{folder}/mem_banks")
    )
    return sum(bank["size_in_bytes"] for bank in banks if bank.get("heap_type") == PUBLIC_HEAP)


def _properties(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
