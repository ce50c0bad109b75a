"""Exported plans: the C library computes the bits of every other tier, for several sequences, any
order of steps and any page table, and what is in a plan can be read."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.native.c_library import FOLDER
from accel.native.plan_file import ABI
from contract.arithmetic import ARITHMETIC_VERSION, PAGE_TOKENS
from contract.dtypes import DEFAULT_KV
from contract.records import SAMPLING as SAMPLING_RECORD
from contract.types import SamplingParams
from harness.digest import file_digest, logits_digest
from harness.host.session import Session
from tests.families_table import EACH_KIND, FAMILIES
from tests.long_cases import long_except
from tests.native.c_plan import (
    CHUNK,
    CONTEXT,
    HEADER_TEXT,
    IN_FLIGHT,
    LAST_TOKEN,
    SAMPLING,
    SLOTS,
    THREADS,
    CPlan,
    exported,
    options,
    run,
)

PROMPT = list(range(5, 42))
COUNT = 12
GREEDY = SamplingParams()
SAMPLED = SamplingParams(
    temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repeat_penalty=1.3, seed=2**40 + 7
)
FIRST = {fields["architecture"]: name for name, fields in reversed(FAMILIES.items())}
ARCHITECTURES = sorted(FIRST.values())
"""The first variant of every architecture."""
QUANTS = {"gpt-oss-experts": "mxfp4_moe", "lfm2moe": "q4_k_m"}
"""Types of the weights that are not binary32."""


def expected(
    model: Path, tier: str, sampling: SamplingParams = GREEDY
) -> tuple[NDArray[np.float32], list[int]]:
    """The logits of PROMPT on a tier, and the COUNT tokens after it."""
    with Session.open(model, options(tier, slots=1)) as session:
        logits = np.empty((len(PROMPT), session.model.config.vocab), np.float32)
        session.logits(PROMPT, logits)
        generated = session.generate(PROMPT, sampling, COUNT)
        for _ in generated:
            pass
    return logits, [int(token) for token in generated.tokens]


def sampling_rows(sampling: SamplingParams, rows: int) -> NDArray[np.void]:
    """Equal sampling records of rows."""
    records = np.zeros(rows, SAMPLING)
    for name in SAMPLING.names or ():
        records[name] = getattr(sampling, name)
    return records


def prefilled(plan: CPlan, slot: int, prompt: list[int], chunk: int, **more: Any) -> Any:
    """The logits of a prompt in steps of ``chunk`` tokens, and the token after it."""
    vocab, first = plan.info().vocab, -1
    logits = np.full((len(prompt), vocab), np.nan, np.float32)
    for start in range(0, len(prompt), chunk):
        stop = min(start + chunk, len(prompt))
        part = [(prompt[at], slot, at) for at in range(start, stop)]
        rows = range(len(part))
        *_, first = plan.step(part, rows, logits=logits[start:stop], **more)
    return logits, first


@pytest.mark.parametrize("name", long_except(ARCHITECTURES, *EACH_KIND))
def test_every_architecture_decodes_without_python(name, synthetic_model, decode, tmp_path):
    """The C program prints the digest and the tokens of the processor's definition tier."""
    model = synthetic_model(**FAMILIES[name], quant=QUANTS.get(name, "f32"))
    logits, tokens = expected(model, "cpu")
    code, out, err = run(decode, exported(model, tmp_path), ",".join(map(str, PROMPT)), COUNT)
    assert (code, err) == (0, "")
    said = out.split()
    assert said[:2] == ["digest", logits_digest(logits)]
    # The session ends at an end-of-generation token, the C program does not.
    assert list(map(int, said[3:]))[: len(tokens)] == tokens
    assert len(said[3:]) == COUNT


def test_sequences_share_steps(plan, c_plan, tiny_model_path):
    """A greedy and a sampled one, in steps of both, as each has them alone."""
    c_plan.open(plan)
    alone = [expected(tiny_model_path, "cpu", sampling) for sampling in (GREEDY, SAMPLED)]
    for slot in range(SLOTS):
        got, _ = prefilled(c_plan, slot, PROMPT[:-1], CHUNK - slot)
        assert np.array_equal(got, alone[slot][0][:-1])
    records = np.concatenate([sampling_rows(sampling, 1) for sampling in (GREEDY, SAMPLED)])
    last, found = [PROMPT[-1]] * SLOTS, []
    for step in range(COUNT):
        at = len(PROMPT) - 1 + step
        tokens = [(last[slot], slot, at) for slot in range(SLOTS)]
        last = c_plan.step(tokens, range(SLOTS), sampling=records)
        found.append(last)
    for slot in range(SLOTS):
        ids = alone[slot][1]
        assert [both[slot] for both in found][: len(ids)] == ids
        assert len(ids) > 1


def test_steps_are_submitted_ahead(plan, c_plan, tiny_model_path):
    """A step refers to a token that the one before it samples."""
    _, tokens = expected(tiny_model_path, "cpu")
    c_plan.open(plan)
    prefilled(c_plan, 1, PROMPT[:-1], CHUNK)
    in_flight: list[int] = []
    found: dict[int, int] = {}
    for step in range(COUNT):
        if len(in_flight) == IN_FLIGHT:
            event = in_flight.pop(0)
            found[event] = c_plan.wait(event, 1)[0]
        token = LAST_TOKEN if step else PROMPT[-1]
        in_flight.append(c_plan.submit([(token, 1, len(PROMPT) - 1 + step)], [0]))
    for event in reversed(in_flight):
        found[event] = c_plan.wait(event, 1)[0]
    in_order = [token for _, token in sorted(found.items())]
    assert len(in_order) == COUNT
    assert in_order[: len(tokens)] == tokens


@pytest.mark.parametrize("chunk", [1, 3, CHUNK])
def test_any_chunk_and_page_table_give_the_same_bits(plan, c_plan, tiny_model_path, chunk):
    """Pages in another order, shared by two sequences that begin alike."""
    logits, _ = expected(tiny_model_path, "cpu")
    info = c_plan.open(plan).info()
    pages = np.arange(info.slots * info.slot_pages, dtype=np.int32)[::-1].copy()
    pages = pages.reshape(info.slots, -1)
    got, _ = prefilled(c_plan, 0, PROMPT, chunk, pages=pages)
    assert np.array_equal(got, logits)
    shared = PAGE_TOKENS * 2
    pages[1, :2] = pages[0, :2]
    rest = [(PROMPT[at], 1, at) for at in range(shared, len(PROMPT))]
    after = np.empty((len(rest), info.vocab), np.float32)
    c_plan.step(rest, range(len(rest)), pages=pages, logits=after)
    assert np.array_equal(after, logits[shared:])
    default, _ = prefilled(c_plan, 0, PROMPT, chunk)
    assert np.array_equal(default, logits)


def test_a_plan_says_what_it_is(plan, c_plan):
    """Sizes, digest, names; its buffers are those of the graph."""
    info = c_plan.open(plan).info()
    assert (info.abi, info.arithmetic) == (ABI, ARITHMETIC_VERSION)
    assert (info.slots, info.context, info.threads) == (SLOTS, CONTEXT, THREADS)
    assert (info.tokens, info.page_positions) == (CHUNK + SLOTS, PAGE_TOKENS)
    assert info.pages == info.slots * info.slot_pages == SLOTS * CONTEXT // PAGE_TOKENS
    assert info.kv_dtype.decode() == DEFAULT_KV.name
    assert re.fullmatch("[0-9a-f]{64}", info.digest.decode())
    buffers = c_plan.buffers()
    assert all(name for name in buffers)
    logits, writable = buffers["output.logits"]
    assert writable
    assert logits.nbytes == info.rows * info.vocab * 4
    assert not buffers["model.output_norm.weight"][1]
    c_plan.call("verify")


def test_memory_of_a_sequence_can_be_saved(plan, c_plan, tiny_model_path):
    """State that was copied out and back goes on with the same bits; other state does not."""
    logits, _ = expected(tiny_model_path, "cpu")
    c_plan.open(plan)
    half = CHUNK * 2
    prefilled(c_plan, 0, PROMPT[:half], CHUNK)
    states = {name: memory for name, (memory, writable) in c_plan.buffers().items() if writable}
    saved = {name: memory.copy() for name, memory in states.items()}
    prefilled(c_plan, 0, PROMPT[::-1], CHUNK)
    rest = [(PROMPT[at], 0, at) for at in range(half, half + CHUNK)]
    got = np.empty((CHUNK, c_plan.info().vocab), np.float32)
    c_plan.step(rest, range(CHUNK), logits=got)
    assert not np.array_equal(got, logits[half : half + CHUNK])
    for name, memory in states.items():
        memory[:] = saved[name]
    c_plan.step(rest, range(CHUNK), logits=got)
    assert np.array_equal(got, logits[half : half + CHUNK])


def test_exporting_again_gives_the_same_files(plan, tiny_model_path, tmp_path):
    """Nothing in them depends on addresses or on the time."""
    again = exported(tiny_model_path, tmp_path)
    for suffix in ("", ".weights"):
        paths = [path.with_name(path.name + suffix) for path in (plan, again)]
        assert file_digest(paths[0]) == file_digest(paths[1])


def test_texts_that_are_written_twice_agree():
    """Structures of the pool, and the numbers of the header."""
    pool = (FOLDER / "pool.c").read_text(encoding="utf-8")
    state = (FOLDER / "abi/state.h").read_text(encoding="utf-8")
    for name in ("COPY", "JOB"):
        structures = []
        for text, kinds in (
            (pool, {"ulong": 8, "uint": 4}),
            (state, {"uint64_t": 8, "uint32_t": 4}),
        ):
            found = re.search(r"typedef struct \{([^}]*)\} " + name + ";", text)
            assert found is not None
            members = re.findall(r"^\s*(\w+) (\w+);", found[1], re.MULTILINE)
            structures.append([(kinds[kind], member) for kind, member in members])
        assert structures[0] == structures[1] != []
    assert f"#define ZINC_RT_ABI {ABI} " in HEADER_TEXT
    step = (FOLDER / "abi/step.c").read_text(encoding="utf-8")
    found = re.search(r"typedef struct \{([^}]*)\} SAMPLING_RECORD;", step)
    assert found is not None
    members = re.findall(r"(\w+)(?=[,;])", found[1])
    assert tuple(members) == SAMPLING_RECORD.names
