"""Steps and calls that are wrong: each gets a code and a text, and changes nothing."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.forked import in_a_fork
from tests.native.c_plan import (
    CHUNK,
    CODES,
    CONTEXT,
    IN_FLIGHT,
    LAST_TOKEN,
    SAMPLING,
    SLOTS,
    Refused,
    exported,
    run,
)

MAX_TOKENS = CHUNK + SLOTS


VOCAB = 320


STEPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no tokens": ("SIZE", "0 tokens", {"tokens": []}),
    "too many tokens": ("SIZE", f"not 1 to {MAX_TOKENS}",
                        {"tokens": [(1, 0, at) for at in range(MAX_TOKENS + 1)]}),
    "more rows than tokens": ("SIZE", "2 rows", {"tokens": [(1, 0, 0)], "rows": [0, 0]}),
    "an id beyond the vocabulary": ("TOKEN", f"{VOCAB - 1}", {"tokens": [(VOCAB, 0, 0)]}),
    "the largest id": ("TOKEN", "id 2147483647", {"tokens": [(2**31 - 1, 0, 0)]}),
    "a negative id": ("TOKEN", "id -2", {"tokens": [(LAST_TOKEN - 1, 0, 0)]}),
    "a slot that is not": ("POSITION", "slot 2 of 2", {"tokens": [(1, SLOTS, 0)]}),
    "a negative slot": ("POSITION", "slot -1", {"tokens": [(1, -1, 0)]}),
    "the end of the context": ("POSITION", f"of {CONTEXT}", {"tokens": [(1, 0, CONTEXT)]}),
    "a negative position": ("POSITION", "position -1", {"tokens": [(1, 0, -1)]}),
    "a gap": ("POSITION", "continues at position 0, not at 3", {"tokens": [(1, 0, 3)]}),
    "positions that jump": ("POSITION", "after one at 0", {"tokens": [(1, 0, 0), (1, 0, 2)]}),
    "a slot twice": ("POSITION", "do not follow", {"tokens": [(1, 0, 0), (1, 1, 0), (1, 0, 1)]}),
    "a row that is not": ("POSITION", "token 1 of 1", {"tokens": [(1, 0, 0)], "rows": [1]}),
    "rows out of order": ("POSITION", "out of order",
                          {"tokens": [(1, 0, 0), (1, 0, 1)], "rows": [1, 0]}),
    "a page that is not": ("POSITION", "page 0 of slot 0 is 12",
                           {"tokens": [(1, 0, 0)],
                            "pages": np.full((SLOTS, CONTEXT // 16), 12, np.int32)}),
    "a negative page": ("POSITION", "page 0 of slot 0 is -1",
                        {"tokens": [(1, 0, 0)],
                         "pages": np.full((SLOTS, CONTEXT // 16), -1, np.int32)}),
}  # fmt: skip


@pytest.mark.parametrize("wrong", list(STEPS))
def test_steps_that_are_wrong_change_nothing(wrong, plan, c_plan):
    """A code and a text; the next step has the bits it would have had."""
    name, text, step = STEPS[wrong]
    assert c_plan.open(plan).info().vocab == VOCAB
    before = c_plan.step([(7, 0, 0)], [0])
    c_plan.close()
    c_plan.open(plan)
    with pytest.raises(Refused, match=text) as refused:
        c_plan.submit(**step)
    assert refused.value.name == name
    event = c_plan.submit([(7, 0, 0)], [0])
    assert event == 1
    assert c_plan.wait(event, 1) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-1.0, 1e-4, 1e3, np.nan, np.inf)),
        *(("top_p", value) for value in (0.0, 1.1, np.nan)),
        *(("min_p", value) for value in (-0.1, 1.1, np.nan)),
        *(("repeat_penalty", value) for value in (0.0, 1e3, np.nan)),
        *(("presence_penalty", value) for value in (-3.0, 3.0, np.nan)),
        *(("frequency_penalty", value) for value in (-3.0, 3.0, np.nan)),
        *(("top_k", value) for value in (-1,)),
        *(("repeat_last_n", value) for value in (-1, 65)),
    ],
)
def test_sampling_that_is_out_of_range(field, value, plan, c_plan):
    """The text names the parameter."""
    record = np.zeros(1, SAMPLING)
    record["top_p"] = record["repeat_penalty"] = 1
    c_plan.open(plan).step([(1, 0, 0)], [0], sampling=record)
    record[field] = value
    with pytest.raises(Refused, match=f"{field} is out of range") as refused:
        c_plan.submit([(1, 0, 0)], [0], sampling=record)
    assert refused.value.name == "SAMPLING"


@pytest.mark.parametrize(
    ("tokens", "name"),
    [("", "SIZE"), ("1,320", "TOKEN"), ("1,-7", "TOKEN"), (",".join(["1"] * 97), "POSITION")],
)
def test_the_c_program_says_what_is_wrong(tokens, name, plan, c_library, decode_sanitized):
    """No tokens, ids out of range, and more tokens than the context has."""
    code, _, err = run(decode_sanitized, plan, tokens, 2, c_library.parent)
    assert code == CODES[name]
    assert err.startswith(f"decode: {name.lower()}: ")


def test_the_c_program_is_clean(plan, c_library, decode, decode_sanitized):
    """With sanitizers it prints the same and frees everything."""
    words = (plan, "5,6,7,8,9,10,11,12,13,14,15", 9)
    code, out, err = run(decode_sanitized, *words, c_library.parent)
    assert (code, err) == (0, "")
    assert (code, out, err) == run(decode, *words)
    assert len(out.split()) == 3 + 9


def test_a_recurrent_sequence_begins_at_0_again(synthetic_model, c_plan, tmp_path):
    """Its state cannot be cut back."""
    hybrid = {"interval": 3, "state": 32, "key_heads": 2, "value_heads": 6}
    model = synthetic_model(architecture="qwen35", layers=4, recurrent=hybrid)
    sizes = c_plan.open(exported(model, tmp_path)).info()
    assert sizes.recurrent == 1
    first = c_plan.step([(5, 0, 0), (6, 0, 1)], [1])
    own = np.arange(sizes.slots * sizes.slot_pages, dtype=np.int32)
    for pages in (None, own):
        for position, text in (
            (1, "recurrent state at position 2"),
            (5, "continues at position 2"),
        ):
            with pytest.raises(Refused, match=text) as refused:
                c_plan.submit([(6, 0, position)], [0], pages=pages)
            assert refused.value.name == "POSITION"
        assert c_plan.step([(5, 0, 0), (6, 0, 1)], [1], pages=pages) == first


def test_a_step_too_many_waits_for_the_caller(plan, c_plan):
    """At most IN_FLIGHT events are open, and each is used once."""
    c_plan.open(plan)
    events = [c_plan.submit([(1, 0, at)], [0]) for at in range(IN_FLIGHT)]
    with pytest.raises(Refused, match=f"wait for step {events[0]}") as refused:
        c_plan.submit([(1, 0, IN_FLIGHT)])
    assert refused.value.name == "BUSY"
    for event in events:
        c_plan.wait(event, 1)
    for event in (0, events[0], events[-1] + 1, 2**63):
        with pytest.raises(Refused, match="no step in flight") as unknown:
            c_plan.wait(event)
        assert unknown.value.name == "EVENT"


def test_a_plan_can_be_closed_at_any_time(plan, c_plan):
    """Steps in flight end first; every call after it says that the plan is closed."""
    for _ in range(2):
        c_plan.open(plan)
        logits = np.empty((1, VOCAB), np.float32)
        event = c_plan.submit([(1, 0, 0)], [0], logits=logits)
        c_plan.close()
        c_plan.close()
        assert np.isfinite(logits).all()
        calls: list[Callable[[], object]] = [
            c_plan.info,
            lambda: c_plan.call("verify"),
            lambda: c_plan.submit([(1, 0, 0)]),
            lambda event=event: c_plan.wait(event),  # type: ignore[misc]
            lambda: c_plan.call("get_buffer", ctypes.c_uint32(0), None),
        ]
        for call in calls:
            with pytest.raises(Refused) as refused:
                call()
            assert (refused.value.name, refused.value.text) == ("CLOSED", "the plan is not open")


def test_calls_without_arguments(plan, c_plan):
    """Null pointers, a plan that is open, and a program of another version."""
    for name in ("open", "close", "verify", "get_info", "get_buffer", "submit", "wait"):
        assert c_plan.library[f"zinc_rt_{name}"](None, 1, None, None) == CODES["ARGUMENT"]
    with pytest.raises(Refused, match="no path"):
        c_plan.call("open", ctypes.c_uint32(1), None, None)
    with pytest.raises(Refused, match="program has ABI version 2") as version:
        c_plan.open(plan, abi=2)
    assert version.value.name == "VERSION"
    c_plan.open(plan)
    with pytest.raises(Refused, match="is open"):
        c_plan.open(plan)
    buffers = c_plan.info().buffers
    for name, *arguments in (
        ("get_info", None),
        ("get_buffer", ctypes.c_uint32(0), None),
        ("get_buffer", ctypes.c_uint32(buffers), ctypes.create_string_buffer(64)),
        ("submit", None, None),
    ):
        with pytest.raises(Refused) as refused:
            c_plan.call(str(name), *arguments)
        assert refused.value.name == "ARGUMENT"
    names = c_plan.library.zinc_rt_name
    names.restype = ctypes.c_char_p
    assert len({names(code) for code in range(CODES["CODES"])}) == CODES["CODES"]
    assert names(-1) == names(CODES["CODES"]) == b"unknown"


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_refused(plan, c_plan):
    """The threads stay in the first process, which goes on; the other opens a plan of its own."""
    before = c_plan.open(plan).step([(1, 0, 0)], [0])

    def child() -> object:
        try:
            c_plan.submit([(1, 0, 0)], [0])
        except Refused as refused:
            c_plan.close()
            return refused.name, c_plan.open(plan).step([(1, 0, 0)], [0])
        return "submitted"

    assert in_a_fork(child) == ("FORKED", before)
    assert c_plan.step([(1, 0, 0)], [0]) == before
