"""The validator: silent on equal tiers, exact about where an unequal one first goes wrong."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from contract.dtypes import F16, I3R, I4R, I12, Q8_0
from contract.ir.graph import BufferKind
from contract.shape_key import ShapeKey
from harness.progress import NullProgress
from harness.tiers import open_tier
from harness.validate import ValueHistogram, Workload, validate
from harness.validate.__main__ import main
from harness.validate.compare import NOT_FINITE, UNOBSERVED, differs
from harness.validate.trace import (
    layer_groups,
    residual_sites,
    result_sites,
    scratch_of,
    with_outputs,
)
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import Model, open_model
from tests.needs import need_device

TOKENS = tuple(range(3, 24))
WORKLOAD = Workload(TOKENS, chunk=8, decode=2)
STEPS = [(0, 8), (8, 8), (16, 3), (19, 1), (20, 1)]


@dataclass
class Corruption:
    """Adds ``amount`` to element ``index`` of a result; 0 stands for the next number up."""

    node: str
    index: tuple[int, ...]
    result: str = "y"
    only_untraced: bool = False
    from_step: int = 0
    amount: float = 0.0


class CorruptTier(CpuTier):
    """A CPU tier with one wrong op: the negative control of everything here."""

    def __init__(self, corruption: Corruption) -> None:
        super().__init__(definitions_only=True)
        self.corruption = corruption
        self.submissions = 0
        self.traced = False

    def lower(self, graph, buffers, form, inputs):
        self.traced = any(d.name.startswith("scratch.") for d in graph.of_kind(BufferKind.OUTPUT))
        return super().lower(graph, buffers, form, inputs)

    def call_of(self, node, bound):
        call = super().call_of(node, bound)
        sound = self.corruption.only_untraced and self.traced
        if sound or node.name != self.corruption.node:
            return call
        return self._wrong(call, bound[self.corruption.result])

    def submit(self, batch, inputs, requested=(), rows=None):
        fence = super().submit(batch, inputs, requested, rows)
        self.submissions += 1
        return fence

    def _wrong(self, call: Callable[[], None], array) -> Callable[[], None]:
        def wrong() -> None:
            call()
            index = self.corruption.index
            if self.submissions >= self.corruption.from_step and index[0] < len(array):
                moved = np.nextafter(array[index], np.inf, dtype=array.dtype)
                array[index] = moved + array.dtype.type(self.corruption.amount)

        return wrong


@pytest.fixture(scope="module")
def model(tiny_model_path) -> Model:
    return open_model(tiny_model_path)


def report_of(model: Model, corruption: Corruption, **options):
    with CpuTier(definitions_only=True) as oracle, CorruptTier(corruption) as tier:
        return validate(model, oracle, {"cpu": tier}, WORKLOAD, **options)


class Shown(NullProgress):
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.jobs: list[list[int]] = []

    def start(self, label: str, total: int | None, unit: str) -> None:
        self.jobs.append([total or 0, 0])

    def advance(self, n: int) -> None:
        self.jobs[-1][1] += n


def test_every_run_shows_its_steps(model):
    shown = Shown()
    with CpuTier() as tier, CpuTier(definitions_only=True) as oracle:
        assert validate(model, oracle, {"cpu": tier}, WORKLOAD, progress=shown).agrees
    assert shown.jobs == [[len(STEPS)] * 2] * 2


def test_steps_cover_every_token_once():
    assert WORKLOAD.steps() == STEPS
    assert Workload((1,)).steps() == [(0, 1)]


@pytest.mark.parametrize("kv_dtype", [WORKLOAD.kv_dtype, F16, Q8_0, I12, I4R, I3R])
def test_the_cpu_tier_agrees_with_the_definitions(model, kv_dtype):
    with CpuTier(definitions_only=True) as oracle, CpuTier() as tier:
        report = validate(model, oracle, {"cpu": tier}, replace(WORKLOAD, kv_dtype=kv_dtype))
    assert report.agrees
    assert report.steps == len(STEPS)
    graph = model.graph(WORKLOAD.limits)
    assert report.results == len(STEPS) * len(result_sites(graph))
    for by_tier in report.histograms.values():
        assert by_tier["cpu"].digest == by_tier["definitions"].digest
        assert by_tier["cpu"].elements == len(TOKENS) * model.config.hidden


@pytest.mark.parametrize(
    "corruption",
    [
        Corruption("embed", (0, 5)),
        Corruption("attn_qkv[0]", (7, 3), result="k"),
        Corruption("kv_write[1]", (2, 64), result="q"),
        Corruption("attention[1]", (0, 255)),
        Corruption("swiglu[0]", (4, 511)),
        Corruption("ffn_residual[1]", (6, 17)),
        Corruption("lm_head", (0, 319), result="logits"),
    ],
    ids=lambda corruption: corruption.node,
)
def test_one_wrong_bit_is_named_with_its_op_and_index(model, corruption):
    """Also where the wrong bit is rounded away before the end of the layer."""
    report = report_of(model, corruption)
    found = report.divergences["cpu"]
    assert not report.agrees
    assert (found.node, found.index, found.step) == (corruption.node, corruption.index, 0)
    assert found.result == corruption.result
    assert found.differing == 1
    assert int(found.got_bits, 16) - int(found.expected_bits, 16) in (1, -1)
    assert np.frombuffer(bytes.fromhex(found.got_bits), ">f4")[0] == np.float32(found.got)
    assert corruption.node in report.verdict


def test_a_wrong_element_of_the_cache_is_found_where_it_is_written(model):
    """The KV pool outlives the step: the write is at fault, not the attention that reads it."""
    corruption = Corruption("kv_write[1]", (1, 1, 9, 1, 63), result="kv", from_step=1)
    found = report_of(model, corruption).divergences["cpu"]
    assert (found.node, found.index, found.step) == ("kv_write[1]", (1, 1, 9, 1, 63), 1)


@pytest.mark.parametrize("node", ["ssm_conv1d[0]", "ssm_delta[0]"])
def test_a_wrong_element_of_a_recurrent_state_is_found_where_it_is_written(synthetic_model, node):
    """In a later chunk, which only the state connects to the first."""
    hybrid = open_model(synthetic_model(architecture="qwen35moe"))
    index = (0, 1, 3) if node.startswith("ssm_conv") else (0, 1, 3, 5)
    corruption = Corruption(node, index, result="state", from_step=1)
    found = report_of(hybrid, corruption).divergences["cpu"]
    assert (found.node, found.index, found.step) == (node, index, 1)


def test_an_error_that_tracing_hides_is_still_found(model):
    """As a fusion's or a scratch plan's would be: only where buffers are not kept."""
    corruption = Corruption("ffn_residual[0]", (7, 0), only_untraced=True, amount=1.0)
    found = report_of(model, corruption).divergences["cpu"]
    assert found.note == UNOBSERVED
    assert found.node == "kv_write[1]"


def test_the_first_of_the_layers_chosen_is_named_with_a_warning(model):
    corruption = Corruption("attn_residual[0]", (1, 1), amount=1.0)
    report = report_of(model, corruption, layers=[1])
    assert report.layers == (1,)
    found = report.divergences["cpu"]
    assert "--layers all" in found.note
    assert found.node.endswith("[1]")


@pytest.mark.parametrize("trace_bytes", [1, 1 << 30])
def test_a_small_memory_budget_gives_the_same_report(model, trace_bytes):
    corruption = Corruption("swiglu[1]", (3, 100))
    report = report_of(model, corruption, trace_bytes=trace_bytes)
    expected = report_of(model, corruption)
    assert report.as_dict() == expected.as_dict()


def test_layers_are_grouped_within_the_budget(model):
    graph = model.graph(WORKLOAD.limits)
    key = ShapeKey(8, 1)
    assert layer_groups(graph, [0, 1], key, 1) == [{None, 0}, {1}]
    assert layer_groups(graph, [0, 1], key, 1 << 30) == [{None, 0, 1}]
    assert layer_groups(graph, [1], key, 1 << 30) == [{None, 1}]


def test_tracing_changes_nothing_but_the_kind_of_buffers(model):
    graph = model.graph(Limits(1, 32, 2))
    names = scratch_of(graph, frozenset({None, 0, 1}))
    assert names == {d.name for d in graph.of_kind(BufferKind.SCRATCH)}
    traced = with_outputs(graph, names)
    assert traced.nodes == graph.nodes
    assert not traced.of_kind(BufferKind.SCRATCH)
    assert with_outputs(graph, frozenset()) == graph


def test_the_hidden_state_of_a_layer_is_its_last_result(model):
    graph = model.graph(Limits(1, 32, 2))
    found = {layer: graph.nodes[s.node].name for layer, s in residual_sites(graph).items()}
    assert found == {0: "ffn_residual[0]", 1: "ffn_residual[1]"}


def test_floats_are_compared_by_value_and_must_be_finite():
    a = np.array([0.0, np.nan, 1.0, np.inf, np.inf, 1.0, 2.0], np.float32)
    b = np.array([-0.0, np.nan, 1.0, np.inf, -np.inf, np.nan, 3.0], np.float32)
    assert differs(a, b).tolist() == [False, True, False, True, True, True, True]


def test_integers_and_bytes_are_compared_as_they_are():
    a = np.array([0, 1, -1], np.int32)
    assert differs(a, np.array([0, 2, -1], np.int32)).tolist() == [False, True, False]
    assert not differs(a.view(np.uint8), a.view(np.uint8)).any()


@pytest.mark.parametrize("amount", [np.nan, np.inf])
def test_what_is_not_finite_on_both_sides_is_reported(model, amount):
    """Weights and tokens are finite, so no rule gives NaN: equal bits would prove nothing."""
    corruption = Corruption("ffn_down[1]", (2, 7), from_step=1, amount=amount)
    with CorruptTier(corruption) as oracle, CorruptTier(corruption) as tier:
        report = validate(model, oracle, {"cpu": tier}, WORKLOAD)
    found = report.divergences["cpu"]
    assert (found.node, found.index, found.step) == ("ffn_down[1]", (2, 7), 1)
    assert found.note == NOT_FINITE
    assert not report.agrees
    assert "FAIL" in report.verdict


def test_a_tier_alone_that_is_not_finite_is_an_ordinary_divergence(model):
    found = report_of(model, Corruption("swiglu[1]", (2, 7), amount=np.nan)).divergences["cpu"]
    assert (found.node, found.note) == ("swiglu[1]", "")


def test_histogram_bins_by_sign_and_exponent():
    histogram = ValueHistogram()
    histogram.add(np.array([[1.0, 1.5, -2.0], [0.0, -0.0, 1e-40]], np.float32))
    histogram.add(np.array([np.inf, -3.0, np.nan], np.float32))
    assert histogram.bins() == {
        "0": 3, "+2^0": 2, "+non-finite": 2, "-2^1": 2,
    }  # fmt: skip
    assert histogram.elements == 9


def test_histogram_digest_ignores_the_sign_of_zero_and_nothing_else():
    digests = []
    for values in ([0.0, 1.0], [-0.0, 1.0], [0.0, -1.0]):
        histogram = ValueHistogram()
        histogram.add(np.array(values, np.float32))
        digests.append(histogram.digest)
    assert digests[0] == digests[1] != digests[2]


def test_command_reports_agreement(tiny_model_path, capsys):
    argv = ["--model", str(tiny_model_path), "--tokens", "1,2,3,4,5", "--decode", "2"]
    assert main(argv) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("layer 0 ")
    assert printed[-1].startswith("PASS: cpu agrees")


@pytest.mark.parametrize("tier", ["native", "opencl"])
def test_command_takes_the_tiers_of_a_processor(tiny_model_path, capsys, tier):
    """Every op of a prefill and of single tokens, against the definitions."""
    need_device(partial(open_tier, tier)).close()
    argv = ["--model", str(tiny_model_path), "--tokens", "1,2,3,4,5", "--decode", "2"]
    assert main([*argv, "--tiers", tier]) == 0
    assert f"PASS: {tier} agrees" in capsys.readouterr().out


@pytest.mark.parametrize("tier", ["t1", "t2", "metal"])
def test_command_takes_the_simulated_device_that_a_tier_offers(tiny_model_path, capsys, tier):
    """Kernels and packets of tiers whose devices are not here, against the definitions."""
    argv = ["--model", str(tiny_model_path), "--tokens", "1,2,3", "--decode", "1"]
    assert main([*argv, "--tiers", tier, "--device", "simulated"]) == 0
    assert f"PASS: {tier} agrees" in capsys.readouterr().out


def test_command_as_json(tiny_model_path, capsys):
    argv = ["--model", str(tiny_model_path), "--tokens", "1,2,3", "--layers", "1", "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["agrees"]
    assert list(document["layers"]) == ["1"]
    assert sum(document["layers"]["1"]["cpu"]["bins"].values()) == 3 * 256


def test_command_fails_on_a_wrong_tier(tiny_model_path, capsys, monkeypatch):
    def open_wrong(name, threads):
        return CorruptTier(Corruption("ffn_gate_up[1]", (2, 3), result="up"))

    monkeypatch.setattr("harness.validate.__main__.open_tier", open_wrong)
    assert main(["--model", str(tiny_model_path), "--tokens", "1,2,3", "--decode", "0"]) == 1
    printed = capsys.readouterr().out
    opcode = "RMS_NORM_FUSED_MLP_GATE_UP"
    assert f"cpu: first diverging op: ffn_gate_up[1] ({opcode}), step 0" in printed
    assert "up[2, 3] is" in printed
    assert printed.splitlines()[-1].startswith("FAIL: cpu at ffn_gate_up[1]")
