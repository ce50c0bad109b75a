"""The project's tools as commands: ``zinc-rt synth`` is ``python -m harness.synth``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

TOOLS = {
    "synth": ("harness.synth.__main__", "write a small model file with random weights"),
    "validate": ("harness.validate.__main__", "compare tiers with the definitions, op by op"),
    "goldens": ("harness.goldens", "check the stored digests of a checkout"),
    "conformance": (
        "harness.conformance.__main__",
        "test a device with every case, or check the results",
    ),
    "replay": ("harness.replay", "do again what a trace recorded, and compare every result"),
    "sched-test": ("harness.sched_test", "play simulated schedules on the scheduler"),
    "mem-test": ("harness.mem_test", "play simulated schedules with too little memory"),
    "bench": ("harness.bench.__main__", "measure speed and memory, also of a server"),
}
"""Module and description of each tool by name; a module has ``main(argv, prog) -> exit code``."""


def add_parser(subparsers: Any) -> None:
    """List the tools in the help; ``run_named_tool`` handles their arguments."""
    for name, (_, text) in TOOLS.items():
        subparsers.add_parser(name, help=text, description=text, add_help=False)


def run_named_tool(words: Sequence[str]) -> int | None:
    """Run the tool that the first word names; None when it names none."""
    if not words or words[0] not in TOOLS:
        return None
    module = import_module(TOOLS[words[0]][0])
    code: int = module.main(words[1:], prog=f"zinc-rt {words[0]}")
    return code
