"""The conformance cases, and what each of them checks.

A case id is a path: ``parity/...`` compares one opcode with its definition, ``validate/...`` every
op of a model, ``goldens/...`` logits with their stored digests, ``tier/...`` checks what the tier
claims."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from contract.arithmetic import ARITHMETIC_VERSION
from contract.dtypes import F16, F32, I3R, I4R, I12, Q8_0, DType
from contract.ops import TABLE
from contract.tier import Tier
from harness import goldens
from harness.golden_specs import SYNTHETIC_SPECS
from harness.parity.cases import Case, all_cases
from harness.parity.execute import compare, run_barrier
from harness.synth.sizes import sized_spec
from harness.synth.spec import SynthSpec
from harness.synth.write import write_synthetic
from harness.tiers import SIMULATED, TierOptions, open_tier
from harness.validate import Workload, validate
from reference.cpu.tier import CpuTier
from reference.model.open import open_model
from reference.ops import DEFINITIONS

Finding = dict[str, Any]
"""One fault found, as plain JSON types."""
Check = Callable[[Tier], list[Finding]]
"""Runs a case on an open tier; an empty list is a pass."""

DEFAULT_MODEL_CASE = "goldens/default_model"
"""Runs if the default model is on disk; it is not in the list, since it needs a download."""

VALIDATED: Mapping[str, tuple[SynthSpec, DType]] = {
    "validate/llama-q4_k_m-kv_f16": (SynthSpec("llama", "q4_k_m", seed=11), F16),
    "validate/llama-q4_1-kv_i12": (SynthSpec("llama", "q4_1", seed=12, tied=False), I12),
    "validate/qwen3-q4_k_m-kv_i4r": (
        SynthSpec("qwen3", "q4_k_m", seed=18, head_dim=96, key_outliers=8.0),
        I4R,
    ),
    "validate/llama-q4_0-kv_i3r": (SynthSpec("llama", "q4_0", seed=19), I3R),
    "validate/qwen2-q8_0-kv_f32": (SynthSpec("qwen2", "q8_0", seed=13, fused_qkv=True), F32),
    "validate/llama-q5_1-kv_q8_0": (SynthSpec("llama", "q5_1", seed=15), Q8_0),
    "validate/qwen3-q6_k-kv_f16": (SynthSpec("qwen3", "q6_k", seed=14, head_dim=48), F16),
    "validate/qwen35moe-q4_k_m-kv_f16": (
        sized_spec(
            "tiny", architecture="qwen35moe", quant="q4_k_m", seed=16, recurrent={"value_heads": 6}
        ),
        F16,
    ),
    "validate/gemma4-q4_k_m-kv_f32": (
        sized_spec(
            "tiny",
            architecture="gemma4",
            quant="q4_k_m",
            seed=17,
            layers=6,
            experts={"width": 256},
            gemma={"window": 9, "shared_kv_layers": 2, "per_layer_width": 64},
        ),
        F32,
    ),
}
VALIDATE_CHUNK = 11
"""Tokens of a prefill step: neither a power of two nor a divisor of the prompt."""


def known_cases(default_model: Path | None = None) -> dict[str, Check]:
    """Every case of this source by id, in running order. If ``default_model``, the default model's
    file, is given, its goldens are a case too."""
    cases: dict[str, Check] = {
        "tier/arithmetic": check_arithmetic,
        "tier/opcodes": check_opcodes,
        "parity/barrier": check_barrier,
    }
    cases |= {f"parity/{case}": partial(check_parity, case) for case in all_cases()}
    cases |= {
        name: partial(check_model, spec, kv_dtype) for name, (spec, kv_dtype) in VALIDATED.items()
    }
    cases |= {synthetic_id(spec): partial(check_synthetic, spec) for spec in SYNTHETIC_SPECS}
    if default_model is not None:
        cases[DEFAULT_MODEL_CASE] = partial(check_default_model, default_model)
    return cases


def synthetic_id(spec: SynthSpec) -> str:
    """The case id of one synthetic golden."""
    return f"goldens/{spec.architecture}-{spec.quant}-{spec.seed}"


def check_arithmetic(tier: Tier) -> list[Finding]:
    """Check that the tier claims this source's version of the arithmetic."""
    requested = f"exact-{ARITHMETIC_VERSION}"
    found = tier.info.arithmetic
    return [] if found == requested else [{"note": f"arithmetic is {found}, must be {requested}"}]


def check_opcodes(tier: Tier) -> list[Finding]:
    """Check that the tier has a kernel for every opcode that has a definition."""
    missing = [TABLE[opcode].name for opcode in sorted(set(DEFINITIONS) - tier.info.opcodes)]
    return [{"note": f"no kernel for {', '.join(missing)}"}] if missing else []


def check_barrier(tier: Tier) -> list[Finding]:
    """Check that BARRIER, the only opcode without operands, runs."""
    run_barrier(tier)
    return []


def check_parity(case: Case, tier: Tier) -> list[Finding]:
    """Check every bit of every result of one opcode."""
    found = compare(tier, case)
    return [{"operand": name, **asdict(problem)} for name, problem in found.items()]


def check_model(spec: SynthSpec, kv_dtype: DType, tier: Tier) -> list[Finding]:
    """Check every op of a random-weight model, traced and as in production."""
    tokens = goldens.synthetic_tokens(spec)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_synthetic(path, spec)
        model = open_model(path)
        try:
            with CpuTier(definitions_only=True) as oracle:
                workload = Workload(tokens, VALIDATE_CHUNK, kv_dtype=kv_dtype)
                report = validate(model, oracle, {tier.info.name: tier}, workload)
        finally:
            model.close()
    return [divergence.as_dict() for divergence in report.divergences.values()]


def check_synthetic(spec: SynthSpec, tier: Tier) -> list[Finding]:
    """Check the stored digests of one random-weight model's file, graph and logits."""
    stored, problems = goldens.load_golden(goldens.FOLDER / goldens.SYNTHETIC)
    entries = [
        entry
        for entry in stored["models"]
        if (entry["spec"]["architecture"], entry["spec"]["quant"], entry["spec"]["seed"])
        == (spec.architecture, spec.quant, spec.seed)
    ]
    if not entries:
        problems.append(f"{spec.name}: is not stored; run python -m harness.goldens update")
    for entry in entries:
        problems += goldens.check_synthetic_model(entry, tier)
    return [{"note": problem} for problem in problems]


def check_default_model(path: Path, tier: Tier) -> list[Finding]:
    """Check the default model's logits against their stored digests. The check closes the tier."""
    simulated = tier.info.device.endswith(f"({SIMULATED})")
    own = open_tier(tier.info.name, TierOptions(device=SIMULATED if simulated else ""))
    return [{"note": text} for text in goldens.check_default_model(goldens.FOLDER, path, own)]
