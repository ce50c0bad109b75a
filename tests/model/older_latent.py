"""Files of deepseek2 as they were before latent rows: one matrix makes keys and values."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from contract.dtypes import BY_NAME, DType
from reference.model.config import read_config
from reference.model.gguf.file import open_gguf
from reference.quant import FORMATS
from tests.model.test_families import rewrite

Tensors = dict[str, tuple[DType, tuple[int, ...], Any]]


def older_and_newer(source: Path, folder: Path, dtype: str) -> tuple[Path, Path]:
    """Two files of the same numbers, made of a new one: an older one, whose joined matrices have
    this type, and a new one, whose matrices for keys have it if it is of plain numbers, else
    binary32."""
    joined, split = dict[str, Any](), dict[str, Any]()
    with open_gguf(source) as file:
        config = read_config(file)
        latent, heads = config.latent, config.heads[0]
        assert latent is not None
        for layer in range(config.layers):
            name = f"blk.{layer}.attn_{{}}.weight".format
            numbers = [_numbers(file, name(one)) for one in ("k_b", "v_b")]
            together = np.concatenate([numbers[0].swapaxes(1, 2), numbers[1]], axis=1)
            blocks = _stored(together.reshape(-1, latent.rank), dtype)
            joined[name("kv_b")] = (BY_NAME[dtype], (len(blocks), latent.rank), blocks)
            by_head = blocks.reshape(heads, -1, blocks.shape[1])
            keys, values = by_head[:, : latent.unrotated], by_head[:, latent.unrotated :]
            plain = BY_NAME[dtype].block_elements == 1
            meant = FORMATS[BY_NAME[dtype]].dequantize(keys.reshape(-1, blocks.shape[1]))
            turned = meant.reshape(heads, latent.unrotated, latent.rank).swapaxes(1, 2)
            kind = dtype if plain else "f32"
            rows = _stored(np.ascontiguousarray(turned).reshape(-1, latent.unrotated), kind)
            split[name("k_b")] = (BY_NAME[kind], turned.shape, rows)
            shape = (heads, latent.value, latent.rank)
            split[name("v_b")] = (BY_NAME[dtype], shape, values.reshape(-1, blocks.shape[1]))
        dims = config.ropes[0].dims
    lengths = {
        "head_count_kv": heads, "key_length": latent.unrotated + dims, "value_length": latent.value,
        "key_length_mla": None, "value_length_mla": None,
    }  # fmt: skip
    older, newer = folder / f"older-{dtype}.gguf", folder / f"newer-{dtype}.gguf"
    rewrite(source, newer, tensors=split)
    keys_of = {f"deepseek2.attention.{name}": value for name, value in lengths.items()}
    rewrite(source, older, keys_of, tensors=dict.fromkeys(split) | joined)
    return older, newer


def _numbers(file: Any, name: str) -> np.ndarray:
    info = file.tensors[name]
    return FORMATS[info.dtype].dequantize(file.tensor_bytes(name)).reshape(info.shape)


def _stored(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Rows of this type, uint8[rows, row_bytes]."""
    kind = GGMLQuantizationType[dtype.upper()]
    return quantize(numbers.astype(np.float32), kind).view(np.uint8).reshape(len(numbers), -1)
