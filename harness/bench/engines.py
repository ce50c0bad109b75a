"""The measured engines behind one interface: greedy decoding of fixed lengths."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from contract.errors import ConfigError
from contract.extras import install_command
from contract.lazy_dataclass import dataclass
from contract.types import Request, SamplingParams
from harness.startup import load_ahead

PEER = "llama.cpp"
PEER_PACKAGE = "llama-cpp-python"
BUILD_PEER_FOR_GPU = (
    "CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall --no-cache-dir"
    f" --no-binary {PEER_PACKAGE} {PEER_PACKAGE}"
)
ADAPTED_TIERS = ("native", "opencl")
"""Tiers that choose their number of workers by measuring."""
CHUNK_TOKENS = 512
"""Most prompt tokens per step of the peer; a tier has its own limit."""
GREEDY = SamplingParams(repeat_last_n=0)
CONTEXT_UNIT = 256
"""The peer rounds the context of each of several sequences up to a multiple of this."""
GGML_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "i12": 1, "i4r": 2, "i3r": 2}
"""The peer's type number for keys and values; it has nothing between f16 and q8_0, and
q4_0 is nearest to i4r and i3r."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings an engine is opened with, equal for all engines except those of the peer.

    ``context`` is per sequence; only the peer takes several ``sequences``."""

    model: str
    threads: int
    context: int
    kv_dtype: str
    flash_attention: bool = False
    """Whether the peer computes attention with its flash attention."""
    sequences: int = 1
    peer_gpu: bool = False
    """Whether the peer puts the whole model on a graphics card, or nothing."""
    device: str = ""
    """The device of a tier, as ``TierOptions`` has it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds until the first token is chosen, and seconds for the ``decode_tokens`` after it."""

    prefill_seconds: float
    decode_seconds: float


class BenchEngine(Protocol):
    """An engine with a loaded model."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""

    def generate(self, prompt: Sequence[int], decode_tokens: int) -> Timing:
        """Clear all state, compute ``prompt``, then ``decode_tokens`` more steps."""


def open_engine(name: str, setup: Setup) -> BenchEngine:
    """Open a tier by its name, or the peer. Raises ConfigError when the peer is not installed.

    ``native:2`` is that tier with two workers per step, instead of the fastest number."""
    return PeerEngine(setup) if name == PEER else TierEngine(name, setup)


def peer_version() -> str:
    """The peer's package and its version. Raises ConfigError when it is not installed."""
    # This module takes longer to load than the rest of the standard library a worker needs.
    import importlib.metadata

    try:
        return f"{PEER_PACKAGE} {importlib.metadata.version(PEER_PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{PEER} is not installed; run {install_command('peer')}") from None


def fixed_workers(name: str) -> int | None:
    """The number of workers in an engine's name. Raises ConfigError for an invalid one."""
    tier, colon, workers = name.partition(":")
    if not colon:
        return None
    if tier not in ADAPTED_TIERS or not workers.isdecimal() or int(workers) < 1:
        names = " and ".join(f"{adapted}:N" for adapted in ADAPTED_TIERS)
        raise ConfigError(f"--tiers: {name!r}: only {names} have a fixed number of workers")
    return int(workers)


def check_peer() -> None:
    """Raise ConfigError when the peer cannot be imported."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise ConfigError(f"{PEER} is not installed; run {install_command('peer')}")


def peer_flash_choices(kv_dtype: str) -> tuple[bool, ...]:
    """The peer's choices of flash attention that support ``kv_dtype``: quantized values need it."""
    return (True,) if kv_dtype in ("q8_0", "i4r", "i3r") else (False, True)


class TierEngine:
    """This runtime on one tier; see ``open_engine`` for the names."""

    def __init__(self, name: str, setup: Setup) -> None:
        tier = name.partition(":")[0]
        load_ahead(tier)
        # Imported here, so that the peer's start is not charged for loading them.
        from harness.host.options import SessionOptions
        from harness.host.session import Session
        from harness.tiers import TierOptions

        options = SessionOptions(
            tier=tier,
            tier_options=TierOptions(setup.threads, setup.device, fixed_workers(name)),
            context=setup.context,
            kv_dtype=setup.kv_dtype,
            prefix_cache=False,
        )
        self._session = Session.open(Path(setup.model), options)
        self._requests = 0

    def encode(self, text: str) -> list[int]:
        return self._session.model.tokenizer.encode(text)

    def close(self) -> None:
        """Free the model and the tier."""
        self._session.close()

    def generate(self, prompt: Sequence[int], decode_tokens: int) -> Timing:
        engine = self._session.engine
        self._requests += 1
        started = time.perf_counter()
        tokens = decode_tokens + 1
        engine.submit(Request(self._requests, tuple(prompt), tokens, GREEDY, ignore_end=True))
        while not engine.step():
            pass
        first = time.perf_counter()
        while not engine.idle:
            engine.step()
        return Timing(first - started, time.perf_counter() - first)


class PeerEngine:
    """llama.cpp through the C functions of its Python binding. Raises ConfigError when it shall use
    a graphics card but was built without support for one."""

    def __init__(self, setup: Setup) -> None:
        check_peer()
        import llama_cpp
        import numpy

        if setup.peer_gpu and not llama_cpp.llama_supports_gpu_offload():
            raise ConfigError(
                f"--peer-gpu: {PEER} as installed was built for no graphics card; "
                f"for NVIDIA's: {BUILD_PEER_FOR_GPU}"
            )
        self._api: Any = llama_cpp
        self._numpy = numpy
        self._llama = llama_cpp.Llama(
            setup.model,
            n_ctx=setup.context,
            n_batch=CHUNK_TOKENS,
            n_ubatch=CHUNK_TOKENS,
            n_threads=setup.threads,
            n_threads_batch=setup.threads,
            n_gpu_layers=-1 if setup.peer_gpu else 0,
            offload_kqv=setup.peer_gpu,
            op_offload=setup.peer_gpu,
            type_k=GGML_TYPES[setup.kv_dtype],
            type_v=GGML_TYPES[setup.kv_dtype],
            flash_attn=setup.flash_attention,
            verbose=False,
        )
        self._vocab = self._llama.n_vocab()
        self._context = self._llama.ctx if setup.sequences == 1 else self._shared_context(setup)
        self._batch = llama_cpp.llama_batch_init(CHUNK_TOKENS, 0, 1)

    def encode(self, text: str) -> list[int]:
        return list(self._llama.tokenize(text.encode()))

    def generate(self, prompt: Sequence[int], decode_tokens: int) -> Timing:
        started = time.perf_counter()
        self._forget()
        for start in range(0, len(prompt), CHUNK_TOKENS):
            token = self._step(prompt[start : start + CHUNK_TOKENS])
        first = time.perf_counter()
        for _ in range(decode_tokens):
            token = self._step([token])
        return Timing(first - started, time.perf_counter() - first)

    def generate_together(self, prompts: Sequence[Sequence[int]], decode_tokens: int) -> Timing:
        """Like ``generate``, with one sequence per prompt: after the prompts, all sequences share
        every step."""
        started = time.perf_counter()
        self._forget()
        tokens = []
        for sequence, prompt in enumerate(prompts):
            for start in range(0, len(prompt), CHUNK_TOKENS):
                part = prompt[start : start + CHUNK_TOKENS]
                entries = [(token, sequence, start + i) for i, token in enumerate(part)]
                (following,) = self._step_of(entries, [len(part) - 1])
            tokens.append(following)
        first = time.perf_counter()
        rows = range(len(prompts))
        for step in range(decode_tokens):
            entries = [(tokens[row], row, len(prompts[row]) + step) for row in rows]
            tokens = self._step_of(entries, rows)
        return Timing(first - started, time.perf_counter() - first)

    def _shared_context(self, setup: Setup) -> Any:
        """A context of ``setup.sequences`` sequences, each with its own memory."""
        params = self._llama.context_params
        each = -(-setup.context // CONTEXT_UNIT) * CONTEXT_UNIT
        params.n_ctx = each * setup.sequences
        params.n_batch = params.n_ubatch = CHUNK_TOKENS
        params.n_seq_max = params.n_outputs_max = setup.sequences
        context = self._api.llama_init_from_model(self._llama.model, params)
        if not context:
            raise ConfigError(f"{PEER} has no context for {setup.sequences} sequences")
        return context

    def _forget(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _step(self, tokens: Sequence[int]) -> int:
        """Compute ``tokens`` after the cached ones; returns the most likely next token."""
        array = (self._api.llama_token * len(tokens))(*tokens)
        self._decode(self._api.llama_batch_get_one(array, len(tokens)))
        return self._likeliest(-1)

    def _step_of(self, entries: Sequence[tuple[int, int, int]], rows: Sequence[int]) -> list[int]:
        """Compute tokens given as (id, sequence, position); returns the most likely next tokens of
        ``rows``."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, sequence, position) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = index in rows
        self._decode(batch)
        return [self._likeliest(row) for row in rows]

    def _decode(self, batch: Any) -> None:
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise ConfigError(
                f"{PEER} could not compute a step of {batch.n_tokens} tokens ({status})"
            )

    def _likeliest(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(self._numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())
