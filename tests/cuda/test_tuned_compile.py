"""NVRTC takes every tuned kernel for the oldest architecture and for the tuned one."""

from __future__ import annotations

import pytest

from accel.cuda.plan import plan_launches
from accel.cuda.program import OPTIONS, Compiler, Source, tuned_source
from accel.cuda.units import UNITS
from accel.packets.rules import lower_graph
from contract import dtypes
from contract.errors import TierUnavailable
from contract.shape_key import ShapeKey
from tests.cuda.emulated_step import DEVICE
from tests.cuda.test_attention import PARTS, attention
from tests.cuda.test_head_rows import heads_graph
from tests.cuda.test_products import layer
from tests.needs import missing


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    try:
        return Compiler()
    except TierUnavailable as error:
        missing(str(error), "pip install zinc-rt[cuda]")


def sources() -> list[Source]:
    """Of products with norms, biases, gates and residuals, of attention and what stands before."""
    graphs = [layer(tokens, dtypes.Q6_K, biases).graph for tokens in (1, 4) for biases in (0, 1)]
    graphs += [attention(4, 1, head_dim, 0, 0.0) for head_dim in (64, 128, 256)]
    graphs += [heads_graph(dtypes.I12, 128, 1, True, 1), heads_graph(dtypes.F16, 64, 0, False, 1)]
    found = [tuned_source(UNITS.file, {"DTYPE": dtypes.Q4_K.ggml_id})]
    for graph in graphs:
        for tokens in (1, 4, 9):
            step = lower_graph(graph, ShapeKey(tokens, 0), PARTS, "cuda")
            found += [launch.source for launch in plan_launches(step.ops, DEVICE).launches]
    return [source for source in dict.fromkeys(found) if source.name.endswith(".cu")]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_tuned_kernels_compile(architecture: str, compiler: Compiler) -> None:
    """With the options of the tier; a kernel that is not C++ is told apart."""
    every = sources()
    assert {source.name for source in every} >= {"attention_spans.cu", "unit_matrix.cu"}
    for source in every:
        macros = (f"-D{name}={value}" for name, value in source.macros)
        assert compiler.compile(source.name, source.text, architecture, (*OPTIONS, *macros))
