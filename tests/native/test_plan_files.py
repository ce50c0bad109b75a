"""Files of plans that are wrong, missing or changed: each gets a code and a text, through ctypes
and in C, and nothing crashes."""

import ctypes
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.native.plan_file import HEADER, WEIGHTS_HEADER_BYTES
from accel.native.variants import VARIANTS, machine
from tests.native.c_plan import CODES, LAST_TOKEN, Refused, changed, compiled, exported, run


def weights_of(plan: Path) -> Path:
    return plan.with_name(f"{plan.name}.weights")


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def header_of(path: Path) -> Any:
    return np.frombuffer(path.read_bytes(), HEADER, 1)[0]


OTHER = "aarch64" if machine() == "x86_64" else "x86_64"


DAMAGES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "a folder": ("FILE", "no regular file", lambda p: (p.unlink(), p.mkdir())),
    "no file": ("FILE", "No such file", lambda p: p.unlink()),
    "empty": ("DAMAGED", "no plan", lambda p: p.write_bytes(b"")),
    "a text": ("DAMAGED", "no plan", lambda p: p.write_bytes(b"plan" * 4000)),
    "half": ("DAMAGED", "bytes", lambda p: rewritten(p, lambda d: d[: len(d) // 2])),
    "a byte less": ("DAMAGED", "bytes", lambda p: rewritten(p, lambda d: d[:-1])),
    "a byte more": ("DAMAGED", "bytes", lambda p: rewritten(p, lambda d: d + b"\0")),
    "header alone": ("DAMAGED", "bytes", lambda p: rewritten(p, lambda d: d[: HEADER.itemsize])),
    "a packet's bit": (
        "DAMAGED",
        "digest",
        lambda p: rewritten(p, lambda d: d[:-40] + bytes([d[-40] ^ 1]) + d[-39:]),
    ),
    "another ABI": ("VERSION", "version 2", lambda p: rewritten(p, lambda d: changed(d, abi=2))),
    "another variant": (
        "PROCESSOR",
        "newest",
        lambda p: rewritten(p, lambda d: changed(d, needs=[[1 << 63] * 5], variant="newest")),
    ),
    "another architecture": (
        "PROCESSOR",
        OTHER,
        lambda p: rewritten(p, lambda d: changed(d, machine=OTHER, variant=OTHER)),
    ),
    "other kernels": (
        "KERNELS",
        "export it again",
        lambda p: rewritten(p, lambda d: changed(d, kernels_digest="0123")),
    ),
    "no kernels": (
        "KERNELS",
        "cannot load",
        lambda p: rewritten(p, lambda d: changed(d, kernels="none.so")),
    ),
    "kernels elsewhere": (
        "DAMAGED",
        "kernels",
        lambda p: rewritten(p, lambda d: changed(d, kernels="../evil.so")),
    ),
    "no weights": ("FILE", "No such file", lambda p: weights_of(p).unlink()),
    "weights of another model": (
        "MODEL",
        "another model",
        lambda p: rewritten(weights_of(p), lambda d: d[:24] + bytes(32) + d[56:]),
    ),
    "other weights": ("DAMAGED", "no weights file", lambda p: weights_of(p).write_bytes(b"w" * 99)),
    "empty weights": ("DAMAGED", "no weights file", lambda p: weights_of(p).write_bytes(b"")),
    "half of the weights": (
        "DAMAGED",
        "expects",
        lambda p: rewritten(weights_of(p), lambda d: d[: len(d) // 2]),
    ),
    "weights of another ABI": (
        "VERSION",
        "version 9",
        lambda p: rewritten(weights_of(p), lambda d: d[:8] + b"\x09" + d[9:]),
    ),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_files_that_are_wrong(damage, files, c_plan, decode, decode_sanitized):
    """A code and a text through ctypes and from the C program; the plan stays closed."""
    name, text, apply = DAMAGES[damage]
    kernels = Path(c_plan.library._name).parent
    c_plan.open(files).close()
    apply(files)
    with pytest.raises(Refused, match=text) as refused:
        c_plan.open(files)
    assert refused.value.name == name
    with pytest.raises(Refused, match="not open") as closed:
        c_plan.info()
    assert closed.value.name == "CLOSED"
    for program in (decode, decode_sanitized):
        code, out, err = run(program, files, "1,2", 2, kernels)
        assert (code, out) == (CODES[name], ""), err
        assert re.fullmatch(rf"decode: {name.lower()}: .*{text}.*\n", err)


def test_the_weights_of_another_plan_are_refused(plan, synthetic_model, c_plan, tmp_path):
    """A file of weights of the same shape belongs to one plan alone."""
    other = exported(synthetic_model(architecture="qwen3", quant="q4_k_m", seed=5), tmp_path)
    with pytest.raises(Refused, match=f"{other.name}.weights is of another model") as refused:
        c_plan.open(plan, weights=weights_of(other))
    assert refused.value.name == "MODEL"
    c_plan.open(plan, weights=weights_of(plan))


def test_files_may_be_deleted_while_a_plan_is_open(files, c_plan):
    """Its steps have the same bits; it cannot be opened again."""
    c_plan.open(files)
    before = c_plan.step([(7, 0, 0)], [0])
    files.unlink()
    weights_of(files).unlink()
    assert c_plan.step([(7, 0, 0)], [0]) == before
    c_plan.call("verify")
    c_plan.close()
    with pytest.raises(Refused, match="No such file"):
        c_plan.open(files)


def test_memory_that_is_not_there(plan, c_plan):
    """Whichever allocation fails, all others are freed, and the text says what it was for."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    held: dict[int, int] = {}
    allowed = 0

    def allocate(_: object, nbytes: int) -> int | None:
        nonlocal allowed
        allowed -= 1
        if allowed < 0:
            return None
        address = int(libc.malloc(nbytes))
        held[address] = nbytes
        return address

    def release(_: object, address: int, nbytes: int) -> None:
        assert held.pop(address) == nbytes
        libc.free(address)

    def refusal(most: int) -> Refused | None:
        nonlocal allowed
        allowed = most
        try:
            c_plan.open(plan, allocate=allocate, release=release)
        except Refused as refused:
            return refused
        return None

    texts, count = set(), 0
    while (refused := refusal(count)) is not None:
        assert refused.name == "MEMORY"
        assert not held
        texts.add(refused.text)
        count += 1
    assert len(held) == count > 10
    assert any("bytes of state.kv[0]" in text for text in texts)
    assert any("of scratch" in text for text in texts)
    c_plan.step([(1, 0, 0)], [0])
    c_plan.close()
    assert not held


def test_a_logit_that_is_not_finite(files, c_plan):
    """Weights that changed after the export: the row's token is -1, and verify finds it."""
    c_plan.open(files)
    broken = c_plan.buffers()["model.output_norm.weight"][0].copy()
    c_plan.close()
    content = weights_of(files).read_bytes()
    start = content.index(broken.tobytes(), WEIGHTS_HEADER_BYTES)
    nan = np.full(broken.nbytes // 4, np.nan, np.float32).tobytes()
    weights_of(files).write_bytes(content[:start] + nan + content[start + len(nan) :])
    c_plan.open(files)
    event = c_plan.submit([(1, 0, 0)], [0])
    with pytest.raises(Refused, match="row 0 is NaN or infinite") as refused:
        c_plan.wait(event, 1)
    assert refused.value.name == "NOT_FINITE"
    c_plan.submit([(LAST_TOKEN, 0, 1)])
    with pytest.raises(Refused, match="their digest differs"):
        c_plan.call("verify")


FAKE = """
int zinc_open(unsigned workers) { (void)workers; return 0; }
"""


KERNELS = """
#include <stdint.h>
static int pool;
void *zinc_open(uint32_t workers) { (void)workers; return OPENED; }
void zinc_close(void *pool) { (void)pool; }
uint32_t zinc_submit(void *pool, const void *job) { (void)pool; (void)job; return 1; }
int zinc_wait(void *pool, uint32_t number, uint64_t limit) {
    (void)pool; (void)number; (void)limit; return 0;
}
int unused(void) { return pool; }
"""


def fake_kernels(plan: Path, folder: Path, text: str) -> Path:
    """A folder with a kernel library of this text."""
    source = folder / "kernels.c"
    source.write_text(text)
    compiled(folder / header_of(plan)["kernels"].decode(), [source], "-shared", "-fPIC")
    return folder


def test_a_library_that_has_no_kernels(plan, c_plan, tmp_path):
    """A file of the right name that is another library, and one that cannot start threads."""
    with pytest.raises(Refused, match="is no kernel library") as other:
        c_plan.open(plan, kernels=fake_kernels(plan, tmp_path, FAKE))
    assert other.value.name == "KERNELS"
    (tmp_path / "threads").mkdir()
    folder = fake_kernels(plan, tmp_path / "threads", KERNELS.replace("OPENED", "0"))
    with pytest.raises(Refused, match="cannot start 2 threads") as threads:
        c_plan.open(plan, kernels=folder)
    assert threads.value.name == "THREADS"


def test_a_step_that_does_not_end(plan, c_plan, tmp_path):
    """Waiting ends after the time that the caller gave; the event stays open."""
    folder = fake_kernels(plan, tmp_path, KERNELS.replace("OPENED", "&pool"))
    c_plan.open(plan, kernels=folder)
    event = c_plan.submit([(1, 0, 0)], [0])
    for nanoseconds in (0, 1000, 0):
        with pytest.raises(Refused, match=f"step {event} has not ended") as refused:
            c_plan.wait(event, 1, nanoseconds)
        assert refused.value.name == "TIMEOUT"


def mutations(plan: bytes, count: int, seed: int) -> list[bytes]:
    """Random bytes, plans with flipped bits, and plans whose digest fits after the change."""
    draw = random.Random(seed)
    tables = int(np.frombuffer(plan, HEADER, 1)[0]["buckets_offset"]) + 200
    made = []
    for number in range(count):
        data = bytearray(plan)
        kind = number % 4
        if kind == 0:
            data = bytearray(draw.randbytes(draw.randrange(2 * HEADER.itemsize)))
            data[:8] = plan[: min(8, len(data))]
        for _ in range(0 if kind == 0 else draw.choice((1, 1, 4))):
            at = draw.randrange(tables if draw.random() < 0.7 else len(data))
            data[at] = draw.randrange(256) if kind == 1 else data[at] ^ 1 << draw.randrange(8)
        if kind == 3:
            at = draw.randrange(tables // 4) * 4
            word = draw.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
            data[at : at + 4] = word.to_bytes(4, "little")
        made.append(changed(bytes(data)) if kind >= 2 else bytes(data))
    return made


def test_no_plan_crashes_the_reader(plan, c_library, open_plans, tmp_path):
    """Each is refused or opened and closed, with all memory freed and sanitizers silent."""
    paths = []
    for number, data in enumerate(mutations(plan.read_bytes(), 120, 1)):
        path = tmp_path / f"{number}.plan"
        path.write_bytes(data)
        paths.append(path)
    shutil.copyfile(weights_of(plan), tmp_path / weights_of(plan).name)
    paths.append(plan)
    code, out, err = run(open_plans, c_library.parent, 1 << 26, *paths)
    assert (code, err) == (0, "")
    said = [line.split("\t") for line in out.splitlines()]
    assert len(said) == len(paths)
    assert said[-1] == ["ok", ""]
    assert all((name == "ok") != bool(text) for name, text in said)
    assert {name for name, _ in said} >= {"ok", "damaged", "version"}


def test_a_variant_of_every_processor_is_checked(plan):
    """What a plan needs of the processor is what its variant needs, which no variant lacks."""
    header = header_of(plan)
    variant = next(v for v in VARIANTS if v.name == header["variant"].decode())
    needs = [int(word) for word in header["needs"]]
    assert variant.runs_on(needs)
    for word, bit in variant.needs:
        without = [value & ~(1 << bit) if i == word else value for i, value in enumerate(needs)]
        assert not variant.runs_on(without)
