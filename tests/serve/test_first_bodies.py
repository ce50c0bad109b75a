"""The first bodies of a server come together: msgspec reads a type at its first use, and not safely
for a second thread."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

from msgspec import Struct

import harness
from harness.serve.wire import decode
from tests.forked import in_a_fork

THREADS, TYPES, PARTS = 8, 20, 30


def nested_type() -> type[Any]:
    """A type of a body that nobody has used yet, with types in it."""
    own = {"__module__": __name__}
    parts = [type(f"P{n}", (Struct,), own | {"__annotations__": {"a": int}}) for n in range(PARTS)]
    fields = {f"x{n}": part for n, part in enumerate(parts)}
    return type("Body", (Struct,), own | {"__annotations__": fields})


def use_types_at_once() -> int:
    """The number of bodies that many threads read, of types that none of them has read before."""
    sys.setswitchinterval(1e-6)
    value, read = json.dumps({f"x{n}": {"a": n} for n in range(PARTS)}).encode(), 0
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(TYPES):
            kind, begin = nested_type(), Barrier(THREADS)

            def use(_: int, kind: type[Any] = kind, begin: Barrier = begin) -> int:
                begin.wait()
                return int(decode(value, kind, []).x1.a)

            read += sum(threads.map(use, range(THREADS)))
    return read


def test_bodies_that_come_together_are_read():
    """The process ended, by a segmentation fault."""
    assert in_a_fork(use_types_at_once) == THREADS * TYPES


def test_every_type_is_known_before_it_is_used():
    """Whatever msgspec reads as a type, it is by ``known_type``."""
    call = re.compile(r"msgspec\.(convert|json\.decode|inspect\.type_info)\((?:[^()]|\(.*?\))*\)")
    sources = Path(harness.__file__).parent.rglob("*.py")
    uses = [found[0] for path in sources for found in call.finditer(path.read_text())]
    typed = [use for use in uses if "json.decode" not in use or "type=" in use]
    assert len(typed) >= 6
    assert [use for use in typed if "known_type(" not in use] == []
