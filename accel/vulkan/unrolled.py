"""Unrolls loops, inlines functions, and turns elements of arrays into values, with spirv-opt.

Drivers may ignore ``[[unroll]]``, and then put an array that a loop indexes into memory, with a
load or store for each use.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from accel.vulkan.compiler import OPTIMIZER, run

VALUES = (
    "--scalar-replacement=0",
    "--eliminate-local-single-block",
    "--eliminate-local-single-store",
    "--ssa-rewrite",
    "--simplify-instructions",
    "--ccp",
    "--eliminate-dead-branches",
    "--eliminate-dead-code-aggressive",
)
"""Passes that turn variables into values and remove code that constants make unreachable."""
PASSES = (
    "--merge-return",
    "--inline-entry-points-exhaustive",
    "--eliminate-dead-functions",
    *VALUES,
    *("--loop-unroll", *VALUES),
    *("--loop-unroll", *VALUES),
)
"""Loops are unrolled twice: an outer loop after its inner ones, and once its counter is known to be
constant."""


class OptimizerError(Exception):
    """spirv-opt rejected a module; the message is its log."""


def unrolled(code: bytes, environment: str) -> bytes:
    """An exact module with all loops unrolled that request it.

    NoContraction keeps float operations unchanged; where one is duplicated, the caller decorates
    the copies.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.spv"), Path(folder, "unrolled.spv")
        source.write_bytes(code)
        arguments = [f"--target-env={environment}", *PASSES, str(source), "-o", str(target)]
        done = run(OPTIMIZER, arguments)
        if done.returncode:
            raise OptimizerError(done.stderr.strip())
        return target.read_bytes()
