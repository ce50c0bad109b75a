"""The shipped wheel in the places where newcomers and operators run it, and what it leaves out."""

import re
import signal
from collections.abc import Iterator

import pytest

from accel.wheel_parts import PARTS
from tests.tables import table
from tests.walk.conftest import MODEL

pytestmark = pytest.mark.walk
ASK = ("run", "Why?", "-n", "8")
INTERRUPTED_START = """
import signal, sys
sys.addaudithook(lambda event, arguments: event == "import" and arguments[0] == "argparse"
                 and signal.raise_signal(signal.SIGINT))
exec(open(sys.argv.pop(1)).read())
"""


@pytest.fixture(scope="module")
def answer(newcomer) -> str:
    """What the newcomer's model answers."""
    newcomer.zinc("model", "use", f"./{MODEL}")
    return newcomer.zinc(*ASK)


@pytest.mark.parametrize(
    "said",
    table(__file__, "test_environments")["any_environment_has_the_same_answer"],
    ids=lambda said: "-".join(said),
)
def test_any_environment_has_the_same_answer(newcomer, answer, said):
    done = newcomer.run("zinc-rt", *ASK, **said)
    assert (done.returncode, done.stdout) == (0, answer), done.stderr
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "line", table(__file__, "test_environments")["any_shell_has_the_same_answer"]
)
def test_any_shell_has_the_same_answer(newcomer, answer, line):
    """Strict permissions, isolated Python, odd paths, no input, a home that cannot be written."""
    done = newcomer.run("bash", "-c", line)
    assert (done.returncode, done.stdout) == (0, answer), done.stderr
    assert "Traceback" not in done.stderr


def test_the_tools_of_the_wheel_work(newcomer, answer):
    assert answer
    newcomer.zinc("synth", "--arch", "qwen3", "--layers", "1", "--out", "tools.gguf")
    words = ("--tokens", "1,2,3", "--decode", "1", "--model", "tools.gguf")
    assert "PASS: native agrees" in newcomer.zinc("validate", "--tiers", "native", *words)
    newcomer.zinc("run", "--raw", "hi", "-m", "tools.gguf", "-n", "2", "--trace", "tools.trace")
    assert newcomer.zinc("replay", "tools.trace", "--tier", "cpu").startswith("identical: ")
    assert len(newcomer.zinc("conformance", "--list").splitlines()) > 7000
    assert newcomer.zinc("sched-test", "--schedules", "1").endswith("nothing broken\n")


def left_out() -> Iterator[str]:
    """The parts that a wheel for Linux has not."""
    yield from (part.path for part in PARTS if "linux" not in part.systems)


def test_the_wheel_has_only_what_its_system_can_run(newcomer):
    (site,) = newcomer.python.parents[1].glob("lib/python*/site-packages")
    assert (site / "accel" / "native" / "tier.py").is_file()
    for path in left_out():
        assert not (site / path).exists(), path
        assert not (site / f"{path}.py").exists(), path
    listed = newcomer.zinc("devices")
    assert re.search(r"^native +yes ", listed, re.MULTILINE)
    assert re.search(r"^metal +no +this wheel for Linux has no accel\.metal", listed, re.MULTILINE)
    for words in (
        ("run", "--model", MODEL, "--tier", "metal", "hi"),
        ("asm", "x.k"),
        ("card-test", "--device", "simulated"),
    ):
        done = newcomer.run("zinc-rt", *words)
        assert done.returncode == 2
        assert "error: " in done.stderr
        assert "this wheel for Linux has no accel." in done.stderr
        assert "Traceback" not in done.stderr


def test_ctrl_c_while_the_installed_script_loads(newcomer):
    script = newcomer.python.with_name("zinc-rt")
    done = newcomer.run("python", "-c", INTERRUPTED_START, str(script), "check")
    assert (done.stdout, done.stderr) == ("", "")
    assert done.returncode in (-signal.SIGINT, 130)
