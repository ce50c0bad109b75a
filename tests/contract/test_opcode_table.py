"""The opcode table itself, and the page of the docs printed from it."""

from contract.ir.opcode_table import COLUMNS, markdown_table
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.spec import MAX_BINDINGS, Access
from tests.paths import ROOT

DESIGN_OPCODES = [
    *("EMBED", "RMS_NORM", "RMS_NORM_FUSED_QKV", "RMS_NORM_FUSED_MLP_GATE_UP", "ROPE"),
    *("RMS_NORM_FUSED_ROPE_KV_WRITE", "FLASH_ATTN", "FLASH_ATTN_BATCHED", "MOE_GATE_TOPK"),
    *("MOE_GATE_UP", "MOE_SWIGLU", "MOE_DOWN_ACC", "SHARED_EXPERT", "SSM_CONV1D", "SSM_DELTA_NET"),
    *("SSM_GATED_NORM", "RESIDUAL_RMS_NORM", "LM_HEAD", "ARGMAX", "SAMPLE", "KV_WRITE_BATCHED"),
    *("MATMUL_WMMA_F16", "MATMUL_WMMA_Q4K", "BARRIER", "STREAM_OUT", "LOAD_REQUEST_STATE"),
    *("STORE_REQUEST_STATE", "VERIFY_K"),
]
GONE = {19, 22, 23, 73}
"""Numbers of opcodes that are no more."""


def test_the_docs_page_is_the_table():
    """Regenerate with ``python -m contract.ir.opcode_table > docs/opcodes.md``."""
    assert (ROOT / "docs" / "opcodes.md").read_text(encoding="utf-8") == markdown_table()


def test_the_page_has_a_complete_row_an_opcode():
    rows = [line for line in markdown_table().splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(Opcode)
    for row, opcode in zip(rows, sorted(Opcode), strict=True):
        cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
        assert len(cells) == len(COLUMNS)
        assert cells[:2] == [str(int(opcode)), f"`{opcode.name}`"]
        for operand in TABLE[opcode].operands:
            assert f"`{operand.name}" in row


def test_numbers_of_the_design_are_never_given_away():
    kept = {number: name for number, name in enumerate(DESIGN_OPCODES, 1) if number not in GONE}
    assert {int(opcode): opcode.name for opcode in Opcode if opcode < 64} == kept
    assert not GONE & set(Opcode)


def test_every_opcode_fits_the_bindings():
    for spec in TABLE.values():
        assert len(spec.operands) <= MAX_BINDINGS, spec.name


def test_names_are_unambiguous():
    """Operands and parameters share the keywords of one call; costs name real operands."""
    for spec in TABLE.values():
        names = [o.name for o in spec.operands] + [p.name for p in spec.params]
        assert len(names) == len(set(names)), spec.name
        operands = {o.name for o in spec.operands}
        assert set(spec.touched) <= operands
        assert set(spec.stored) <= {o.name for o in spec.operands if o.access is Access.UPDATE}


def test_every_opcode_but_barrier_produces_something():
    assert [spec.name for spec in TABLE.values() if not spec.outputs] == ["barrier"]
