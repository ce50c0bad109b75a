"""Loops written out, functions put where they are called, and elements of arrays as values.

Drivers may take no notice of ``[[unroll]]``, and then put an array whose elements are chosen by a
loop into memory, a load or store for each use.
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
"""Variables become values, and what follows from constants is no code."""
PASSES = (
    "--merge-return",
    "--inline-entry-points-exhaustive",
    "--eliminate-dead-functions",
    *VALUES,
    *("--loop-unroll", *VALUES),
    *("--loop-unroll", *VALUES),
)
"""A loop around others is written out when they are, and where its counter is known to be one."""


class OptimizerError(Exception):
    """spirv-opt rejected a module; the message is its log."""


def unrolled(code: bytes, environment: str) -> bytes:
    """An exact module with all loops written out that ask for it. NoContraction keeps operations of
    floats as they are; where one is written several times, the caller marks the others."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.spv"), Path(folder, "unrolled.spv")
        source.write_bytes(code)
        arguments = [f"--target-env={environment}", *PASSES, str(source), "-o", str(target)]
        done = run(OPTIMIZER, arguments)
        if done.returncode:
            raise OptimizerError(done.stderr.strip())
        return target.read_bytes()
