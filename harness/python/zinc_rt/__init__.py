"""zinc-rt from Python: the same engine, and the same bits, as ``zinc-rt run`` and the server.

>>> from zinc_rt import LLM, SamplingParams
>>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
...     (answer,) = llm.chat("Why is the sky blue?", SamplingParams(max_tokens=8))
>>> len(answer.tokens)
8

See docs/python.md."""

import sys

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == __name__:
    # ``python -m zinc_rt`` loads this module first, and Ctrl-C would show a traceback of imports.
    from harness.interrupts import end_at_interrupt

    end_at_interrupt()

from typing import Any

from contract.errors import (
    CatalogError,
    ConfigError,
    DoesNotFit,
    ModelFileError,
    NonFiniteLogits,
    QueueFull,
    RequestError,
    TemplateError,
    TierError,
    UnsupportedModel,
    ZincError,
)
from harness.host.submissions import EngineStopped
from zinc_rt.llm import LLM
from zinc_rt.outputs import Completion, Logprob, Output, Piece, Score
from zinc_rt.parameters import SamplingParams
from zinc_rt.server import Server, serve
from zinc_rt.streams import Stream

__all__ = [
    "LLM",
    "CatalogError",
    "Completion",
    "ConfigError",
    "DoesNotFit",
    "EngineStopped",
    "Logprob",
    "ModelFileError",
    "NonFiniteLogits",
    "Output",
    "Piece",
    "QueueFull",
    "RequestError",
    "SamplingParams",
    "Score",
    "Server",
    "Stream",
    "TemplateError",
    "TierError",
    "UnsupportedModel",
    "ZincError",
    "serve",
]


def __getattr__(name: str) -> Any:
    """``__version__``, which is looked up only when someone asks for it."""
    if name != "__version__":
        raise AttributeError(f"module 'zinc_rt' has no attribute {name!r}")
    from importlib.metadata import version

    return version("zinc-rt")
