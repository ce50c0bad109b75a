"""Renders chat templates in a separate process, where a hostile one can do no harm.

``chat_template`` runs this file as a script. It imports little, so that it starts fast. Standard
input holds one JSON object per line: first the templates, their trusted variables and the limits,
then one conversation per line, behind its number and a space. Standard output answers each
conversation with one line: the number, a space and either ``{"text", "template_spans"}`` or
``{"error", "line", "summary", "refused"}``.

Every character of the output is marked trusted if the template wrote it, and not if the
conversation did (``template_text``)."""

from __future__ import annotations

import json
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_title, make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from reference.model.template_text import (
    Text,
    Untracked,
    brace_formatted,
    concat,
    literal,
    trusted_characters,
    untrusted,
    written_with,
)

TEMPLATE_NAME = "<template>"
LIST_CHANGES = frozenset(("append", "clear", "extend", "insert", "pop", "remove", "reverse"))
"""What a template may do to a list that it made."""
MAX_ERROR_CHARACTERS = 300
"""Longest error message in a reply, in characters."""


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

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's own, except that a template may change the lists that it made itself, such as
        Kimi K2's queue of the ids of calls. They end with the rendering."""
        own = type(obj) is list and attr in LIST_CHANGES
        return own or super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # Jinja would return an undefined value, which prints as nothing.
        raise SecurityError(f"{attribute!r} of {type(obj).__name__} is out of bounds")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """As Jinja's, but formatting a Text keeps the marks of its characters."""
        wrapped = super().wrap_str_format(value)
        form = getattr(value, "__self__", None)
        if wrapped is None or not isinstance(form, Text):
            return wrapped
        formatter = SandboxedFormatter(self)
        by_name = value.__name__ == "format_map"

        def tracked(*args: Any, **kwargs: Any) -> str:
            if by_name:
                wrapped(*args, **kwargs)
                return brace_formatted(formatter, form, (), args[0])
            return brace_formatted(formatter, form, args, kwargs)

        return tracked


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return Text(d).join(map(str, value))


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """As Jinja's ``indent``, but the marks are kept."""
    margin = Text(width) if isinstance(width, str) else literal(" " * width)
    first_line, *lines = (Text(s) + "\n").splitlines()
    shifted = [margin + line if line or blank else line for line in lines]
    whole = literal("\n").join([first_line, *shifted])
    return margin + whole if first else whole


def _unchanged(value: Any) -> Any:
    """Nothing is escaped here, so that nothing needs to be marked as safe."""
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    write = partial(
        json.dumps,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return written_with(write, value)


def _title(s: str) -> str:
    """As Jinja's ``title``, but the marks are kept if no character was added or removed."""
    titled = do_title(s)
    return Text(titled, trusted_characters(s)) if len(titled) == len(s) else titled


def _wordwrap(s: str, *args: Any, **kwargs: Any) -> str:
    raise Untracked("'wordwrap' is not supported")


def _refuse(message: str) -> None:
    raise _Refused(message)


def make_environment() -> jinja2.Environment:
    """The Jinja environment chat templates are written for: that of Hugging Face transformers."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["join"] = _join
    environment.filters["indent"] = _indent
    environment.filters["safe"] = _unchanged
    environment.filters["title"] = _title
    environment.filters["wordwrap"] = _wordwrap
    environment.globals["raise_exception"] = _refuse
    return environment


class Renderer:
    """One template with its limits on output. The process itself limits time and memory."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._environment = make_environment()
        self._templates: dict[str, jinja2.Template] = {}

    def answer(self, conversation: dict[str, Any]) -> dict[str, Any]:
        """The reply to one conversation. It never raises, whatever the template does."""
        try:
            return self._render(conversation)
        except jinja2.TemplateSyntaxError as error:
            problem = f"syntax error: {_one_line(error.message or 'unknown')}"
            return _failed(problem, error.lineno)
        except _Refused as error:
            return _failed(
                f"it refuses: {_one_line(error)}", _template_line(error), refused=_one_line(error)
            )
        except MemoryError:
            return _failed("it needs too much memory", None)
        except Exception as error:
            kind = type(error).__name__
            return _failed(_one_line(f"{kind}: {error}"), _template_line(error), summary=kind)

    def _template(self, name: str) -> jinja2.Template:
        template = self._templates.get(name)
        if template is None:
            source = self._setup["templates"][name]
            code = self._environment.compile(source, filename=TEMPLATE_NAME)
            template = self._templates[name] = jinja2.Template.from_code(
                self._environment, code, self._environment.make_globals(None)
            )
        return template

    def _render(self, conversation: dict[str, Any]) -> dict[str, Any]:
        template = self._template(conversation.pop("template"))
        now = datetime.fromisoformat(conversation.pop("now"))
        variables = {
            "tools": None,
            "documents": None,
            **untrusted(conversation),
            **{name: literal(text) for name, text in self._setup["variables"].items()},
            "strftime_now": now.strftime,
        }
        for message in variables["messages"]:
            message["role"] = literal(message["role"])
        limit = self._setup["output_characters"]
        pieces = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            if size > limit:
                return _failed(f"it writes more than {limit:,} characters", None) | {
                    "longer": limit
                }
            pieces.append(piece)
        text = concat(pieces)
        spans = [match.span() for match in re.finditer(rb"\x01+", trusted_characters(text))]
        return {"text": text, "template_spans": spans}


def _failed(
    error: str, line: int | None, *, summary: str | None = None, refused: str | None = None
) -> dict[str, Any]:
    """The reply to a conversation that was not rendered.

    ``summary`` is ``error`` without any text of a conversation. ``refused`` is the message with
    which the template itself refused the conversation."""
    return {"error": error, "line": line, "summary": summary or error, "refused": refused}


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
    """Return a function that sets the CPU seconds after which the process ends; 0 disarms it."""
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
        number, _, asked = line.partition(b" ")
        conversation = json.loads(asked)
        arm(setup["cpu_seconds"])
        reply = renderer.answer(conversation)
        arm(0)
        replies.write(b"%b %b\n" % (number, json.dumps(reply).encode()))
        replies.flush()


if __name__ == "__main__":
    main()
