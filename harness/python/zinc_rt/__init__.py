"""zinc-rt from Python: the same engine, and the same bits, as ``zinc-rt run`` and the server.

>>> from zinc_rt import LLM, SamplingParams
>>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
...     first, second = llm.generate(["One", "Two"], SamplingParams(max_tokens=8))
>>> len(first.tokens)
8

See docs/python.md.
"""

from contract.errors import ConfigError, ModelFileError, RequestError, ZincError
from zinc_rt.llm import LLM
from zinc_rt.outputs import Completion, Output, Piece
from zinc_rt.parameters import SamplingParams
from zinc_rt.server import Server, serve
from zinc_rt.streams import Stream

__all__ = [
    "LLM",
    "Completion",
    "ConfigError",
    "ModelFileError",
    "Output",
    "Piece",
    "RequestError",
    "SamplingParams",
    "Server",
    "Stream",
    "ZincError",
    "serve",
]
