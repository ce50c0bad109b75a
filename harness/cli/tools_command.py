"""The project's tools as commands: ``zinc-rt synth`` is ``python -m harness.synth``."""

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
"""Module and description of each tool by name; a module has ``main(argv, prog) -> exit code``."""


def add_parser(subparsers: Any) -> None:
    """List the tools in the help; ``run_tool`` handles their arguments."""
    for name, (_, text) in TOOLS.items():
        subparsers.add_parser(name, help=text, description=text, add_help=False)


def run_tool(words: Sequence[str]) -> int | None:
    """Run the tool that the first word names; None when it names none."""
    if not words or words[0] not in TOOLS:
        return None
    module = import_module(TOOLS[words[0]][0])
    code: int = module.main(words[1:], prog=f"zinc-rt {words[0]}")
    return code
