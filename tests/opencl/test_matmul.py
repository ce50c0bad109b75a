"""Matrix products of the OpenCL tier: every code path of every format, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel.packets.layouts import LANES, WeightLayout, header_bytes
from accel.packets.ops import NUMBERS
from accel.packets.packet import ABSENT, PACKET
from contract.dtypes import MXFP4, WEIGHT_DTYPES, DType, StorageClass
from reference.quant import EXPONENT_BIAS, FORMATS, LAYOUTS, moderate_scales
from reference.quant.dot import matmul
from tests.kernels.planes import planes
from tests.long_cases import long_except
from tests.opencl.cores import Run, Variant, run_by_cores, run_by_groups
from tests.opencl.lanes import ArrangedWeight, arranged

KERNEL_OPS = ("quantize_activation", "matmul", "embed")
UNWRITTEN = np.float32(12345.0)
INTEGER_DTYPES = tuple(d for d in WEIGHT_DTYPES if d.storage is not StorageClass.FLOAT)


VARIANTS = {
    "vnni": Variant((), True),
    "avx512": Variant(("__AVX512VNNI__",), False),
    "avx2": Variant(("__AVX512BW__",), False, WEIGHT_DTYPES[0::2]),
    "ssse3": Variant(("__AVX512BW__", "__AVX2__"), False, WEIGHT_DTYPES[0::2]),
    "portable": Variant(("__AVX512BW__", "__AVX2__", "__SSSE3__"), False, WEIGHT_DTYPES[1::2]),
    "work_groups": None,
}
"""Of the cores' code; None for the kernels that GPU tiers share. Formats differ before their
integers are multiplied, which narrower vectors only do in more steps: half of them have either."""
SHORT = "portable"
"""The variant that every run tests; the tests of opcodes have that of this machine's processor."""


def formats_of(name: str) -> tuple[DType, ...]:
    """The formats of a variant."""
    variant = VARIANTS[name]
    return WEIGHT_DTYPES if variant is None else variant.dtypes


def of_every_variant(dtypes: tuple[DType, ...]) -> pytest.MarkDecorator:
    """Products of each variant in each of the formats it has."""
    pairs = [
        pytest.param(
            *(name, dtype), id=f"{name}-{dtype}", marks=[] if name == SHORT else [pytest.mark.long]
        )
        for name in VARIANTS
        for dtype in dtypes
        if dtype in formats_of(name)
    ]
    return pytest.mark.parametrize(("products", "dtype"), pairs, indirect=["products"])


def cores_of(variant: Variant) -> Run:
    """The product kernels of its formats, by cores."""
    formats = frozenset(dtype.name.upper() for dtype in variant.dtypes)
    return run_by_cores(variant, KERNEL_OPS, formats)


class Products:
    """The product kernels, run on arrays of this process."""

    def __init__(self, variant: Variant | None) -> None:
        self.by_groups = variant is None
        self.dtypes = WEIGHT_DTYPES if variant is None else variant.dtypes
        self.run = run_by_groups() if variant is None else cores_of(variant)
        self.arranged = arranged if variant is not None else planes

    def matmul(self, blocks: np.ndarray, dtype: DType, x: np.ndarray, workers: int) -> np.ndarray:
        """x @ W.T with ``workers`` workers; checks that nothing beside the result is written."""
        tokens, columns = x.shape
        weight = self.arranged(dtype, blocks)
        assert (weight.rows, weight.columns) == (len(blocks), columns)
        y = np.full((tokens, len(blocks) + 5), UNWRITTEN)
        inputs = [x, None, None]
        if dtype.storage is not StorageClass.FLOAT:
            inputs = self.quantize(x, workers, dtype)
        sizes = (tokens, len(blocks), columns)
        name, operands = "matmul", (*inputs, weight.bytes, y)
        if self.by_groups and tokens == 1 and dtype.storage is not StorageClass.FLOAT:
            name, operands = "matmul_row", (*inputs, weight.bytes, None, None, y)
        packet = _packet(name, operands, sizes, dtype, weight.layout)
        self.run(name, packet, workers, dtype)
        assert (y[:, len(blocks) :] == UNWRITTEN).all()
        return y[:, : len(blocks)]

    def quantize(self, x: np.ndarray, workers: int, dtype: DType) -> list[np.ndarray | None]:
        """``x`` as the products of ``dtype`` read it."""
        tokens, columns = x.shape
        segments = -(-columns // 256)
        parts: list[np.ndarray | None] = [
            np.full((tokens, segments * 256), 77, np.int16),
            np.full((tokens, segments), 77, np.float32),
            np.full((tokens, segments * 8), 77, np.uint32),
        ]
        packet = _packet("quantize_activation", (x, *parts), (tokens, columns))
        self.run("quantize_activation", packet, workers, dtype)
        return parts

    def embed(self, weight, dtype: DType, tokens: np.ndarray) -> np.ndarray:
        y = np.empty((len(tokens), weight.columns), np.float32)
        query = tokens.astype(np.int32)[:, None].copy()
        sizes = (len(tokens), weight.columns)
        packet = _packet("embed", (query, weight.bytes, y), sizes, dtype, weight.layout)
        self.run("embed", packet, 1, dtype)
        return y


def _packet(name, operands, sizes, dtype=None, layout=WeightLayout.STORED) -> np.ndarray:
    packet = np.zeros(1, PACKET)
    packet["op"] = NUMBERS.get(name, 0)
    packet["operand"] = ABSENT
    for index, array in enumerate(operands):
        if array is not None:
            packet["operand"][0, index] = array.ctypes.data
            packet["stride"][0, index] = array.shape[-1]
    packet["size"][0, : len(sizes)] = sizes
    packet["dtype"] = dtype.ggml_id if dtype is not None else 0
    packet["layout"] = layout
    return packet


@pytest.fixture(scope="module", params=long_except(VARIANTS, SHORT))
def products(request) -> Products:
    return Products(VARIANTS[request.param])


def _random_blocks(rng: np.random.Generator, dtype: DType, rows: int, columns: int) -> np.ndarray:
    """Any bytes, but with scales below 2 so that no product overflows binary32."""
    if dtype.storage is StorageClass.FLOAT:
        values = rng.standard_normal((rows, columns)) * rng.choice([1e-6, 1.0, 1e4], (rows, 1))
        return FORMATS[dtype].quantize(values.astype(np.float32))
    blocks = rng.integers(0, 256, (rows, dtype.row_bytes(columns)), np.uint8)
    moderate_scales(dtype, blocks)
    return blocks


def _random_activations(rng: np.random.Generator, tokens: int, columns: int) -> np.ndarray:
    x = rng.standard_normal((tokens, columns)) * rng.choice([1e-3, 1.0, 500.0], (tokens, 1))
    x[rng.random((tokens, columns)) < 0.02] *= 100
    x[:, rng.random(columns) < 0.1] = 0
    return x.astype(np.float32)


@st.composite
def shapes(draw):
    """The number of a format, rows, most columns, tokens, workers and a seed."""
    number, columns = draw(st.integers(0, len(WEIGHT_DTYPES) - 1)), draw(st.integers(1, 2600))
    rows, tokens = draw(st.integers(1, 70)), draw(st.integers(1, 9) | st.integers(1, 70))
    return number, rows, columns, tokens, draw(st.integers(1, 3)), draw(st.integers(0, 2**32 - 1))


def in_blocks(products: Products, number: int, most: int) -> tuple[DType, int]:
    """A format of the variant, and so many columns as blocks of it fill."""
    dtype = products.dtypes[number % len(products.dtypes)]
    return dtype, dtype.block_elements * max(1, most // dtype.block_elements)


@settings(max_examples=40, deadline=None)
@given(shape=shapes())
@example(shape=(4, 33, 1536, 100, 2, 1))
def test_product_equals_definition(products: Products, shape) -> None:
    """All formats, rows that fill no group, short segments and spans, one token or many."""
    number, rows, columns, tokens, workers, seed = shape
    dtype, columns = in_blocks(products, number, columns)
    rng = np.random.default_rng(seed)
    blocks = _random_blocks(rng, dtype, rows, columns)
    x = _random_activations(rng, tokens, columns)
    got = products.matmul(blocks, dtype, x, workers)
    assert (got == matmul(blocks, dtype, x)).all()


@of_every_variant(WEIGHT_DTYPES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_long_rows(products: Products, dtype: DType, tokens: int) -> None:
    """More columns than a worker rearranges at a time, ending in a short span and segment."""
    rng = np.random.default_rng(tokens)
    columns = 8192 + 1024 + (256 if dtype.block_elements == 256 else 288)
    blocks = _random_blocks(rng, dtype, 35, columns)
    x = _random_activations(rng, tokens, columns)
    assert (products.matmul(blocks, dtype, x, 2) == matmul(blocks, dtype, x)).all()


@of_every_variant(WEIGHT_DTYPES)
@pytest.mark.parametrize("tokens", [3, 40])
def test_broken_token_disturbs_no_other(products: Products, dtype: DType, tokens: int) -> None:
    """An infinity makes every output of its own token NaN or infinite and changes no other."""
    rng = np.random.default_rng(7)
    blocks = _random_blocks(rng, dtype, 20, 512)
    x = _random_activations(rng, tokens, 512)
    x[1, 300] = np.inf
    got, expected = products.matmul(blocks, dtype, x, 2), matmul(blocks, dtype, x)
    others = np.arange(tokens) != 1
    assert not np.isfinite(got[1]).any()
    assert (got[others] == expected[others]).all()


@of_every_variant(INTEGER_DTYPES)
def test_largest_magnitudes(products: Products, dtype: DType) -> None:
    """Every integer at its extreme: no sum leaves int32 and no saturating instruction saturates."""
    x = np.full((4, 512), 2047.0, np.float32) * np.array([[1], [-1], [1], [-1]], np.float32)
    x[2, ::2] *= -1
    blocks = np.full((2, dtype.row_bytes(512)), 0xFF, np.uint8)
    blocks[1] = 0
    layout = LAYOUTS[dtype]
    parts = layout.parts(blocks)
    for name in layout.floats or ("e",):
        parts[name] = 1.0 if layout.floats else EXPONENT_BIAS
    if dtype.name == "q6_k":
        parts["scales"] = -128
    for tokens in (1, 4):
        got = products.matmul(blocks, dtype, x[:tokens], 1)
        assert (got == matmul(blocks, dtype, x[:tokens])).all()


@settings(max_examples=40, deadline=None)
@given(shape=shapes())
def test_embedding_reads_either_layout(products: Products, shape) -> None:
    """A row of a table is the same from the model file's bytes and arranged for the products."""
    number, rows, columns, tokens, _, seed = shape
    dtype, columns = in_blocks(products, number, columns)
    rng = np.random.default_rng(seed)
    blocks = _random_blocks(rng, dtype, rows, columns)
    ids = rng.integers(0, rows, tokens)
    expected = FORMATS[dtype].dequantize(blocks[ids])
    for weight in (
        products.arranged(dtype, blocks),
        ArrangedWeight(blocks, WeightLayout.STORED, rows, columns),
    ):
        assert (products.embed(weight, dtype, ids) == expected).all()


@pytest.mark.parametrize(
    "products",
    long_except([name for name in VARIANTS if MXFP4 in formats_of(name)], SHORT),
    indirect=True,
)
def test_every_exponent(products: Products) -> None:
    """MXFP4's scales from 0 over 2^-126 to 2^127: products, whose overflow is infinite, and rows.

    The smallest activations are such that no result is subnormal."""
    blocks = np.random.default_rng(1).integers(0, 256, (256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    x = np.float32(2.0**90) * _random_activations(np.random.default_rng(2), 6, 32)
    for tokens in (1, 6):
        expected = matmul(blocks, MXFP4, x[:tokens])
        assert (products.matmul(blocks, MXFP4, x[:tokens], 2) == expected).all()
        assert not expected[:, :2].any()
        assert np.isfinite(expected[:, :100]).all()
    with np.errstate(over="ignore"):
        rows = FORMATS[MXFP4].dequantize(blocks)
    ids = np.arange(256)
    for weight in (
        products.arranged(MXFP4, blocks),
        ArrangedWeight(blocks, WeightLayout.STORED, 256, 32),
    ):
        assert (products.embed(weight, MXFP4, ids) == rows).all()


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_arranged_weight_takes_no_more_memory(dtype: DType) -> None:
    """Beside rows of padding, at most one vector a row group that is not full."""
    columns = max(dtype.block_elements, 32)
    weight = arranged(dtype, np.zeros((3 * LANES, dtype.row_bytes(columns)), np.uint8))
    assert weight.bytes.nbytes <= 3 * LANES * dtype.row_bytes(columns) + 3 * 48
    blocks = np.zeros((3 * LANES, dtype.row_bytes(768)), np.uint8)
    weight = arranged(dtype, blocks)
    assert weight.bytes.nbytes <= blocks.nbytes + 3 * 32
    if dtype.storage is StorageClass.FLOAT:
        assert weight.bytes is blocks
    else:
        assert header_bytes(dtype, 768) % 64 == 0
        assert weight.layout is WeightLayout.LANES
