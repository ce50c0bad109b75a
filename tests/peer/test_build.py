"""A build of the peer is used on the kind of processor it was made for, and never on another."""

import platform
import shutil
import subprocess
import sys

import pytest

from tests.needs import machine_lacks, missing
from tests.paths import ROOT

FLAGS = "fpu sse2 avx2 avx512f amx_tile amx_int8"
AMX = ("__AMX_TILE__", "__AMX_INT8__", "__AMX_BF16__")


def shell(*words: str) -> str:
    """What a function of ci/peer.sh prints."""
    script = 'python=$1; . ci/peer.sh; shift; "$@"'
    command = ["sh", "-euc", script, "sh", sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def key_of(tmp_path):
    """``key_of(flags, cores, requirement)``: the key on a machine of such cores."""

    def key(flags: str = FLAGS, cores: int = 2, requirement: str = "llama-cpp-python==1") -> str:
        path = tmp_path / "cpuinfo"
        path.write_text(
            "".join(f"processor\t: {n}\ncpu MHz\t: {n}\nflags\t\t: {flags}\n" for n in range(cores))
        )
        return shell("peer_key", requirement, str(path))

    return key


def test_the_key_tells_processors_and_versions_apart_and_nothing_else(key_of):
    assert key_of() == key_of() == key_of(cores=5)
    others = {
        key_of(flags=FLAGS.replace(" avx512f", "")),
        key_of(flags=f"{FLAGS} amx_bf16"),
        key_of(requirement="llama-cpp-python==2"),
    }
    assert len({key_of(), *others}) == 4


def test_the_build_uses_no_amx_even_where_the_processor_has_it():
    """As llama.cpp's build calls the compiler: the project's flags, then the processor's."""
    if platform.machine() != "x86_64":
        machine_lacks("x86-64 processor")
    compiler = shutil.which("gcc")
    if compiler is None:
        missing("there is no gcc", "apt install gcc")
    flags = shell("peer_flags", compiler).split()

    def macros(*options: str) -> str:
        command = [compiler, *options, "-march=sapphirerapids", "-dM", "-E", "-x", "c", "/dev/null"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert all(name in macros() for name in AMX)
    assert not any(name in macros(*flags) for name in AMX)
    assert "__AVX512VNNI__" in macros(*flags)
