"""Records a device reads are whole numbers of 32-bit little-endian words, as the table says."""

import numpy as np
import pytest

from contract import records
from contract.opcodes import Opcode
from contract.ops import TABLE

RECORDS = {
    "QUERY_TOKEN": (Opcode.EMBED, "query", 4), "SAMPLING": (Opcode.SAMPLE, "sampling", 16),
    "LOGIT_BIAS": (Opcode.SAMPLE, "bias", 2), "OUTPUT_EVENT": (Opcode.STREAM_OUT, "ring", 8),
}  # fmt: skip


@pytest.mark.parametrize("name", [*RECORDS, "SLOT", "PAGE_META"])
def test_a_record_is_packed_words(name):
    """Four-byte fields at consecutive offsets: an int32 array is a view of the records."""
    dtype: np.dtype[np.void] = getattr(records, name)
    offset = 0
    assert dtype.fields is not None
    for field in dtype.names or ():
        kind, at = dtype.fields[field][:2]
        assert at == offset
        assert kind.base.itemsize == 4
        assert kind.base.newbyteorder("<") == kind.base
        offset += kind.itemsize
    assert offset == dtype.itemsize
    assert np.zeros(3, dtype).view("<i4").size * 4 == 3 * dtype.itemsize


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_the_words_its_operand_has(name):
    opcode, operand, words = RECORDS[name]
    assert TABLE[opcode].operand(operand).dims[-1] == str(words)
    assert getattr(records, name).itemsize == 4 * words
