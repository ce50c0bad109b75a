"""One name, four places: every definition has the test module of its name here."""

from pathlib import Path

from contract.ops import TABLE
from reference.ops import DEFINITIONS


def test_every_definition_is_tested():
    """A definition without tests/ops/test_<name>.py fails here."""
    here = Path(__file__).parent
    missing = [
        TABLE[opcode].name
        for opcode in DEFINITIONS
        if not (here / f"test_{TABLE[opcode].name}.py").exists()
    ]
    assert missing == []
