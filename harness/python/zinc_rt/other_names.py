"""Answers those who call methods, arguments and attributes by the names of vLLM and
llama-cpp-python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from harness.other_programs import advice

Call = TypeVar("Call", bound=Callable[..., Any])


def refuse_attribute(owner: object, name: str) -> NoReturn:
    """Raise AttributeError for a missing attribute of ``owner``, with its name here if there is
    one."""
    known = advice("attributes")
    here = f"; here it is {known[name]}" if name in known else ""
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{here}")


def refuse_unknown_arguments(call: Call) -> Call:
    """The method, with a TypeError for unknown arguments that gives their name here."""
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*others: Any, **given: Any) -> Any:
        for name in given:
            if name not in known:
                here = advice("arguments")
                hint = f"; {here[name]}" if name in here else ""
                raise TypeError(f"{call.__name__} has no argument {name!r}{hint}")
        return call(*others, **given)

    return cast(Call, checked)
