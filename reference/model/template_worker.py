"""Renders chat templates in a separate process, where a hostile one can do no harm.

``chat_template`` runs this file as a script. It imports only the standard library and jinja2, so
that it starts fast. Standard input holds one JSON object per line: first the template, its trusted
variables and the limits, then one conversation per line. Standard output answers each conversation
with one line, either ``{"text", "template_spans"}`` or ``{"error", "line"}``.

Every character of the output is marked trusted if the template wrote it, and not if the
conversation did. Literals of the template are ``Text`` with trusted characters, data is plain
``str``, and the operations templates build prompts with (``+``, ``~``, slices, trim, split, join,
replace, macros) preserve the marks. Any other operation yields plain ``str``, which is untrusted.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_NAME = "<template>"
MAX_ERROR_CHARACTERS = 300
"""Longest error message in a reply, in characters."""


class Text(str):
    """A str that records which of its characters the template wrote.

    ``_trusted`` holds one byte per character: 1 for the template's, 0 for all others.
    """

    __slots__ = ("_trusted",)
    _trusted: bytes

    def __new__(cls, value: str = "", trusted: bytes | None = None) -> Text:
        text = super().__new__(cls, value)
        text._trusted = trusted_characters(value) if trusted is None else trusted
        return text

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: Any) -> str:
        return Text(super().__mul__(count), self._trusted * count)

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> str:
        trusted = self._trusted[key]
        if isinstance(trusted, int):
            trusted = bytes([trusted])
        return Text(super().__getitem__(key), trusted)

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> str:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> str:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        parts = super().split(sep, maxsplit)
        return parts if sep is None else self._cut(parts, len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        parts = super().rsplit(sep, maxsplit)
        return parts if sep is None else self._cut(parts, len(sep))

    def _cut(self, parts: list[str], gap: int) -> list[str]:
        found = []
        start = 0
        for part in parts:
            found.append(self[start : start + len(part)])
            start += len(part) + gap
        return found

    def join(self, items: Iterable[str]) -> str:
        items = list(items)
        trusted = self._trusted.join(map(trusted_characters, items))
        return Text(super().join(items), trusted)

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        if not old:
            return super().replace(old, new, count)
        return Text(new).join(self.split(old, count))

    def upper(self) -> str:
        return self._recased(super().upper())

    def lower(self) -> str:
        return self._recased(super().lower())

    def title(self) -> str:
        return self._recased(super().title())

    def capitalize(self) -> str:
        return self._recased(super().capitalize())

    def _recased(self, recased: str) -> str:
        return Text(recased, self._trusted) if len(recased) == len(self) else recased


def trusted_characters(value: str) -> bytes:
    """One byte per character of ``value``: 1 where the template wrote it."""
    return value._trusted if isinstance(value, Text) else bytes(len(value))


def literal(value: str) -> Text:
    """A Text whose characters are all trusted."""
    return Text(value, b"\1" * len(value))


def concat(pieces: Iterable[str]) -> Text:
    """Join the pieces and their marks. Jinja joins its output with this function."""
    pieces = list(pieces)
    return Text("".join(pieces), b"".join(map(trusted_characters, pieces)))


def _literal_source(value: object) -> str:
    """Python source of a template's constant in which every string is trusted."""
    if isinstance(value, str):
        return f"environment.literal({str(value)!r})"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal_source, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(_literal_source(item) + ', ' for item in value)})"
    if isinstance(value, dict):
        items = (f"{_literal_source(k)}: {_literal_source(v)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    return str(value) if isinstance(value, float) else repr(value)


class _TrustingCodeGenerator(CodeGenerator):
    """Generates code in which the template's strings are trusted and joins preserve the marks."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        self.write(_literal_source(node.as_const(frame.eval_ctx)))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _literal_source("".join(map(str, group)))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Generation(Extension):
    """``{% generation %}`` marks a model's answer for training; here it renders only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refused(Exception):
    """The template itself raised an error."""


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _TrustingCodeGenerator
    concat = staticmethod(concat)
    literal = staticmethod(literal)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # Jinja would return an undefined value, which prints as nothing.
        raise SecurityError(f"{attribute!r} of {type(obj).__name__} is out of bounds")


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return Text(d).join(map(str, value))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise _Refused(message)


def make_environment() -> jinja2.Environment:
    """The Jinja environment chat templates are written for: that of Hugging Face transformers."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.filters["join"] = _join
    environment.globals["raise_exception"] = _refuse
    return environment


class Renderer:
    """One template with its limits on output. The process itself limits time and memory."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._environment = make_environment()
        self._template: jinja2.Template | None = None

    def answer(self, conversation: dict[str, Any]) -> dict[str, Any]:
        """The reply to one conversation. It never raises, whatever the template does."""
        try:
            return self._render(conversation)
        except jinja2.TemplateSyntaxError as error:
            return {"error": _one_line(error.message or "syntax error"), "line": error.lineno}
        except _Refused as error:
            return {"error": f"it refuses: {_one_line(error)}", "line": _template_line(error)}
        except MemoryError:
            return {"error": "it needs too much memory", "line": None}
        except Exception as error:
            return {
                "error": _one_line(f"{type(error).__name__}: {error}"),
                "line": _template_line(error),
            }

    def _render(self, conversation: dict[str, Any]) -> dict[str, Any]:
        if self._template is None:
            code = self._environment.compile(self._setup["template"], filename=TEMPLATE_NAME)
            self._template = jinja2.Template.from_code(
                self._environment, code, self._environment.make_globals(None)
            )
        now = datetime.fromisoformat(conversation.pop("now"))
        variables = {
            **conversation,
            **{name: literal(text) for name, text in self._setup["variables"].items()},
            "strftime_now": now.strftime,
        }
        for message in variables["messages"]:
            message["role"] = literal(message["role"])
        limit = self._setup["output_characters"]
        pieces = []
        size = 0
        for piece in self._template.generate(variables):
            size += len(piece)
            if size > limit:
                return {"error": f"it writes more than {limit:,} characters", "line": None}
            pieces.append(piece)
        text = concat(pieces)
        spans = [match.span() for match in re.finditer(rb"\x01+", trusted_characters(text))]
        return {"text": text, "template_spans": spans}


def _one_line(message: object) -> str:
    line = " ".join(str(message)[: 4 * MAX_ERROR_CHARACTERS].split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else line[: MAX_ERROR_CHARACTERS - 3] + "..."


def _template_line(error: BaseException) -> int | None:
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__, limit=-50)
        if frame.filename == TEMPLATE_NAME
    ]
    return lines[-1] if lines else None


def _limit_memory(size: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, ValueError, OSError):
        # Not every system can limit memory; time and output stay limited.
        return


def _cpu_timer() -> Callable[[float], object]:
    """Return a function that ends the process after so many seconds of CPU time; 0 disarms it."""
    if hasattr(signal, "setitimer"):
        return lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)
    return lambda seconds: None


def main() -> None:
    """Serve render requests, one JSON line each, until standard input ends."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    setup = json.loads(requests.readline())
    _limit_memory(setup["memory_bytes"])
    arm = _cpu_timer()
    renderer = Renderer(setup)
    for line in requests:
        conversation = json.loads(line)
        arm(setup["cpu_seconds"])
        reply = renderer.answer(conversation)
        arm(0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
