"""Cases that only ``ci/test --all`` runs.

They prove nothing of a kernel, format, family, dialect or fault that no case of ``ci/test`` does:
they combine the same ones in more ways, or a compiler takes long for them."""

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
cli/test_published_shapes: inspect_says_what_the_layers_are:
cli/test_published_shapes: the_graph_verifies_and_survives_the_codec:
cuda/test_expert_cache: every_step_finds_every_matrix
cuda/test_tier: queued_steps_keep_their_inputs_and_outputs
engine/test_churn: steps_of_churn_lower_nothing
engine/test_computed_is_counted: who_cancels_after_each_step_computes_no_more_than_its_rate
engine/test_constrained_requests: a_mask_that_fails_ends_one_request
engine/test_constrained_requests: company_depth_and_tier_change_no_bit
engine/test_disk_cache: a_restarted_server_gives_the_bits_of_a_cold_one
engine/test_disk_long_prompts: a_damaged_page_ends_what_is_loaded
engine/test_disk_long_prompts: whatever_happens_meanwhile_loses_nothing
engine/test_disk_scopes: a_scope_that_ends_while_no_model_is_loaded_leaves_nothing
engine/test_draft_block: no_draft_changes_an_answer
engine/test_drafters_alike: no_draft_changes_an_answer
engine/test_draft_formulas: drafts_follow_the_formulas drafts_of_blocks_follow_the_formulas
engine/test_drafts_ahead: cancels_and_joins_behind_drafts_ahead drafts_ahead_are_those_that_follow
engine/test_drafts_ahead: no_draft_ahead_changes_an_answer
engine/test_experts: company_and_chunks_change_nothing
engine/test_faults: a_sink_that_cancels_a_neighbour a_sink_that_cancels_its_own_request
engine/test_faults: an_interrupt_while_a_token_is_taken: an_interrupt_while_room_is_made:
engine/test_forced: company_and_chunks_change_no_bit what_a_model_says_by_itself_has_the_same_events
engine/test_handing_out: an_interrupt_at_any_line_of_a_step_of_models
engine/test_intervals: batch_work_spreads_the_intervals_little
engine/test_no_token_read_twice: an_edit_in_the_middle_costs_one_interval
engine/test_plain_steps: adapters_and_drafts_are_left_out_of_steps_without
engine/test_plain_steps: steps_without_drafts_verify_none
engine/test_saved_states: a_preempted_prompt_goes_on_from_its_states
engine/test_saved_states: a_request_cancelled_at_any_step_leaves_its_states
engine/test_saved_states: with_hardly_any_room_for_states
engine/test_scores: a_prompt_is_scored_and_continued
engine/test_sharing: turns_of_a_conversation_begin_where_the_last_ended
engine/test_speculation: a_draft_model_guesses masked_requests_are_drafted_for
engine/test_speculation: no_guess_changes_a_token
engine/test_starvation: a_long_prompt_beside_a_flood_ends_within_its_bound
harness/test_draft_model: answers_are_those_without_it
harness/test_session: a_cancelled_generation_leaves_nothing_behind
harness/test_synth: every_architecture_and_type_computes every_dense_variant_computes
harness/test_synth: every_family_variant_computes:
invariance/test_adapters: a_schedule_changes_no_bit
invariance/test_default_model: no_schedule_changes_a_bit
invariance/test_load: threads_and_definitions_agree
invariance/test_schedules: every_depth_of_the_pipeline
kernels/test_attention_tiles: wrong_kernels_are_noticed:
kernels/test_fused: the_bits_are_those_of_the_ops_apart:tokens
kernels/test_tiles: tiles_have_the_bits_of_packed_dots:op totals_of_several_spans:
kernels/test_tiles: wrong_kernels_are_noticed:op
memory/test_allocation: default_model synthetic_models
memory/test_page_copies: a_copy_has_the_bytes_its_source_has_at_that_point_of_the_queue
memory/test_page_copies: a_page_there_is_not_is_a_broken_caller
memory/test_page_copies: more_pages_than_are_under_way_at_once_come_in_order no_copy_lowers_anything
memory/test_page_copies: pages_loaded_together_are_those_loaded_one_by_one
memory/test_page_copies: several_pages_are_loaded_by_one_submission
metal/test_memory: plans
model/test_gguf_read: large_string_array_with_a_wild_length
model/test_template_forms: a_template_that_refuses_short_conversations_is_tried_with_longer_ones
model/test_template_forms: calls_are_printed_whatever_has_to_stand_around_them
model/test_template_forms: calls_are_printed_whatever_stands_beside_them
model/test_template_forms: content_comes_out_in_either_form
model/test_weights: the_first_broken_scale_is_found
native/test_sample: cut_lists_draw_what_the_definition_draws
opencl/test_forms: every_form_gives_the_same_bits
opencl/test_schedule: no_worker_meets_what_another_touched scratch_alive_together_does_not_overlap
ops/test_flash_attn_batched: scalar_rule
ops/test_ssm_delta_net: close_to_binary64
ops/test_ssm_scan: close_to_binary64
peer/test_quantized_logits: quantized_model_is_close_to_its_expanded_twin
sched/test_draft_turns: the_gain_of_the_best_fixed_number_is_found
sched/test_fair_rates: shares_follow_weights_in_the_long_run slots_left_over_go_round
quant/test_prepared_matmul: many_tokens_and_full_tiles
serve/test_agent_bodies: a_session_of_thirty_turns
serve/test_dialects: what_is_enforced_is_read_as_calls_that_obey
serve/test_document_fuzz: it_answers_as_documented
serve/test_ends_ahead: an_answer_has_what_is_its_own
serve/test_generic_tools: a_required_call_that_is_cut_has_no_content
serve/test_receipt_attacks: a_server_that_lies_about_its_model_is_caught
serve/test_receipts: a_lie_that_is_signed_is_named every_answer_has_a_receipt_that_verifies
serve/test_refused_schemas: every_route_refuses_what_no_grammar_holds
serve/test_reply_mended: fenced_calls_are_read other_fenced_texts_stay_texts
serve/test_reply_mended: two_calls_are_read_with_marks_missing_between_them
serve/test_special_tokens: a_stop_string_may_be_a_control_token
serve/test_verify_apis: answers_of_ollamas_routes
simulation/test_disk: nobody_finds_what_a_scope_left_that_ended
simulation/test_interrupted_ends: any_other_call
simulation/test_shares: no_way_of_asking_wins_slots
test_constrained_steps: company_depth_and_tier_change_no_bit
tiers/test_families: every_result_is_the_definitions
tiers/test_streaming: streamed_weights_give_the_bits_of_resident_ones
trace/test_replay: a_flipped_bit_is_found what_one_tier_did_every_tier_does
vulkan/test_matrices: every_kernel_is_compared_with_packed_dots
vulkan/test_repeated: activations_of_many_segments: every_shape_of_heads:
"""
"""Tests of which ``ci/test`` runs each value of each parameter once, be it a tier, a format, a
family or a fault, and ``--all`` every combination. Behind a colon: the parameters that count; where
none does, one case is enough."""


def each_value_once(text: str) -> dict[str, frozenset[str] | None]:
    """The tests of a text like ONCE, and which parameters count, None if all do."""
    found: dict[str, frozenset[str] | None] = {}
    for line in text.split("\n")[1:-1]:
        file, names = line.split(": ", 1)
        for entry in names.split(" "):
            name, marked, counting = entry.partition(":")
            which = frozenset(counting.split(",")) - {""} if marked else None
            found[f"{file}.py::test_{name}"] = which
    return found


EACH_VALUE_ONCE = each_value_once(ONCE)


def long_except(names: Iterable[object], *short: object) -> list[Any]:
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
