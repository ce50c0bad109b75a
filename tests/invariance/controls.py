"""Engines broken on purpose, one real-world cause of schedule-dependent bits each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from contract.ir.graph import Node
from contract.opcodes import Opcode
from reference.cpu.tier import CpuTier
from reference.matrix import Matrix
from reference.ops.rms_norm import rms_norm
from reference.quant import FORMATS
from reference.runner import ModelRunner, StepInput, Submission

Operands = Mapping[str, Any]
Kernel = Callable[[Operands, Mapping[str, Any]], np.ndarray]


class BrokenTier(CpuTier):
    """A CPU tier where one opcode is computed otherwise in steps of more than ``above`` rows."""

    def __init__(self, opcode: Opcode, output: str, kernel: Kernel, above: int = 1) -> None:
        super().__init__()
        self.broken = (opcode, output, kernel, above)

    def call_of(self, node: Node, bound: Operands) -> Callable[[], None]:
        """The sound call, one result of one opcode computed again and otherwise."""
        call = super().call_of(node, bound)
        opcode, output, kernel, above = self.broken
        if node.opcode is not opcode or len(bound[output]) <= above:
            return call

        def broken_call() -> None:
            call()
            bound[output][...] = kernel(bound, node.params)

        return broken_call


def split_k_product(operands: Operands, params: Mapping[str, Any]) -> np.ndarray:
    """A BLAS product whose inner axis is cut by the number of rows, as tuned kernels do."""
    x, weight = operands["x"], operands["weight"]
    assert isinstance(weight, Matrix)
    matrix = FORMATS[weight.dtype].dequantize(weight.blocks)
    cut = x.shape[1] // len(x)
    return x[:, :cut] @ matrix[:, :cut].T + x[:, cut:] @ matrix[:, cut:].T


def library_sum_norm(operands: Operands, params: Mapping[str, Any]) -> np.ndarray:
    """RMS norm whose mean square is summed in the library's own order."""
    x, weight = operands["x"], operands["weight"]
    heads = x.reshape(len(x), params["groups"], -1)
    mean = (heads * heads).sum(axis=-1, keepdims=True) / np.float32(heads.shape[-1])
    y = heads * (np.float32(1.0) / np.sqrt(mean + np.float32(params["eps"])))
    return (y * weight).reshape(x.shape)


def contracted_rope(operands: Operands, params: Mapping[str, Any]) -> np.ndarray:
    """Queries rotated with a fused multiply-add: one rounding for each a*cos - b*sin."""
    packed, table, query = (operands[name] for name in ("qkv", "rope_table", "query"))
    heads, size = params["heads"], params["head_dim"]
    x = packed[:, : heads * size]
    if "q_norm" in operands:
        x = rms_norm(x=x, weight=operands["q_norm"], eps=params["eps"], groups=heads)
    y = x.reshape(len(x), heads, size).astype(np.float64)
    pairs = table.shape[-1]
    if params["neox"]:
        first, second = y[..., :pairs], y[..., pairs : 2 * pairs]
    else:
        first, second = y[..., 0 : 2 * pairs : 2], y[..., 1 : 2 * pairs : 2]
    cosine, sine = np.moveaxis(table[query[:, 2]], 1, 0)[:, :, None, :].astype(np.float64)
    # The product that is rounded first in a fused operation is the second one.
    low = (second * sine).astype(np.float32)
    high = (second * cosine).astype(np.float32)
    rotated = first * cosine - low, first * sine + high
    first[...], second[...] = rotated
    return y.astype(np.float32).reshape(x.shape)


def split_k_tier() -> CpuTier:
    """Summation order by batch size, in every projection."""
    return BrokenTier(Opcode.MATMUL, "y", split_k_product)


def library_sum_tier() -> CpuTier:
    """Another summation order in norms, for batches only."""
    return BrokenTier(Opcode.RMS_NORM, "y", library_sum_norm)


def contracted_tier() -> CpuTier:
    """Fused multiply-adds in the rotary embedding, for batches only."""
    return BrokenTier(Opcode.RMS_NORM_FUSED_ROPE_KV_WRITE, "q", contracted_rope)


def fallback_tier() -> CpuTier:
    """Another kernel in steps of more than eight rows."""
    return BrokenTier(Opcode.LM_HEAD, "logits", split_k_product, above=8)


@dataclass(slots=True)
class BrokenRunner(ABC):
    """A runner that forwards everything; subclasses change the inputs of a step."""

    inner: ModelRunner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, inputs: StepInput) -> Submission:
        """Start the step with the inputs spoilt."""
        return self.inner.submit(self.spoilt(inputs))

    @abstractmethod
    def spoilt(self, inputs: StepInput) -> StepInput:
        """What the sound runner gets to see."""


class LeakedPage(BrokenRunner):
    """The first page of every slot in a step is that of the first of them."""

    def spoilt(self, inputs: StepInput) -> StepInput:
        slots = np.unique(inputs.query["slot"])
        table = inputs.page_table.copy()
        table[slots, 0] = table[slots[0], 0]
        return replace(inputs, page_table=table, page_versions=None)


class StalePageTable(BrokenRunner):
    """The page table of the engine's step before; zeros in its first step."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner)
        self.current: np.ndarray | None = None
        self.previous: np.ndarray | None = None

    def spoilt(self, inputs: StepInput) -> StepInput:
        if self.current is not inputs.page_table or self.previous is None:
            self.current, self.previous = inputs.page_table, np.zeros_like(inputs.page_table)
        stale, self.previous = self.previous, inputs.page_table.copy()
        return replace(inputs, page_table=stale, page_versions=None)


class UntoldRow(BrokenRunner):
    """The first row of the page table changes, and nobody is told."""

    def spoilt(self, inputs: StepInput) -> StepInput:
        assert inputs.page_versions is not None
        inputs.page_versions[0] = 0
        return inputs


class SharedSampler(BrokenRunner):
    """Random numbers drawn by the row of the batch instead of the position of the sequence."""

    def spoilt(self, inputs: StepInput) -> StepInput:
        sampling = inputs.sampling.copy()
        sampling["position"] = np.arange(len(sampling))
        return replace(inputs, sampling=sampling)
