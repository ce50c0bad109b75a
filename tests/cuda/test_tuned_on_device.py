"""Tuned kernels on a device: the cases of the emulated blocks, with the same definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda.device import Device
from accel.cuda.driver import open_driver
from accel.cuda.packed_tiles import UNIT_ROWS
from accel.cuda.plan import Plan, PlannedLaunch
from accel.cuda.products import MAX_TILE_SLOTS
from accel.cuda.runtime import Choices
from accel.cuda.tier import CudaTier
from accel.packets.step import Op
from contract import dtypes
from contract.dtypes import DType
from contract.ir.graph import Graph
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.nodes import BufferKind
from contract.shape_key import ShapeKey
from reference.quant.dot import matmul
from tests.cuda import (
    product_cases,
    test_attention,
    test_attention_clusters,
    test_half_products,
    test_head_rows,
    test_products,
    test_products_of_many,
    test_rows,
    test_sampling,
)
from tests.cuda.emulated_step import DEVICE, NO_STAND_INS, StandIn
from tests.needs import need_device

pytestmark = pytest.mark.device

MIN_BYTES = 256
RUN = {
    test_attention: "a_broken_row_breaks_its_head_alone blocks_of_many_tokens several_tiles_at_once"
    " every_split_has_the_bits_of_the_definition rows_are_packed_for_the_product_behind",
    test_attention_clusters: "a_broken_row_breaks_its_heads_alone"
    " every_split_has_the_bits_of_the_definitions"
    " rotations_of_neighbours_and_of_some_pairs_without_norms",
    test_half_products: "a_prompt_has_the_bits_of_the_definition another_code_changes_its_row"
    " matrices_of_a_prompt_share_a_launch minima_or_scales_of_zero the_largest_sums_of_halves",
    test_head_rows: "heads_add_up_spans_of_products queries_and_pages_are_those_of_the_definition",
    test_products: "a_layer_is_three_launches a_layer_whose_blocks_share_columns the_largest_sums"
    " a_product_has_the_bits_of_the_definition another_weight_gives_other_bits"
    " broken_and_silent_segments integers_made_elsewhere more_tokens_than_a_block_takes"
    " two_blocks_share_the_columns",
    test_products_of_many: "a_few_tokens a_layer_of_a_few_tokens a_layer_of_many_tokens many_tokens"
    " spans_folded_by_the_next_run three_matrices_share_a_launch",
    test_rows: "every_activation every_width",
    test_sampling: "a_row_ends_where_the_next_begins every_rule_draws_what_the_definition_draws"
    " forbidden_tokens_are_not_kept_by_top_k more_equal_logits_than_are_kept_near"
    " rows_whose_logits_are_changed_beside_others rows_without_a_token small_vocabularies"
    " what_top_k_does_not_keep_is_not_weighed",
}
"""Tests of emulated blocks that run here as well."""
NAMED = {f"test_{name}": module for module, names in RUN.items() for name in names.split()}
globals().update({name: getattr(module, name) for name, module in NAMED.items()})


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaTier]:
    need_device(open_driver)
    with CudaTier(choices=Choices(cache=tmp_path_factory.mktemp("cubins"))) as tier:
        yield tier


@pytest.fixture(autouse=True)
def on_device(opened: CudaTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of those tests run there."""
    for module in (product_cases, *RUN):
        if hasattr(module, "run_step"):
            monkeypatch.setattr(module, "run_step", partial(run_on_device, opened))


def run_on_device(
    tier: CudaTier,
    graph: Graph,
    sizes: tuple[ShapeKey, ShapeKey],
    inputs: Mapping[str, NDArray[Any]],
    kept: Mapping[str, NDArray[Any]],
    matrices: Mapping[str, tuple[DType, NDArray[np.uint8]]],
    folder: Path,
    parts: int = 1,
    device: Device = DEVICE,
    stand_ins: Mapping[str, StandIn] = NO_STAND_INS,
    launches_of: Callable[[Sequence[Op], Plan], Sequence[PlannedLaunch]] | None = None,
) -> None:
    """As ``tests.cuda.emulated_step.run_step``: ``kept`` is changed in place. The device there is
    runs the case, whichever it is for, by the launches that are planned."""
    key, bucket = sizes
    layout = input_layout(graph, bucket)
    stored = {name: bits for name, (_, bits) in matrices.items()}
    buffers = {}
    for decl in graph.buffers.values():
        if decl.kind in (BufferKind.WEIGHT, BufferKind.CONSTANT):
            values = stored[decl.name] if decl.name in stored else kept[decl.name]
            rows = np.ascontiguousarray(values).reshape(-1, values.shape[-1]).view(np.uint8)
            buffers[decl.name] = tier.upload(decl, rows)
        elif decl.name in kept:
            flat = kept[decl.name].reshape(-1).view(np.uint8)
            buffer = tier.alloc(decl, max(MIN_BYTES, flat.nbytes))
            tier.write(buffer, 0, flat)
            buffers[decl.name] = buffer
    try:
        batch = tier.lower(graph, buffers, bucket, layout)
        tier.wait(tier.submit(batch, pack_inputs(layout, key, inputs)), 10)
        for decl in graph.buffers.values():
            if decl.kind in (BufferKind.OUTPUT, BufferKind.STATE):
                flat = kept[decl.name].reshape(-1).view(np.uint8)
                flat[:] = tier.read(buffers[decl.name], 0, flat.nbytes)
    finally:
        for buffer in buffers.values():
            tier.free(buffer)


@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q6_K, dtypes.Q8_0], ids=str)
def test_fewer_tokens_than_a_form_has(dtype: DType, opened: CudaTier, folder: Path) -> None:
    """Of more tiles than have places in a block: steps of as many tokens as are left of a form's,
    as when one sequence after the other ends."""
    tiles, blocks = 2 * MAX_TILE_SLOTS + 1, opened._runtime.device.multiprocessors
    case = product_cases.one_product(dtype, tiles * UNIT_ROWS, 1024, 4)
    stored = case.matrices["w"][1]
    want = np.tile(matmul(stored, dtype, case.x), (1, blocks))
    repeated = np.tile(stored, (blocks, 1))
    many = product_cases.one_product(dtype, len(repeated), 1024, 4, repeated)
    for tokens in (4, 3, 2, 1) * 3:
        few = replace(many, x=case.x[:tokens])
        assert np.array_equal(product_cases.run(few, folder, most=4)["y"], want[:tokens])
