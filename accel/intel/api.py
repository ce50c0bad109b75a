"""libze_loader, the loader of Level Zero, through cffi: errors are raised by name."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any
from weakref import WeakKeyDictionary

from contract.errors import DeviceLost, TierUnavailable
from contract.extras import install_command

TIER = "intel"
LIBRARIES = ("libze_loader.so.1", "libze_loader.so", "ze_loader.dll")
NO_LOADER = "there is no Level Zero loader (libze_loader)"
LOADER_HINT = (
    "apt install libze1 and Intel's GPU driver (libze-intel-gpu1), or install the graphics \
card's driver"
)
NOT_READY = 1
LOST = (
    "ZE_RESULT_ERROR_DEVICE_LOST",
    "ZE_RESULT_ERROR_DEVICE_REQUIRES_RESET",
    "ZE_RESULT_ERROR_DEVICE_IN_LOW_POWER_STATE",
)
OUT_OF_MEMORY = ("ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY", "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY")


class LevelZeroError(Exception):
    """A function of Level Zero returned the error called ``meaning``."""

    def __init__(self, function: str, meaning: str) -> None:
        self.meaning = meaning
        super().__init__(f"{function} gave {meaning}")

    @property
    def is_out_of_memory(self) -> bool:
        """Whether memory ran out."""
        return self.meaning in OUT_OF_MEMORY


class LevelZero:
    """The functions of one loaded library, and constructors of C values."""

    def __init__(self, ffi: Any, library: Any) -> None:
        self.ffi = ffi
        self.library = library
        self._meanings: dict[int, str] = ffi.typeof("ze_result_t").elements
        self._referenced: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()

    def call(self, name: str, *arguments: Any) -> bool:
        """Call ``ze<name>``, and return False if it gave ZE_RESULT_NOT_READY. Raises DeviceLost
        if the device is lost, and LevelZeroError for any other error."""
        result = int(getattr(self.library, f"ze{name}")(*arguments))
        if result == 0:
            return True
        if result == NOT_READY:
            return False
        meaning = self._meanings.get(result, f"ze_result_t {result:#x}")
        if meaning in LOST:
            raise DeviceLost(f"ze{name} gave {meaning}")
        raise LevelZeroError(f"ze{name}", meaning)

    def constant(self, name: str) -> int:
        """The value of the constant ``ZE_<name>``."""
        return int(getattr(self.library, f"ZE_{name}"))

    def structure(self, kind: str, **fields: Any) -> Any:
        """A pointer to a new ``ze_<kind>_t`` with its type set. It keeps alive what ``fields``
        point to."""
        made = self.ffi.new(f"ze_{kind}_t *")
        made.stype = self.constant(f"STRUCTURE_TYPE_{kind.upper()}")
        for name, value in fields.items():
            setattr(made, name, value)
        self._referenced[made] = tuple(fields.values())
        return made

    def create(self, name: str, kind: str, *arguments: Any) -> Any:
        """The handle ``ze_<kind>_handle_t`` that ``ze<name>`` makes from ``arguments``."""
        handle = self.ffi.new(f"ze_{kind}_handle_t *")
        self.call(name, *arguments, handle)
        return handle[0]

    def list_all(self, name: str, kind: str, *arguments: Any) -> list[Any]:
        """Handles ``ze_<kind>_handle_t`` or structures ``ze_<kind>_t`` that ``ze<name>`` counts and
        then lists."""
        count = self.ffi.new("uint32_t *")
        self.call(name, *arguments, count, self.ffi.NULL)
        number = int(count[0])
        if not number:
            return []
        if f"ze_{kind}_handle_t" in self.ffi.list_types()[0]:
            listed = self.ffi.new(f"ze_{kind}_handle_t[]", number)
        else:
            listed = self.ffi.new(f"ze_{kind}_t[]", number)
            for item in listed:
                item.stype = self.constant(f"STRUCTURE_TYPE_{kind.upper()}")
        self.call(name, *arguments, count, listed)
        return [listed[index] for index in range(min(number, int(count[0])))]


@cache
def _declared() -> Any:
    try:
        import cffi
    except ImportError as error:
        raise TierUnavailable(
            TIER, f"cffi cannot be imported ({error})", install_command("intel")
        ) from None
    ffi = cffi.FFI()
    text = resources.files("accel").joinpath("intel", "ze_api.h").read_text(encoding="utf-8")
    ffi.cdef(text)
    return ffi


def load_level_zero(libraries: tuple[str, ...] = LIBRARIES) -> LevelZero:
    """The first of ``libraries`` that exists on this machine. Raises TierUnavailable if cffi or
    the library is missing."""
    ffi = _declared()
    for name in libraries:
        try:
            return LevelZero(ffi, ffi.dlopen(name))
        except OSError:
            continue
    raise TierUnavailable(TIER, NO_LOADER, LOADER_HINT)
