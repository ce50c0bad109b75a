"""Cases on devices that a processor plays, which take ten to a hundred times as long as those of
the native tier: OpenCL through PoCL, Vulkan through lavapipe, blocks of CUDA in C++, and doubles of
the others.

Their kernels are compared with the definitions one by one, in ``parity``, ``kernels`` and samples
of the conformance list. ``ci/test`` runs little else on them: schedules, families and sizes have
the native tier beside the CPU's, and ``--all`` has the rest. The CPU tier itself takes ten times as
long as the native one: a test about the host has it once, and the native tier for each case."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from tests.costs import folder_of
from tests.long_cases import ELSEWHERE, each_value_once

PLAYED = ("amd", "cuda", "intel", "metal", "opencl", "vulkan")
"""What names of such tiers, and of ways to open them, begin with."""
MODELS = {"default_model", "default_model_path", "synthetic_model", "tiny_model_path"}
"""Fixtures of whole models. Outside of OF_THE_HOST, what is done with less takes little time."""
OF_THE_HOST = ("engine", "invariance", "memory")
"""Folders of tests about what the host does around a tier's steps."""
AROUND_STEPS = ("engine", "invariance")
"""Those in which nothing depends on how a tier lays out its memory."""
CPU = "cpu"
ON_THE_HOST = re.compile(r"\b(cpu|late|native|quick)\b")
"""Names in cases of the CPU tier, and of those whose compiled steps have its bits."""
BLOCKS = "folder"
"""The fixture of ``tests/cuda`` that has emulated kernels built."""

SMOKES = """
engine/test_engine: who_runs_out_of_pages_is_preempted_and_resumes
invariance/test_schedules: no_schedule_changes_a_bit
tiers/test_model: logits_and_tokens_are_the_cpu_tiers
"""
"""Tests of which each device keeps a case."""

BESIDE = """
cuda/test_expert_cache: experts_move_and_no_bit_changes
cuda/test_experts: blocks_that_wait_in_vain_end_once_told experts_of_more_pairs_than_a_chunk
cuda/test_experts: prompts_of_devices_that_have_rows_of_every_expert tokens_of_a_prompt
cuda/test_experts: tokens_that_share_experts
cuda/test_multi_device: a_device_may_be_far_ahead a_step_of_one_token_is_one_launch
cuda/test_multi_device: memory_of_another_device_may_move
cuda/test_sending: products_of_many_tokens_send
cuda/test_shared_steps: a_bank_that_is_cleared_too_early_is_noticed
cuda/test_streamed: a_budget_is_planned_and_said copies_in_a_wrong_order_are_caught
cuda/test_streamed: host_memory_that_is_refused_is_named
cuda/test_tuned_compile: tuned_kernels_compile
tiers/test_families: default_model_writes_the_cpu_tiers_tokens
tiers/test_model: steps_of_few_rows_are_the_definitions
"""
"""Tests that take a second or more for a case, beside one that says most of it:
``ci/test`` runs none of their cases on such devices."""

SCHEDULES = """
engine/test_churn: steps_of_churn_lower_nothing
engine/test_disk_cache: a_restarted_server_gives_the_bits_of_a_cold_one
engine/test_draft_block: no_draft_changes_an_answer
engine/test_drafters_alike: no_draft_changes_an_answer
engine/test_plain_steps: steps_without_drafts_verify_none
invariance/test_families: everyone_at_once no_schedule_changes_a_bit
invariance/test_schedules: every_depth_of_the_pipeline preemption_and_prefixes_change_no_bit
"""
"""Tests of which steps go when, with nothing that a step computes or writes but tokens and logits,
which SMOKES have on each device. On a graphics card that a processor plays they take ten seconds to
thirty a case, which are soak tests."""
CARD = "vulkan"


def device_of(item: Any) -> str | None:
    """What takes long in this case: the CPU tier, or what a processor plays; None if nothing."""
    names, folder = item.fixturenames, folder_of(item.nodeid)
    if folder == "cuda":
        return "cuda" if BLOCKS in names else None
    if folder not in OF_THE_HOST and MODELS.isdisjoint(names):
        return None
    texts = [*texts_of(item.callspec.params.values())] if hasattr(item, "callspec") else []
    if folder in AROUND_STEPS and CPU in texts:
        return CPU
    return next((one for text in texts for one in PLAYED if text.startswith(one)), None)


def texts_of(values: Iterable[object]) -> Iterator[str]:
    """The texts among parameters, and in tuples of theirs."""
    for value in values:
        if isinstance(value, tuple):
            yield from texts_of(value)
        elif isinstance(value, str):
            yield value


def mark_played(items: Iterable[pytest.Item]) -> None:
    """Marks ``long`` the cases on devices that a processor plays, but for one of each test that has
    no others, and of SMOKES one for each device. Of those on the CPU tier, which a quicker one has
    as well, one of each test stays."""
    tests: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if not any(map(item.get_closest_marker, ELSEWHERE)):
            name = item.nodeid.partition("[")[0].removeprefix("tests/")
            tests[name][device_of(item) or ""].append(item)
    for name in tests.keys() & ON_CARDS_SOAK.keys():
        for item in tests[name].pop(CARD, []):
            item.add_marker(pytest.mark.soak)
    for name, devices in tests.items():
        others, on_cpu = devices.pop("", []), devices.pop(CPU, [])
        for item in _had_by(others, on_cpu):
            item.add_marker(pytest.mark.long)
        others += on_cpu
        kept = [min(cases, key=_plainest) for cases in devices.values()]
        if name not in EACH_DEVICE:
            kept = [] if others or name in NONE_KEPT else sorted(kept, key=_plainest)[:1]
        for item in (one for cases in devices.values() for one in cases if one not in kept):
            item.add_marker(pytest.mark.long)


def _had_by(others: list[pytest.Item], on_cpu: list[pytest.Item]) -> list[pytest.Item]:
    """The cases on the CPU tier that others are with another tier, but for the plainest."""

    def on_any_tier(item: pytest.Item) -> str:
        return ON_THE_HOST.sub(CPU, item.nodeid)

    known = {*map(on_any_tier, others)}
    return [item for item in sorted(on_cpu, key=_plainest)[1:] if on_any_tier(item) in known]


def _plainest(item: pytest.Item) -> tuple[int, str]:
    """The case with the shortest name: a tier as it is, without the way it is opened."""
    return len(item.nodeid), item.nodeid


EACH_DEVICE: Mapping[str, object] = each_value_once(SMOKES)
NONE_KEPT: Mapping[str, object] = each_value_once(BESIDE)
ON_CARDS_SOAK: Mapping[str, object] = each_value_once(SCHEDULES)
