"""Requests and tenants: defaults change nothing, every field out of range is named."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError, QueueFull, RequestError, ZincError
from contract.types import (
    LOCAL_TENANT,
    MAX_INT32,
    MIN_TEMPERATURE,
    MIN_TOP_P,
    FinishReason,
    QosClass,
    Request,
    SamplingParams,
    Tenant,
    TokenEvent,
)
from tests.tables import table


def test_defaults_are_greedy_and_valid():
    sampling = SamplingParams()
    sampling.validate()
    assert sampling.temperature == 0
    assert not sampling.penalizes
    assert Request(1, (5,), 3).sampling == sampling
    assert Request(1, (5,), 3).logit_bias == ()
    assert Request(1, (5,), 3).log_probabilities is None
    assert TokenEvent(1, 5, 0).finish_reason is None
    assert {reason.value for reason in FinishReason} == {
        *("stop", "length", "cancelled", "client_too_slow", "error")
    }
    assert (TokenEvent(1, 5, 0).log_probability, TokenEvent(1, 5, 0).top) == (None, ())


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (-0.1, 100.1, MIN_TEMPERATURE / 2, 5e-324)),
        ("top_p", (0.0, -0.5, 1.01, MIN_TOP_P / 2)), ("min_p", (-0.01, 1.01)),
        ("repeat_penalty", (0.0, -1.0, 101.0)), ("presence_penalty", (-2.1, 2.1)),
        ("frequency_penalty", (-2.1, 2.1)), ("top_k", (-1, 2**31, 1.0)),
        ("repeat_last_n", (-1, 2**31, 1.0)), ("seed", (-1, 2**64, 1.0)),
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_named(field, values):
    for value in (*values, math.nan, math.inf, -math.inf, True, None, "1"):
        with pytest.raises(RequestError) as caught:
            dataclasses.replace(SamplingParams(), **{field: value}).validate()
        assert caught.value.field == field


@given(
    st.builds(
        SamplingParams, temperature=st.just(0.0) | st.floats(MIN_TEMPERATURE, 100),
        top_k=st.integers(0, 2**31 - 1), top_p=st.floats(MIN_TOP_P, 1), min_p=st.floats(0, 1),
        repeat_penalty=st.floats(0.01, 100), repeat_last_n=st.integers(0, 4096),
        presence_penalty=st.floats(-2, 2), frequency_penalty=st.integers(-2, 2),
        seed=st.integers(0, 2**64 - 1),
    )
)  # fmt: skip
def test_everything_in_range_is_accepted(sampling):
    sampling.validate()


@pytest.mark.parametrize(
    ("changes", "penalizes"), table(__file__, "test_types")["only_penalties_look_back"], ids=str
)
def test_only_penalties_look_back(changes, penalizes):
    assert dataclasses.replace(SamplingParams(), **changes).penalizes is penalizes


def test_a_plain_tenant_is_valid():
    Tenant(0, "default").validate()
    Tenant(7, "team", 0.25, 1, 1, isolation_group=3, qos=QosClass.BATCH).validate()
    Tenant(2, "guaranteed", max_kv_pages=10, reserved_pages=10).validate()
    LOCAL_TENANT.validate()


def test_the_local_tenant_is_the_one_of_a_request_that_names_none():
    assert Request(1, (5,), 3).tenant == LOCAL_TENANT.id == 0
    quotas = (
        *(LOCAL_TENANT.max_slots, LOCAL_TENANT.max_kv_pages, LOCAL_TENANT.decode_tokens_per_s),
        *(LOCAL_TENANT.prefill_tokens_per_s, LOCAL_TENANT.max_context),
    )
    assert set(quotas) == {MAX_INT32}


def test_classes_are_ranked_from_the_most_urgent():
    assert [qos.rank for qos in QosClass] == [0, 1, 2]
    assert QosClass.INTERACTIVE.rank < QosClass.STANDARD.rank < QosClass.BATCH.rank


def test_a_full_queue_says_how_deep_it_is_and_when_to_return():
    error = QueueFull(1024, 2.4)
    assert isinstance(error, ZincError)
    assert (error.depth, error.retry_after) == (1024, 2.4)
    assert str(error) == "the queue is full: 1,024 requests wait; try again in 2 s"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", -1), ("id", 2**32), ("name", ""), ("name", "a\nb"), ("weight", 0.0),
        ("weight", math.nan), ("weight", math.inf), ("max_slots", 0), ("max_kv_pages", 0),
        ("max_kv_pages", True), ("max_kv_pages", 2**31), ("isolation_group", -1), ("qos", "batch"),
        ("decode_tokens_per_s", 0), ("decode_tokens_per_s", 10.5), ("prefill_tokens_per_s", 0),
        ("max_context", 0), ("reserved_pages", -1), ("reserved_pages", 4097),
    ],
)  # fmt: skip
def test_a_tenant_field_out_of_range_is_named(field, value):
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(Tenant(1, "team"), **{field: value}).validate()
