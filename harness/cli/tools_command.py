"""The project's own tools under one name: ``zinc-rt synth`` is ``python -m harness.synth``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

TOOLS = {
    "synth": ("harness.synth.__main__", "write a model file with random weights"),
    "validate": ("harness.validate.__main__", "compare tiers with the reference, op by op"),
    "goldens": ("harness.goldens", "check or update the stored digests"),
    "conformance": (
        "harness.conformance.__main__",
        "run the must-pass list on a device, or verify a package",
    ),
    "bench": ("harness.bench.__main__", "measure speed and memory"),
}
"""Module and description by name; each module has ``main(argv) -> exit code``."""


def add_parser(subparsers: Any) -> None:
    """List the tools among the commands. Their words never get here: see ``run_tool``."""
    for name, (_, text) in TOOLS.items():
        subparsers.add_parser(name, help=text, description=text, add_help=False)


def run_tool(words: Sequence[str]) -> int | None:
    """Hand the command line to the tool its first word names, None when that is no tool."""
    if not words or words[0] not in TOOLS:
        return None
    module = import_module(TOOLS[words[0]][0])
    code: int = module.main(words[1:])
    return code
