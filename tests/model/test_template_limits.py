"""A chat template is a stranger's program: its errors are one line, it stays in its sandbox and
within its limits, and what it is given makes sense."""

import errno
import os
import signal
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from contract.errors import PromptTooLong, RequestError, TemplateError, TemplateUnavailable
from reference import worker_process
from reference.model.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate, TemplateLimits
from reference.worker_process import WorkerEnded, WorkerProcess
from tests.model.rendering import TURNS, render
from tests.needs import machine_lacks
from tests.patience import wait_until
from tests.worker_forks import OF_USERS

TURN_OF_MODEL = "{{ messages[0].content }}{% if add_generation_prompt %}<model>{% endif %}"


@pytest.fixture(scope="module", autouse=True)
def workers_are_those_of_users():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "start_process", OF_USERS)
        yield


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n\n{% frobnicate %}", "line 3: .*frobnicate"),
        ("\n{{ raise_exception('no\n\nway') }}", "line 2: it refuses: no way"),
        ("a\nb{{ messages.x.y }}", "line 2: UndefinedError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        ("{{ raise_exception('x' * 100000) }}", r"x\.\.\.$"),
    ],
)
def test_a_failing_template_is_one_line_with_its_place(source, message):
    with pytest.raises(TemplateError, match=f"^m.gguf: chat template.*{message}") as caught:
        render(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "expression",
    [
        *("''.__class__.__mro__", "messages.__class__", "messages[0]['__class__'].x"),
        *("messages | map(attribute='__class__') | list", "'{0.__class__}'.format(messages)"),
        *("lipsum.__globals__", "raise_exception.__globals__", "strftime_now.__self__"),
        *("messages[0].role.strip.__func__.__globals__", "messages[0].role._trusted"),
        *("self.__init__.__globals__", "cycler.__init__.__globals__.os", "messages.append(1)"),
        *("messages[0].update({'role': 'x'})", "messages[0].parts.append(1)", "{}.update({1: 2})"),
        *("[].__class__", "[].append.__self__", "(messages | list)[0].parts.pop()"),
    ],
)
def test_a_template_cannot_leave_its_sandbox(expression):
    with pytest.raises(TemplateError, match=r"^m\.gguf: chat template"):
        render("{{ " + expression + " }}")


QUEUE = """\
{%- set queue = namespace(ids=[]) -%}
{%- macro calls(message) -%}
  {%- for id in message.ids -%}{%- set _ = queue.ids.append('call ' + id) -%}{%- endfor -%}
{%- endmacro -%}
{%- for message in messages -%}
  {{- calls(message) -}}
  {%- if queue.ids -%}{{- '<' + queue.ids.pop(0) + '>' -}}{%- endif -%}
{%- endfor -%}
{%- set last = messages[:1] -%}{%- set _ = last.append(1) -%}{%- set _ = last.reverse() -%}
{{- queue.ids | length }} {{ last | length }} {{ messages | length }}"""


def test_a_template_changes_the_lists_that_it_made():
    """A queue of ids, as Kimi K2's template has; each rendering begins with an empty one."""
    turns = [{"role": "user", "content": "", "ids": ["1", "2"]}, {"role": "user", "content": ""}]
    with ChatTemplate(QUEUE, source="m.gguf") as template:
        rendered = [template.render(turns) for _ in range(2)]
    assert [one.text for one in rendered] == ["<call 1><call 2>0 2 2"] * 2
    spans = [rendered[0].text[start:end] for start, end in rendered[0].template_spans]
    assert "".join(spans) == "<call ><call >  "


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LIMITS = TemplateLimits(cpu_seconds=0.5, memory_bytes=256 << 20, output_characters=1 << 16)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ENDLESS, "0.5 s"),
        ("{% set x = 9 ** (9 ** (8 + messages | length)) %}", "0.5 s"),
        ("{{ 'a' * 10000000000 }}", "memory"),
        ("{{ ([0] * 100000000) | length }}", "memory"),
        ("{% for a in range(99999) %}{{ 'x' * 100 }}{% endfor %}", "more than 65,536 characters"),
        ("{{ '%100000000d' % (messages | length) }}", "0.5 s|memory|characters"),
        ("{% for a in range(9999) %}{{ messages | tojson }}{% endfor %}", "characters"),
    ],
)
def test_a_template_cannot_use_more_than_its_limits(source, message):
    """And afterwards the same template object still answers."""
    source = "{% if messages[0].content == 'go' %}" + source + "{% endif %}ok"
    with ChatTemplate(source, source="m.gguf", limits=LIMITS) as template:
        with pytest.raises(TemplateError, match=message):
            template.render([{"role": "user", "content": "go"}])
        assert template.render(TURNS).text == "ok"


def test_a_conversation_longer_than_the_limit_is_no_fault_of_the_template():
    with ChatTemplate("{{ messages[0].content }}", source="m.gguf", limits=LIMITS) as template:
        with pytest.raises(PromptTooLong, match=r"is too long: 70,... bytes > 65536 maximum"):
            template.render([{"role": "user", "content": "go" * 35_000}])
        assert template.render(TURNS).text == TURNS[0]["content"]


@pytest.mark.parametrize(
    "source", [ENDLESS, "{{ 9 ** (9 ** (8 + messages | length)) }}"], ids=["loop", "power"]
)
def test_a_template_that_ends_its_worker_is_tried_once(source, monkeypatch):
    """Each form of messages that it might take would cost the whole limit again."""
    asked = []
    ask = WorkerProcess.ask
    monkeypatch.setattr(WorkerProcess, "ask", lambda *args: asked.append(1) or ask(*args))
    limits = TemplateLimits(cpu_seconds=0.2)
    with ChatTemplate(source, source="m.gguf", limits=limits) as template:
        for number in (1, 2):
            with pytest.raises(TemplateError, match=r"ran longer than 0\.2 s"):
                template.render(TURNS)
            assert len(asked) == number


def test_a_worker_that_was_killed_is_replaced():
    """At once if it was killed while nobody asked: no conversation fails for it."""
    with ChatTemplate("ok", source="m.gguf") as template:
        assert template.render(TURNS).text == "ok"
        first = template._worker.child
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: first.poll() is not None)
        assert template.render(TURNS).text == "ok"
        assert template._worker.child.pid != first.pid


def test_a_worker_that_is_killed_while_it_renders_is_replaced():
    """That conversation fails: its template may be the cause."""
    with ChatTemplate("ok", source="m.gguf") as template:
        template.start()
        first = template._worker.child
        os.kill(first.pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (first.pid, signal.SIGKILL)).start()
        with pytest.raises(TemplateError, match="was killed"):
            template.render(TURNS)
        assert template.render(TURNS).text == "ok"


def test_a_process_that_the_system_refuses_is_no_fault_of_the_template(monkeypatch):
    """What is learned of a template is not learned then: the next rendering asks again."""

    def refused(script: Path) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with ChatTemplate(TURN_OF_MODEL, source="m.gguf") as template:
        template.render(TURNS, add_generation_prompt=False)
        with monkeypatch.context() as patched:
            patched.setattr("reference.worker_process.start_process", refused)
            template._worker.close()
            said = r"m\.gguf: chat template: its process cannot be started .*; raise the limit"
            with pytest.raises(TemplateUnavailable, match=said):
                template._opening(False, None)
            with pytest.raises(TemplateUnavailable, match=said):
                template.start()
        assert template.render(TURNS).opening == "<model>"


@pytest.mark.parametrize("asks", ["", "not "])
def test_a_template_may_exceed_its_limits_on_what_it_is_tried_with(asks):
    """It renders other conversations, at its usual speed from the second one on."""
    probe = "messages | length == 1 and messages[0].content == 'hi'"
    source = f"{{% if {asks}add_generation_prompt and {probe} %}}{ENDLESS}"
    limits = TemplateLimits(cpu_seconds=0.2)
    with ChatTemplate(f"{source}{{% endif %}}ok", source="m.gguf", limits=limits) as template:
        turns = [{"role": "user", "content": "hello"}]
        rendered = [template.render(turns) for _ in range(2)]
        worker = template._worker.child
        rendered.append(template.render(turns))
        assert template._worker.child is worker
        assert [(one.text, one.opening) for one in rendered] == 3 * [("ok", "")]


def test_the_worker_ends_with_its_template():
    template = ChatTemplate("ok", source="m.gguf")
    template.start()
    worker = template._worker.child
    template.close()
    assert worker.returncode is not None
    other = ChatTemplate("ok", source="m.gguf")
    other.start()
    worker = other._worker.child
    del other
    assert worker.returncode is not None


def test_the_worker_inherits_no_secrets(monkeypatch):
    monkeypatch.setenv("ZINC_RT_SECRET", "hush")
    with ChatTemplate("ok", source="m.gguf") as template:
        template.render(TURNS)
        environ = f"/proc/{template._worker.child.pid}/environ"
        if not os.path.exists(environ):
            machine_lacks("/proc")
        with open(environ, "rb") as file:
            assert b"hush" not in file.read()


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages: "),
        (["hi"], r"messages\[0\]: "),
        ([{"content": "hi"}], r"messages\[0\].role: "),
        ([*TURNS, {"role": "<|im_end|>", "content": "hi"}], r"messages\[1\].role: "),
        ([{"role": ["user"], "content": "hi"}], r"messages\[0\].role: "),
        ([{"role": "user", "content": object()}], r"messages\[0\].content: expected a text"),
        ([{"role": "user"}], r"messages\[0\].content: expected a text"),
        ([*TURNS, {"role": "assistant"}], r"messages\[1\].content: expected a text"),
        ([{**TURNS[0], "name": object()}], "messages: cannot be written"),
    ],
)
def test_messages_that_make_no_sense(messages, field):
    with ChatTemplate("ok", source="m.gguf") as template, pytest.raises(RequestError, match=field):
        template.render(messages)


def test_a_template_that_is_too_long_is_refused():
    with pytest.raises(TemplateError, match="characters"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARACTERS + 1), source="m.gguf")


@pytest.mark.parametrize("length", [1, 1 << 20])
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import time; time.sleep(600)", "it did not answer in 0.2 s or was killed"),
        ("print('x' * 100); input()", "its reply is too long"),
        ("raise SystemExit(3)", "its process ended with status 3"),
    ],
)
def test_a_worker_that_does_not_do_its_part(tmp_path, script, says, length):
    """Also where it reads nothing of a line that is longer than a pipe holds."""
    path = tmp_path / "worker.py"
    path.write_text(script)
    seconds = 0.2 if "0.2" in says else 60.0
    worker = WorkerProcess(path, bytes, wall_seconds=seconds, cpu_seconds=1, longest_reply=10)
    with pytest.raises(WorkerEnded, match=says):
        worker.ask(b"x" * length + b"\n")
    assert worker.child is None


def test_a_script_is_compiled_once(tmp_path):
    """Each start of the program begins such a process: compiling took a twentieth of its time."""
    path = tmp_path / "worker.py"
    path.write_text("print(input())")
    worker = WorkerProcess(path, lambda: b"", wall_seconds=60.0, cpu_seconds=1, longest_reply=10)
    assert worker.ask(b"x\n") == b"x\n"
    worker.close()
    assert [file.suffix for file in (tmp_path / "__pycache__").iterdir()] == [".pyc"]
