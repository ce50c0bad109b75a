"""The stored digests of the conformance cases, and how a change of the cases is noticed."""

import json
from pathlib import Path

import pytest

from contract.errors import ConfigError
from contract.ops import TABLE
from harness.conformance.cases import DEFAULT_MODEL_CASE, known_cases
from harness.conformance.must_pass import (
    REGENERATE,
    check_digests,
    digest_lines,
    load_must_pass,
    must_pass_ids,
)
from harness.parity.shapes import STRATEGIES
from reference.ops import DEFINITIONS

KNOWN = known_cases()
PARITY = [name for name in KNOWN if name.startswith("parity/")]
ADD = [name for name in PARITY if name.startswith("parity/add-")]


def test_the_stored_digests_are_those_of_this_source():
    """See ``must_pass.REGENERATE`` for how to write them anew."""
    assert load_must_pass() == must_pass_ids()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda ids: [*ids, "parity/add-9x9-new"], "parity/add"),
        (lambda ids: [name for name in ids if name != ADD[0]], "parity/add"),
        (lambda ids: [name.replace(ADD[0], ADD[0] + "x") for name in ids], "parity/add"),
        (lambda ids: [name for name in ids if not name.startswith("parity/rope-")], "parity/rope"),
        (lambda ids: [*ids, "goldens/new"], "goldens"),
    ],
    ids=["more", "fewer", "renamed", "none", "golden"],
)
def test_cases_that_are_not_the_stored_ones_are_refused(change, named):
    """The error names the group that differs and no other, and says how to store the new ones."""
    stored, changed = digest_lines(KNOWN), digest_lines(change(list(KNOWN)))
    check_digests(digest_lines(reversed(KNOWN)), stored)
    with pytest.raises(ConfigError) as caught:
        check_digests(changed, stored)
    message = str(caught.value)
    assert f"the cases of {named} (generated: " in message
    assert message.count("(generated: ") == 1
    assert REGENERATE in message


def test_list_covers_every_defined_opcode_and_every_stored_golden():
    opcodes = {name.split("/")[1].split("-")[0] for name in PARITY}
    assert {TABLE[opcode].name for opcode in STRATEGIES if opcode in DEFINITIONS} <= opcodes
    stored = json.loads((Path(__file__).parents[2] / "goldens/synthetic.json").read_text())
    goldens = [name for name in KNOWN if name.startswith("goldens/")]
    assert len(goldens) == len(stored["models"])
    assert DEFAULT_MODEL_CASE not in KNOWN
