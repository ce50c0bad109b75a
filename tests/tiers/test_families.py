"""Models of every architecture on every tier with kernels of its own: the bits of the CPU tier."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from contract.dtypes import F16, F32, I12, Q8_0, DType
from contract.types import Request
from harness.validate import Workload, validate
from reference.cpu.tier import CpuTier
from reference.model.open import Model, open_model
from tests.conftest import SyntheticModel
from tests.families_table import FAMILIES
from tests.few_rows import ATTENDS_LAST, assert_definitions
from tests.model_runs import SHORT, assert_same, compare, generate

OPENCL, VULKAN, METAL, CUDA = "opencl", "vulkan", "metal-simulated", "cuda"

MODELS = {
    "llama-8-experts": ("q4_k_m", F16), "llama4-experts-chunks": ("q4_k_m", F16),
    "apertus": ("q4_k_m", F16), "mistral3": ("q4_k_m", F16), "smollm3": ("q4_k_m", F16),
    "granite": ("q4_0", Q8_0), "glm4-biases": ("q4_k_m", F16), "phi3-long-rope": ("q8_0", F32),
    "olmo2-windows": ("q5_k", F16), "exaone4-windows": ("q4_k_m", F16), "ernie4_5": ("q8_0", F16),
    "seed_oss": ("q4_k_m", F16), "granitemoe-experts-shared": ("q4_k_m", F16),
    "minimax-m2-experts": ("q4_k_m", F16), "qwen2moe-experts": ("q4_k_m", F16),
    "olmoe-experts": ("q8_0", F16), "command-r": ("q8_0", F32), "starcoder2": ("q4_k_m", F16),
    "stablelm-parallel": ("q4_k_m", F16), "phi2": ("q4_k_m", F16),
    "gptneox-parallel": ("q8_0", F16), "cohere2": ("q4_k_m", F16), "exaone": ("q4_k_m", F16),
    "chatglm": ("q4_k_m", F16), "arcee": ("q4_k_m", F16), "baichuan": ("q8_0", F16),
    "falcon-parallel": ("q4_k_m", F16), "nemotron": ("q4_k_m", F16), "olmo": ("q4_k_m", F16),
    "stablelm-head-norms": ("q4_k_m", F16), "deepseek-experts": ("q4_k_m", F16),
    "bailingmoe-experts": ("q4_k_m", F16), "mamba2-groups": ("q4_k_m", F16),
    "gpt2": ("q4_k_m", F16), "starcoder": ("q8_0", F16), "mistral4-experts": ("q4_k_m", F16),
    "hy_v3-experts": ("q4_k_m", F16), "mellum-experts": ("q4_k_m", F16),
    "smallthinker-experts-windows": ("q4_k_m", F16), "gemma3n-shared-kv": ("q4_k_m", F16),
    "qwen2-untied-mqa": ("q5_1", Q8_0), "qwen3-wide-heads": ("q8_0", F16),
    "qwen3moe-untied-fused-qkv": ("q3_k", Q8_0), "gpt-oss-experts-yarn": ("mxfp4_moe", F16),
    "ernie4_5-moe-experts": ("q4_k_m", F16), "bailingmoe2-experts": ("q4_k_m", F16),
    "exaone-moe-experts": ("q4_k_m", F16), "afmoe-experts": ("q4_k_m", F16),
    "qwen2vl": ("q4_k_m", F16), "qwen3vl": ("q8_0", F16), "qwen3vlmoe-experts": ("q4_k_m", F16),
    "glm4moe-experts": ("q4_k_m", F16), "deepseek2": ("q4_k_m", I12),
    "deepseek2-experts-groups": ("q4_k_m", F16), "qwen35": ("q4_k_m", F16),
    "kimi-linear-experts": ("q4_k_m", F16),
    "qwen35-fused-qkv": ("q6_k", F32), "qwen35moe-fused": ("q4_k_m", Q8_0),
    "qwen3next": ("bf16", F16), "qwen3next-fused-ssm-in": ("iq4_xs", F32), "lfm2": ("q4_k_m", F16),
    "lfm2moe": ("q4_k_m", F16), "granitehybrid": ("q4_k_m", F16), "falcon-h1": ("q4_k_m", F16),
    "nemotron_h": ("q4_k_m", F16), "nemotron_h_moe": ("q4_k_m", F16),
    "hunyuan-dense": ("q4_k_m", F16), "hunyuan-moe-experts": ("q4_k_m", F16),
    "dots1-experts": ("q4_k_m", F16), "internlm2": ("q4_k_m", F16), "minicpm": ("q4_k_m", F16),
    "qwen": ("q4_k_m", F16), "xverse": ("q4_k_m", F16), "pangu-embedded": ("q4_k_m", F16),
    "orion": ("q4_k_m", F16), "codeshell": ("q4_k_m", F16), "jais2": ("q4_k_m", F16),
    "maincoder": ("q4_k_m", F16),
    "gemma": ("q4_k_m", F16), "gemma2": ("q4_k_m", F16),
    "gemma3-untied-softcap-linear": ("q4_0", Q8_0), "gemma4-per-layer-embeddings": ("q8_0", F16),
    "gemma4-shared-kv": ("f16", F32), "gemma4-experts-fused-values-from-keys": ("q4_k_m", F16),
}  # fmt: skip
"""Storage types of the weights and of the pages."""
VULKAN_QUANTS = {"qwen3next": "q4_0", "gemma4-shared-kv": "q5_0"}
"""In place of floats, whose products take longest on a processor that runs Vulkan's shaders; the
parity suite has them."""
STORAGES = (
    ("llama", "q4_0", F16), ("llama", "q8_0", F32), ("qwen2", "q5_k", F16), ("qwen3", "q6_k", F16),
    ("llama", "f16", F32), ("qwen2", "bf16", F16), ("llama", "f32", F32), ("qwen3", "q4_k_m", Q8_0),
    ("llama", "q5_0", Q8_0),
)  # fmt: skip
ON_VULKAN = (
    *("qwen2-untied-mqa", "gpt-oss-experts-yarn", "qwen35moe-fused", "lfm2", "granitehybrid"),
    *("gemma4-experts-fused-values-from-keys", "deepseek2-experts-groups", "kimi-linear-experts"),
)
"""Dense, mixtures, sinks, both recurrent kinds, convolutions, windows: what is left has their
kernels, which parity compares one by one."""
ON_OPENCL = (
    *ON_VULKAN,
    *("llama-8-experts", "phi3-long-rope", "olmo2-windows", "command-r", "qwen3-wide-heads"),
    *("qwen3next", "gemma3-untied-softcap-linear", "gemma4-shared-kv"),
    *(
        "gemma4-per-layer-embeddings", "deepseek2", "stablelm-head-norms", "gemma3n-shared-kv",
        "gpt2",
    ),
)  # fmt: skip
"""Every kind of rotation, norm and sharing; scales and other sizes of the same are left."""
TRACED = {
    "qwen35moe-fused": ("q4_k_m", F16), "qwen3next-fused-ssm-in": ("q5_1", Q8_0),
    "kimi-linear-experts-short-taps": ("q8_0", F32),
    "lfm2-untied-long-taps": ("q8_0", F32), "lfm2moe": ("q8_0", F16),
    "granitehybrid-experts": ("q8_0", F32), "gemma4-per-layer-embeddings": ("q4_k_m", F32),
    "gemma4-experts": ("mxfp4", F16), "gpt-oss-experts": ("mxfp4_moe", F16),
    "glm4moe-experts": ("q8_0", F16),
}  # fmt: skip
WORKLOAD = Workload(tuple(range(7, 48)), chunk=19, decode=3)
"""Two windows of 20 positions, pages of 16, chunks that line up with neither."""
GREEDY = tuple(Request(one.id, one.prompt, 3, ignore_end=True) for one in SHORT[:2])
"""For Vulkan: how tokens are sampled does not depend on the architecture."""
PICKED = {
    "qwen2": FAMILIES["qwen2"],
    "attends last": ATTENDS_LAST,
    "gemma4": FAMILIES["gemma4-per-layer-embeddings"],
}
"""Two tensors that rows are picked of, two of which one is normed again, three."""


def on(way: str, names: Iterable[str], mark: Any = (), unmarked: tuple[str, ...] = ()) -> list[Any]:
    """Parameters of ``way`` and ``name``, with that mark but for ``unmarked``."""
    return [
        pytest.param(way, name, id=f"{name}-{way}", marks=() if name in unmarked else mark)
        for name in names
    ]


def each_on(*cases: list[Any]) -> pytest.MarkDecorator:
    """A test of those cases."""
    values = [case for some in cases for case in some]
    return pytest.mark.parametrize(("way", "name"), values, indirect=["way"], scope="module")


def model_of(synthetic_model: SyntheticModel, name: str, way_name: str) -> tuple[Model, DType]:
    """The model of a row of MODELS, and the storage type of its pages."""
    quant, kv_dtype = MODELS[name]
    if way_name == VULKAN:
        quant = VULKAN_QUANTS.get(name, quant)
    return open_model(synthetic_model(quant=quant, **FAMILIES[name])), kv_dtype


@each_on(
    on(OPENCL, MODELS, pytest.mark.long, unmarked=ON_OPENCL),
    on(VULKAN, MODELS, pytest.mark.soak, unmarked=ON_VULKAN),
    on(METAL, MODELS, pytest.mark.soak),
    on(CUDA, MODELS),
)
def test_logits_and_tokens_are_the_cpu_tiers(tier, synthetic_model, name):
    """Mixed prefill and decode, greedy and sampled; on Vulkan of two greedy requests."""
    model, kv_dtype = model_of(synthetic_model, name, tier.info.name)
    compare(model, tier, kv_dtype, GREEDY if tier.info.name == VULKAN else SHORT)


def test_every_architecture_is_here():
    found = {FAMILIES[name]["architecture"] for name in MODELS}
    assert found == {fields["architecture"] for fields in FAMILIES.values()}


@each_on(
    on(OPENCL, [*ON_OPENCL, "attends last"], pytest.mark.long, (*ON_VULKAN, "attends last")),
    on(OPENCL, [name for name in MODELS if name not in ON_OPENCL], pytest.mark.soak),
    on(VULKAN, PICKED, pytest.mark.long, unmarked=("qwen2",)),
)
def test_steps_of_few_rows_are_the_definitions(tier, synthetic_model, name):
    """Rows are picked in the last layer: some, none, and those of the middle of a chunk."""
    quant, kv_dtype = MODELS.get(name, ("q4_k_m", F16))
    fields = PICKED.get(name) or FAMILIES[name]
    assert_definitions(open_model(synthetic_model(quant=quant, **fields)), tier, kv_dtype)


@each_on(
    on(OPENCL, TRACED),
    on(VULKAN, TRACED, pytest.mark.long, unmarked=("qwen3next-fused-ssm-in",)),
    on(METAL, TRACED, pytest.mark.soak, unmarked=("qwen35moe-fused",)),
    on(CUDA, TRACED),
)
def test_every_result_is_the_definitions(tier, synthetic_model, name):
    """Node by node, the states included, and once more as in production."""
    quant, kv_dtype = TRACED[name]
    model = open_model(synthetic_model(quant=quant, **FAMILIES[name]))
    tokens = WORKLOAD.tokens[:24] if tier.info.name == VULKAN else WORKLOAD.tokens
    workload = replace(WORKLOAD, tokens=tokens, kv_dtype=kv_dtype)
    with CpuTier(definitions_only=True) as oracle, CpuTier() as cpu:
        tiers = {"cpu": cpu, tier.info.name: tier}
        report = validate(model, oracle, tiers, workload)
    assert report.agrees, report.verdict
    assert report.steps == len(workload.steps())


@pytest.mark.parametrize(("architecture", "quant", "kv_dtype"), STORAGES, ids=str)
@pytest.mark.parametrize("way", [OPENCL], indirect=True, scope="module")
def test_every_storage(tier, synthetic_model, architecture, quant, kv_dtype):
    """Biases, head norms, tied embeddings, float and quantized weights, pages of three types."""
    path = synthetic_model(architecture=architecture, quant=quant)
    compare(open_model(path), tier, kv_dtype, SHORT)


@pytest.mark.parametrize("way", [OPENCL], indirect=True, scope="module")
def test_default_model_writes_the_cpu_tiers_tokens(tier, default_model):
    """Twenty greedy tokens of the default model, with all their logits."""
    prompt = tuple(default_model.tokenizer.encode("The sky is blue because"))
    request = (Request(1, prompt, 20),)
    with CpuTier() as cpu:
        expected = generate(default_model, cpu, request)
    assert_same(expected, generate(default_model, tier, request))
