"""Cases that only ``ci/test --all`` runs.

They prove nothing of a kernel, format, family, dialect or fault that no case of ``ci/test`` does:
they combine the same ones in more ways, or a compiler takes long for them."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any

import pytest

SHARE = "ZINC_RT_LONG_SHARE"
"""An environment variable: 2/4 is the third of four shares of the long tests, counted from 0."""

ELSEWHERE = ("device", "long", "soak")
"""Markers of cases that ``ci/test`` does not run."""

ONCE = """
cli/test_check: check_plans_what_run_takes
cuda/test_attention: blocks_of_many_tokens
cuda/test_attention_clusters: a_broken_row_breaks_its_heads_alone
cuda/test_attention_clusters: every_split_has_the_bits_of_the_definitions
cuda/test_attention_clusters: rotated_pages
cuda/test_delta_net: several_states_of_a_slot
cuda/test_experts: a_block_of_experts_is_three_launches products_by_themselves
cuda/test_persistent: contexts_of_several_items
cuda/test_products: a_layer_is_three_launches
cuda/test_products: a_product_has_the_bits_of_the_definition
cuda/test_products: more_tiles_than_places_for_their_values
cuda/test_products: the_largest_sums
cuda/test_products: two_blocks_share_the_columns
cuda/test_products: warps_that_have_no_share_of_a_tile
cuda/test_products_of_many: a_few_tokens
cuda/test_products_of_many: a_layer_of_a_few_tokens
cuda/test_products_of_many: fewer_tokens_than_a_form_of_sixteen
cuda/test_products_of_many: many_tokens_are_packed_by_fours
cuda/test_products_of_many: spans_folded_by_the_next_run
cuda/test_products_of_many: spans_nobody_packs
cuda/test_sampling: who_draws_a_row_ends_it
engine/test_churn: steps_of_churn_lower_nothing
engine/test_disk_cache: a_restarted_server_gives_the_bits_of_a_cold_one
engine/test_draft_block: a_cancel_at_any_step_changes_no_other no_draft_changes_an_answer
engine/test_draft_block: drafts_follow_the_formulas
engine/test_experts: company_and_chunks_change_nothing
engine/test_forced: company_and_chunks_change_no_bit
engine/test_handing_out: an_interrupt_at_any_line_of_a_step_of_models
engine/test_intervals: batch_work_spreads_the_intervals_little
engine/test_no_token_read_twice: an_edit_in_the_middle_costs_one_interval
engine/test_plain_steps: steps_without_drafts_verify_none
engine/test_saved_states: a_preempted_prompt_goes_on_from_its_states
engine/test_saved_states: a_request_cancelled_at_any_step_leaves_its_states
engine/test_saved_states: with_hardly_any_room_for_states
engine/test_scores: company_and_chunks_change_no_bit
engine/test_speculation: a_draft_model_guesses a_draft_model_of_other_sizes_changes_nothing
engine/test_speculation: no_guess_changes_a_token
engine/test_starvation: a_long_prompt_beside_a_flood_ends_within_its_bound
harness/test_draft_model: answers_are_those_without_it
harness/test_session: a_cancelled_generation_leaves_nothing_behind
harness/test_synth: every_architecture_and_type_computes every_dense_variant_computes
invariance/test_adapters: a_schedule_changes_no_bit
invariance/test_default_model: no_schedule_changes_a_bit
invariance/test_load: threads_and_definitions_agree
invariance/test_schedules: every_depth_of_the_pipeline
kernels/test_attention_tiles: wrong_kernels_are_noticed:
kernels/test_fused: the_bits_are_those_of_the_ops_apart
kernels/test_planes: wrong_kernels_are_noticed:op
kernels/test_tiles: tiles_have_the_bits_of_packed_dots wrong_kernels_are_noticed:op
kernels/test_wide: wrong_kernels_are_noticed:op
memory/test_allocation: default_model synthetic_models
model/test_template_forms: a_template_that_refuses_short_conversations_is_tried_with_longer_ones
model/test_template_forms: calls_are_printed_whatever_stands_beside_them
model/test_template_forms: content_comes_out_in_either_form
opencl/test_forms: every_form_gives_the_same_bits
peer/test_quantized_logits: quantized_model_is_close_to_its_expanded_twin
serve/test_agent_bodies: a_session_of_thirty_turns
serve/test_counted_tokens: tokens_behind_a_stop_string_count_nowhere
serve/test_counted_tokens: tokens_behind_a_stop_token_count_nowhere
serve/test_dialects: what_is_enforced_is_read_as_calls_that_obey
serve/test_document_fuzz: it_answers_as_documented
serve/test_ends_ahead: an_answer_has_what_is_its_own
serve/test_models_beside: a_tenant_uses_its_models_alone
serve/test_receipt_attacks: a_server_that_lies_about_its_model_is_caught
serve/test_receipts: a_lie_that_is_signed_is_named every_answer_has_a_receipt_that_verifies
serve/test_verify: answers_of_ollamas_routes
tiers/test_families: every_result_is_the_definitions
tiers/test_streaming: streamed_weights_give_the_bits_of_resident_ones
"""
"""Tests of which ``ci/test`` runs each value of each parameter once, be it a tier, a format, a
family or a fault, and ``--all`` every combination. Behind a colon: the parameters that count; where
none does, one case is enough."""


def each_value_once(text: str) -> dict[str, frozenset[str] | None]:
    """The tests of a text like ONCE, and which parameters count, None if all do."""
    found: dict[str, frozenset[str] | None] = {}
    for line in text.split("\n")[1:-1]:
        file, names = line.split(": ")
        for entry in names.split(" "):
            name, marked, counting = entry.partition(":")
            which = frozenset(counting.split(",")) - {""} if marked else None
            found[f"{file}.py::test_{name}"] = which
    return found


EACH_VALUE_ONCE = each_value_once(ONCE)


def long_except(names: Iterable[str], *short: str) -> list[Any]:
    """Parameters of those names, marked ``long`` but for ``short``."""
    return [pytest.param(name, marks=[] if name in short else [pytest.mark.long]) for name in names]


def covering(cases: Mapping[str, Set[tuple[str, object]]]) -> set[str]:
    """Names of cases that have all values, chosen by digests of the names: the same ones in every
    process, and each value beside various others."""
    met: set[tuple[str, object]] = set()
    chosen = set()
    for name in sorted(cases, key=_digest):
        if not cases[name] <= met or not cases[name]:
            chosen.add(name)
        met |= cases[name]
    return chosen


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Marks ``long`` the cases of EACH_VALUE_ONCE whose values other cases have. A case that
    ``ci/test`` does not run has them for nobody."""
    tests: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in EACH_VALUE_ONCE and not any(map(item.get_closest_marker, ELSEWHERE)):
            tests[name][item.nodeid] = item
    for test, cases in tests.items():
        values = {one: _values(cases[one], EACH_VALUE_ONCE[test]) for one in cases}
        for nodeid in cases.keys() - covering(values):
            cases[nodeid].add_marker(pytest.mark.long)


def in_share(nodeid: str, share: str | None = None) -> bool:
    """Whether a long test is in the share that the environment names, by its file: tests of one
    file share what they open."""
    named = os.environ.get(SHARE, "") if share is None else share
    if not named:
        return True
    number, shares = map(int, named.split("/"))
    return int(_digest(nodeid.partition("::")[0]), 16) % shares == number


def _values(item: pytest.Item, counting: frozenset[str] | None) -> set[tuple[str, object]]:
    """The parameters of a test that count. Equal values are one; two equal tuples of a file may be
    one object in one process and two in another."""
    found = getattr(item, "callspec", None)
    if counting is not None and not counting:
        return {("any case", None)}
    return {
        (name, value if _has_hash(value) else id(value))
        for name, value in (found.params.items() if found is not None else ())
        if counting is None or name in counting
    }


def _has_hash(value: object) -> bool:
    """A tuple of lists has none."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _digest(text: str) -> str:
    """The same order in every process."""
    return hashlib.sha256(text.encode()).hexdigest()
