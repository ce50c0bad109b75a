"""Vulkan tiers for the tests, one cache of pipelines for all of them, and libraries that fail."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from accel.kernels.source import Traits
from accel.vulkan.api import Vulkan, load_vulkan
from accel.vulkan.runtime import Choices
from accel.vulkan.tier import VulkanTier
from tests.needs import need_device

OpenTier = Callable[..., VulkanTier]

WAYS = {
    "shared": Choices(),
    "own-memory": Choices(shared=False),
    "integer-remedies": Choices(traits=Traits(divide=False, root=False, half=False, dot=False)),
}
"""Every way the tier can run here."""


class Library:
    """The real library but for the functions in ``instead``, which get its own and arguments."""

    def __init__(self, real: Any, instead: dict[str, Callable[..., Any]] | None = None) -> None:
        self.real = real
        self.instead = instead if instead is not None else {}

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.real, name)
        if name not in self.instead:
            return own
        return lambda *arguments: self.instead[name](own, *arguments)


@pytest.fixture(scope="session")
def vulkan() -> Vulkan:
    """The library of this machine, which has a device the tier can use."""
    loaded = need_device(load_vulkan)
    need_device(lambda: VulkanTier(vulkan=loaded)).close()
    return loaded


@pytest.fixture
def faulty(vulkan) -> Vulkan:
    """The same through a ``Library``, in whose ``instead`` a test puts what goes wrong."""
    return Vulkan(vulkan.ffi, Library(vulkan.library))


@pytest.fixture
def open_vulkan(vulkan, kernel_cache) -> Iterator[OpenTier]:
    """``open_vulkan(**choices)`` opens a tier that is closed after the test."""
    with ExitStack() as opened:

        def open_it(
            library: Vulkan = vulkan, base: Choices | None = None, **choices: Any
        ) -> VulkanTier:
            chosen = replace(base or Choices(), **{"cache": kernel_cache, **choices})
            return opened.enter_context(VulkanTier(choices=chosen, vulkan=library))

        yield open_it


@pytest.fixture
def tier(open_vulkan) -> VulkanTier:
    """A tier as a user gets it."""
    return open_vulkan()
