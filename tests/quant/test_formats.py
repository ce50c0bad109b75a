"""Every storage format against the public gguf package, and its own round trip."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.dtypes import BF16, F16, F32, I32, MXFP4, Q4_K, WEIGHT_DTYPES
from reference.quant import FORMATS, LAYOUTS, Blocks32, SuperBlocks, find_nonfinite_scale
from reference.quant.bits import pack, unpack
from reference.quant.tables import E2M1, IQ4
from tests.quant.samples import INTEGER_DTYPES, random_blocks

LEVELS = {"q4_0": 15, "q4_1": 15, "q5_0": 31, "q5_1": 31, "q8_0": 254}
"""Steps between the smallest and the largest value a 32-block can hold."""
RELATIVE_ERROR = {"q4_k": 0.075, "q5_k": 0.038, "q6_k": 0.019, "q2_k": 0.28, "q3_k": 0.15}
RELATIVE_ERROR |= {"iq4_nl": 0.076, "iq4_xs": 0.077, "mxfp4": 0.113}
"""Root mean square error on gaussian values; a plain range quantizer is 10-20 % worse, and MXFP4
with the exponent of the largest magnitude, as the gguf package takes it, has 0.114."""

every_format = pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
every_integer_format = pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)


def gaussian(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_every_weight_type_has_a_format():
    """The registry covers the contract exactly, and an index type is no weight."""
    assert tuple(FORMATS) == WEIGHT_DTYPES
    assert I32 not in FORMATS


@every_format
def test_dequantize_agrees_with_gguf(dtype):
    """Random bytes dequantize to the same bits as the file format's own package."""
    blocks = random_blocks(dtype, 16, 1024, seed=dtype.ggml_id)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(dtype.ggml_id))
    values = FORMATS[dtype].dequantize(blocks)
    assert values.dtype == np.float32
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


@every_integer_format
def test_unpacked_integers_reproduce_the_values(dtype):
    """scale * q + minimum in binary64 is what dequantize rounds."""
    blocks = random_blocks(dtype, 4, 512, seed=7)
    planes = FORMATS[dtype].unpack(blocks)
    assert planes.q.dtype == np.int8
    q = planes.q.astype(np.float64)
    if isinstance(planes, Blocks32):
        scale = np.repeat(planes.scale, 32, axis=1).astype(np.float64)
        offset = 0.0 if planes.minimum is None else np.repeat(planes.minimum, 32, axis=1)
        exact = q * scale + offset
    else:
        assert isinstance(planes, SuperBlocks)
        sub_scale = np.repeat(planes.sub_scale, planes.sub_elements, axis=1)
        exact = np.repeat(planes.scale, 256, axis=1) * sub_scale.astype(np.float64) * q
        if planes.minimum is not None:
            sub_minimum = np.repeat(planes.sub_minimum, planes.sub_elements, axis=1).astype(
                np.float64
            )
            minimum = np.repeat(planes.minimum, 256, axis=1)
            exact = exact - minimum * sub_minimum.astype(np.float64)
    values = FORMATS[dtype].dequantize(blocks)
    largest = np.abs(exact).max()
    assert np.abs(values - exact).max() <= largest * 2.0**-22


@pytest.mark.parametrize("dtype", [d for d in INTEGER_DTYPES if d.name in LEVELS], ids=str)
def test_block_error_is_at_most_a_step(dtype):
    """No element of a 32-block is off by more than a step of its block's range."""
    values = gaussian(64, 576)
    restored = FORMATS[dtype].dequantize(FORMATS[dtype].quantize(values))
    parts = values.reshape(64, -1, 32)
    reach = 2 * np.abs(parts).max(axis=-1)
    if dtype.name.endswith("_1"):
        reach = parts.max(axis=-1) - parts.min(axis=-1)
    step = reach / LEVELS[dtype.name]
    error = np.abs(restored.reshape(parts.shape) - parts).max(axis=-1)
    # Symmetric formats have one level more on the side of the extreme value: a whole step.
    allowed = 1.1 if dtype.name in ("q4_0", "q5_0") else 0.55
    assert (error <= step * allowed).all()


@pytest.mark.parametrize("dtype", [d for d in INTEGER_DTYPES if d.name not in LEVELS], ids=str)
def test_searched_error_is_small(dtype):
    """The scale search beats a plain range quantizer on gaussian weights."""
    values = gaussian(128, 1024)
    restored = FORMATS[dtype].dequantize(FORMATS[dtype].quantize(values))
    assert np.sqrt(np.mean((restored - values) ** 2)) < RELATIVE_ERROR[dtype.name]


@every_integer_format
def test_quantize_is_independent_of_the_matrix_around_a_row(dtype):
    """A row quantizes to the same bytes alone as in a matrix cut into many chunks."""
    values = gaussian(700, 512)
    whole = FORMATS[dtype].quantize(values)
    assert whole.shape == (700, dtype.row_bytes(512))
    for row in (0, 255, 256, 699):
        assert np.array_equal(FORMATS[dtype].quantize(values[row : row + 1])[0], whole[row])


@every_integer_format
@pytest.mark.parametrize("fill", [0.0, -0.0, 1e-30, 3.0, -3.0, 1e30, -1e30])
def test_degenerate_blocks_stay_finite(dtype, fill):
    """Constant, vanishing and enormous rows give finite scales and no warning."""
    values = np.full((2, 256), fill, np.float32)
    blocks = FORMATS[dtype].quantize(values)
    assert find_nonfinite_scale(dtype, blocks) is None
    restored = FORMATS[dtype].dequantize(blocks)
    assert np.isfinite(restored).all()
    if abs(fill) <= 3.0:
        assert np.abs(restored - values).max() <= 0.02 * abs(fill) + 1e-12


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_float_formats_round_once(dtype):
    """Quantizing what was dequantized gives the same bytes, and values are the nearest."""
    values = gaussian(8, 96)
    blocks = FORMATS[dtype].quantize(values)
    again = FORMATS[dtype].quantize(FORMATS[dtype].dequantize(blocks))
    assert np.array_equal(again, blocks)
    bits = {"f32": 24, "f16": 11, "bf16": 8}[dtype.name]
    error = np.abs(FORMATS[dtype].dequantize(blocks) - values)
    assert (error <= np.abs(values) * 2.0**-bits + 2.0**-25).all()


def test_f16_saturates():
    """Values beyond binary16 become its largest, not infinity (rule R1)."""
    blocks = FORMATS[F16].quantize(np.array([[1e6, -1e6]], np.float32))
    assert FORMATS[F16].dequantize(blocks).tolist() == [[65504.0, -65504.0]]


@pytest.mark.parametrize("dtype", [d for d in WEIGHT_DTYPES if d != MXFP4], ids=str)
@pytest.mark.parametrize("poison", [0x7C00, 0xFC00, 0x7E01])
def test_nonfinite_scales_are_found(dtype, poison):
    """Each scale of a block is looked at, and the first bad block is named."""
    bits = poison if dtype is not F32 and dtype is not BF16 else poison | 0x0380
    offsets = [dtype.block_bytes - 2]
    if dtype in LAYOUTS:
        block = LAYOUTS[dtype].block
        offsets = [offset for kind, offset in block.fields.values() if kind == "<f2"]
    for offset in offsets:
        blocks = random_blocks(dtype, 5, 1024, seed=11)
        assert find_nonfinite_scale(dtype, blocks) is None
        parts = blocks.reshape(5, -1, dtype.block_bytes)
        for row, block in ((4, 0), (3, 2)):
            parts[row, block, offset : offset + 2] = np.array([bits], "<u2").view(np.uint8)
        assert find_nonfinite_scale(dtype, blocks) == (3, 2)


def test_the_nan_exponent_is_found():
    """255, and not 254, is no scale of MXFP4."""
    blocks = random_blocks(MXFP4, 5, 1024, seed=11)
    parts = blocks.reshape(5, -1, 17)
    parts[0, 0, 0] = 254
    assert find_nonfinite_scale(MXFP4, blocks) is None
    parts[4, 0, 0] = parts[3, 2, 0] = 255
    assert find_nonfinite_scale(MXFP4, blocks) == (3, 2)


def test_every_exponent_is_a_power_of_two_or_nothing():
    """MXFP4's scale is that of the gguf package, except the two that would be subnormal: 0."""
    blocks = np.random.default_rng(3).integers(0, 256, (256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    with np.errstate(over="ignore"):
        values = FORMATS[MXFP4].dequantize(blocks)
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(values[2:], expected[2:])
    assert (values[:2] == 0).all()
    assert (expected[:2] != 0).any()
    assert (FORMATS[MXFP4].unpack(blocks).scale[2:, 0] == 2.0 ** np.arange(-126, 128)).all()


@settings(max_examples=60, deadline=None)
@given(
    table=st.sampled_from([IQ4, E2M1]),
    numbers=st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=20),
)
def test_table_values_are_the_nearest(table, numbers):
    """No value of the table is nearer than the one a nibble was chosen for."""
    x = np.array(numbers, np.float32)
    chosen = table.values[table.nearest_nibble(x)].astype(np.float64)
    distances = np.abs(table.values.astype(np.float64) - x.astype(np.float64)[:, None])
    assert (np.abs(chosen - x) == distances.min(axis=1)).all()


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(INTEGER_DTYPES), seed=st.integers(0, 2**32 - 1))
def test_quantizing_stored_values_changes_them_little(dtype, seed):
    """What was stored once is stored again nearly as it was, and far better than at first."""
    values = gaussian(8, 512, seed)
    once = FORMATS[dtype].dequantize(FORMATS[dtype].quantize(values))
    twice = FORMATS[dtype].dequantize(FORMATS[dtype].quantize(once))
    assert np.linalg.norm(twice - once) <= 0.6 * np.linalg.norm(once - values)


@pytest.mark.parametrize("dtype", LAYOUTS, ids=str)
def test_packing_integers_loses_nothing(dtype):
    """What was read of the elements and of the sub-blocks is stored again as the same bytes."""
    layout = LAYOUTS[dtype]
    blocks = random_blocks(dtype, 5, 1024, seed=13)
    if dtype == MXFP4:  # zero has two nibbles
        blocks[blocks & 0x0F == 0x08] &= 0xF0
        blocks[blocks & 0xF0 == 0x80] &= 0x0F
    parts, again = layout.parts(blocks), layout.parts(blocks.copy())
    for integers in filter(None, (layout.q, layout.sub_scales)):
        stored = integers.read(parts).copy()
        integers.write(again, np.zeros_like(stored))
        assert not np.array_equal(again, parts)
        integers.write(again, stored)
        assert np.array_equal(again, parts)


@pytest.mark.parametrize("dtype", LAYOUTS, ids=str)
def test_a_layout_is_as_long_as_its_block(dtype):
    """The fields of a layout make up the whole block of the type."""
    assert LAYOUTS[dtype].block.itemsize == dtype.block_bytes


@pytest.mark.parametrize(("bits", "run"), [(1, 1), (1, 4), (2, 2), (4, 1), (4, 8)])
def test_packed_bits_lie_in_runs(bits, run):
    """Integer g * run + i of a run of bytes is in the g-th lowest bits of byte i."""
    packed = np.random.default_rng(bits).integers(0, 256, (3, 16), np.uint8)
    integers = unpack(packed, bits, run)
    groups = 8 // bits
    for index in range(integers.shape[1]):
        start, within = divmod(index, groups * run)
        group, byte = divmod(within, run)
        expected = packed[:, start * run + byte] >> bits * group & (1 << bits) - 1
        assert np.array_equal(integers[:, index], expected)
    assert np.array_equal(pack(integers, bits, run), packed)


def test_partial_blocks_are_refused():
    """Neither direction accepts a row that is not whole blocks."""
    with pytest.raises(ValueError, match="whole"):
        FORMATS[Q4_K].unpack(np.zeros((1, 100), np.uint8))
    with pytest.raises(ValueError, match="whole"):
        FORMATS[Q4_K].quantize(np.zeros((1, 300), np.float32))


@every_integer_format
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nonfinite_values_are_not_quantized(dtype, poison):
    """No block can hold them, so they are refused instead of turned into something else."""
    values = gaussian(3, 256)
    values[1, 5] = poison
    with pytest.raises(ValueError, match="finite"):
        FORMATS[dtype].quantize(values)


@every_integer_format
def test_no_rows_is_no_blocks(dtype):
    """An empty matrix has an empty, well-shaped form."""
    blocks = FORMATS[dtype].quantize(np.empty((0, 512), np.float32))
    assert blocks.shape == (0, dtype.row_bytes(512))
    assert FORMATS[dtype].dequantize(blocks).size == 0
