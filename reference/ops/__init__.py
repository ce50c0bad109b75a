"""The numpy definition of each opcode: a module and a function of the opcode's lower-case name.

A function takes operands and parameters by keyword, changes the operands the table marks as
updated, and returns the others it writes: one array, or a tuple in the table's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from contract.opcodes import Opcode
from contract.ops import TABLE

Definition = Callable[..., Any]


def _definition(opcode: Opcode) -> Definition | None:
    name = TABLE[opcode].name
    if find_spec(f"{__name__}.{name}") is None:
        return None
    function: Definition = getattr(import_module(f"{__name__}.{name}"), name)
    return function


DEFINITIONS: Mapping[Opcode, Definition] = {
    opcode: definition for opcode in Opcode if (definition := _definition(opcode)) is not None
}
"""The definition of every opcode that has one."""
