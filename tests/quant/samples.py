"""Stored blocks and activations for the tests of the quantization formats."""

import numpy as np
from hypothesis import strategies as st

from contract.dtypes import WEIGHT_DTYPES, DType, StorageClass
from reference.quant import EXPONENT_BIAS, FORMATS, LAYOUTS, moderate_scales

INTEGER_DTYPES = tuple(d for d in WEIGHT_DTYPES if d.storage is not StorageClass.FLOAT)
FLOAT_DTYPES = tuple(d for d in WEIGHT_DTYPES if d.storage is StorageClass.FLOAT)


def random_blocks(dtype: DType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Blocks of random bytes, uint8[rows, row_bytes], every scale finite and below 2."""
    rng = np.random.default_rng(seed)
    if dtype.storage is StorageClass.FLOAT:
        return FORMATS[dtype].quantize(rng.standard_normal((rows, columns)).astype(np.float32))
    blocks = rng.integers(0, 256, (rows, dtype.row_bytes(columns)), dtype=np.uint8)
    moderate_scales(dtype, blocks)
    return blocks


def extreme_blocks(dtype: DType, rows: int, columns: int) -> np.ndarray:
    """Blocks whose integers all have the largest magnitude the format can store; d = 1, m = 1."""
    zero_is_extreme = ("q4_0", "q5_0", "q6_k", "q3_k", "iq4_nl", "iq4_xs")
    fill = {"q8_0": 0x80} | dict.fromkeys(zero_is_extreme, 0)
    blocks = np.full((rows, dtype.row_bytes(columns)), fill.get(dtype.name, 0xFF), np.uint8)
    layout = LAYOUTS[dtype]
    parts = layout.parts(blocks)
    if dtype.name == "q6_k":
        parts["scales"] = -128
    for name in layout.floats or ("e",):
        parts[name] = 1.0 if layout.floats else EXPONENT_BIAS
    return blocks


def _outlier(x: np.ndarray) -> np.ndarray:
    x[:, x.shape[1] // 3] *= 1e4
    return x


def _poisoned(x: np.ndarray) -> np.ndarray:
    x[len(x) // 2, -1] = np.nan
    return x


ACTIVATIONS = {
    "gaussian": lambda x: x, "zeros": lambda x: x * np.float32(0),
    "negative zeros": lambda x: x * np.float32(0) - np.float32(0),
    "tiny": lambda x: x * np.float32(2.0**-66), "huge": lambda x: x * np.float32(2.0**90),
    "overflowing": lambda x: x * np.float32(2.0**124),
    "largest integers": lambda x: np.sign(x) * np.float32(2047),
    "all largest": lambda x: np.full_like(x, 2047), "outlier": _outlier, "one token NaN": _poisoned,
    "every other token silent": lambda x: x * (np.arange(len(x)) % 2)[:, None].astype(np.float32),
}  # fmt: skip


def activations(kind: str, tokens: int, columns: int, seed: int) -> np.ndarray:
    """f32[tokens, columns] of a named kind."""
    rng = np.random.default_rng(seed)
    return ACTIVATIONS[kind](rng.standard_normal((tokens, columns)).astype(np.float32))


def columns_for(dtype: DType) -> st.SearchStrategy[int]:
    """Row lengths that end inside a segment, at a segment, at a span and after it."""
    if dtype.storage is StorageClass.SUPERBLOCK:
        return st.sampled_from([256, 512, 1024, 1280, 2304, 4096])
    return st.sampled_from([32, 96, 256, 288, 576, 1024, 1536, 2304])
