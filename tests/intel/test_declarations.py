"""The declarations of Level Zero, compared with what a C compiler found in Intel's header."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel.intel.api import _declared
from accel.native.compile import find_compiler
from tests.intel.simulated import PREFIX, TARGET
from tests.needs import need_installed

FOLDER = Path(__file__).parent
FACTS = FOLDER / "ze_api_facts.txt"
"""Size of every structure, offset of every field and value of every constant, of version 1.4."""
HEADERS = [path for path in (PREFIX / "include/level_zero/ze_api.h",) if path.exists()]
STRUCTURE = re.compile(r"ze_\w+_(?:properties|desc|count)_t")


@pytest.fixture(scope="module")
def ffi() -> Any:
    """The declarations, parsed."""
    need_installed("cffi", "intel")
    return _declared()


def structures(ffi: Any) -> list[str]:
    """Names of the structures that the tier fills in or reads."""
    return sorted(name for name in ffi.list_types()[0] if STRUCTURE.fullmatch(name))


def constants(ffi: Any) -> dict[str, int]:
    """Every constant by its name."""
    library = ffi.dlopen(None)
    text = (FOLDER.parents[1] / "accel" / "intel" / "ze_api.h").read_text()
    return {name: getattr(library, name) for name in re.findall(r"^    (ZE_\w+) =", text, re.M)}


def declared_facts(ffi: Any) -> list[str]:
    """The lines of FACTS as our declarations give them."""
    lines = []
    for name in structures(ffi):
        lines.append(f"{name} {ffi.sizeof(name)}")
        lines += [f"{name}.{field} {found.offset}" for field, found in ffi.typeof(name).fields]
    return lines + [f"{name} {value}" for name, value in sorted(constants(ffi).items())]


def test_sizes_offsets_and_constants_are_those_of_the_header(ffi, tmp_path):
    """Of every structure and constant that the tier uses; where Debian's libze-dev is installed, a
    program that includes its header prints the same."""
    facts = FACTS.read_text().splitlines()
    assert declared_facts(ffi) == facts
    for header in HEADERS:
        assert printed_facts(ffi, header.parent.parent, tmp_path) == facts


def test_a_field_of_another_size_is_noticed(ffi):
    """The negative control."""
    import cffi

    text = (FOLDER.parents[1] / "accel" / "intel" / "ze_api.h").read_text()
    other = cffi.FFI()
    other.cdef(text.replace("uint64_t totalSize", "uint32_t totalSize"))
    assert declared_facts(other) != declared_facts(ffi)


def printed_facts(ffi: Any, include: Path, folder: Path) -> list[str]:
    """What a C program finds in the header of the folder ``include``."""
    lines = []
    for name in structures(ffi):
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in ffi.typeof(name).fields:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    lines += [f'printf("{name} %lld\\n", (long long){name});' for name in sorted(constants(ffi))]
    source, program = folder / "facts.c", folder / "facts"
    heads = "#include <stddef.h>\n#include <stdio.h>\n#include <level_zero/ze_api.h>\n"
    source.write_text(f"{heads}int main(void) {{ {' '.join(lines)} }}\n")
    command = find_compiler().compile_command(TARGET, [])
    command = [word for word in command if word not in ("-c", "-g0")]
    subprocess.run([*command, "-I", str(include), str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
