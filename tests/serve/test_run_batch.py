"""``zinc-rt run-batch``: the server's answers to a file of requests, and files that are kept."""

import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.cli.batch_command import _Written
from harness.cli.main import main
from harness.progress import Progress
from harness.serve import batch_lines
from harness.serve.batch_lines import Batch, BatchAnswer, BatchRequest, read_batch
from harness.serve.verify import CACHE_READ, CACHE_WRITTEN, FROM_CACHE
from tests.full_disk import largest_file
from tests.refused_processes import refuse_processes

Json = dict[str, Any]
GREEDY = {"temperature": 0, "max_tokens": 6}
HELLO = [{"role": "user", "content": "hello"}]
ASKED: Sequence[tuple[str, Json]] = (
    ("/v1/chat/completions", {"messages": HELLO, "seed": 3, "n": 2, "max_tokens": 9}),
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **GREEDY}),
    ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 1, **GREEDY}),
    ("/v1/embeddings", {"input": ["hello", "you"]}),
    ("/v1/score", {"input": "hello you", "top": 2}),
    ("/v1/messages", {"messages": HELLO, "model": "tiny", **GREEDY}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 5, "temperature": 0}),
    ("/completion", {"prompt": "abc", "n_predict": 4, "temperature": 0, "seed": 1}),
)
REFUSED: Sequence[tuple[str, Json]] = (
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/completions", {"prompt": "a", "max_tokns": 1}),
    ("/v1/completions", {"prompt": "a", "model": "other"}),
    ("/v1/embeddings", {"input": []}),
    ("/v1/messages", {"messages": HELLO, "model": "tiny"}),
)
OF_ONE_ANSWER = ("id", "id_slot", "created", "created_at", "completed_at", "timings", "x_zinc")


def line(custom_id: str, url: str = "/v1/completions", body: object = None) -> str:
    body = {"prompt": custom_id, "seed": 1, **GREEDY} if body is None else body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def batch(tmp_path, tiny_model_path, capsys, monkeypatch) -> Run:
    """``batch(*flags)``: answers ``in.jsonl`` in ``out.jsonl``; exit code and standard error."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> tuple[int, str]:
        words = ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", str(tiny_model_path)]
        code = main([*words, "--tier", "cpu", "--context", "128", "--slots", "2", *flags])
        printed = capsys.readouterr()
        assert not printed.out
        return code, printed.err

    return run


def written(path: str = "out.jsonl") -> list[Json]:
    return [json.loads(text) for text in Path(path).read_text().splitlines()]


def ids(path: str = "out.jsonl") -> list[str]:
    return [one["custom_id"] for one in written(path)]


def test_the_answers_are_those_of_the_server(http, batch):
    """Of every route that generates or reads, errors too, in the order of the requests."""
    asked = [*ASKED, *REFUSED]
    lines = [line(f"r{number}", *each) for number, each in enumerate(asked)]
    Path("in.jsonl").write_text("\ufeff" + "\n\n".join(lines))
    sampling = ("--temperature", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    code, said = batch("--alias", "tiny", *sampling)
    assert code == 1
    assert f"{len(ASKED)} answers; refused: " in said
    assert ids() == [f"r{number}" for number in range(len(asked))]
    for (url, body), found in zip(asked, written(), strict=True):
        there = http.post(url, body)
        assert (found["response"]["status_code"], found["error"]) == (there.status, None)
        here = found["response"]["body"]
        assert here.keys() == there.json.keys()
        for name in here.keys() - {"model", *OF_ONE_ANSWER}:
            assert _plain(here[name]) == _plain(there.json[name]), (url, name)


def _plain(value: object) -> object:
    """A part of an answer without what depends on the moment, or on the server's other sizes."""
    if isinstance(value, str):
        return re.sub("this server has '.*'", "", value)
    if isinstance(value, dict):
        left_out = ("id", "generation_settings", "id_slot", *FROM_CACHE, CACHE_READ, CACHE_WRITTEN)
        return {k: _plain(v) for k, v in value.items() if k not in left_out}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def test_an_earlier_run_is_continued(batch):
    """Whole lines stay; a cut line, and a request that was refused, are computed; the order is
    that of the requests."""
    lines = [line("a"), line("b", body={"prompt": "b", "model": "gpt", **GREEDY}), line("c")]
    Path("in.jsonl").write_text("\n".join([*lines, line("d")]))
    code, said = batch()
    assert code == 1
    assert "3 answers; refused: 1 model_not_found, see out.jsonl" in said
    assert "--alias '*' --resume" in said
    a, b, c, d = Path("out.jsonl").read_text().splitlines()
    Path("out.jsonl").write_text("\n".join((c, a, b, d[:40])))
    code, said = batch("--resume", "--alias", "*")
    assert (code, ids()) == (0, ["a", "b", "c", "d"])
    now = Path("out.jsonl").read_text().splitlines()
    assert (now[0], now[2]) == (a, c)
    assert [one["response"]["status_code"] for one in written()] == [200] * 4
    assert now[3] != d
    kept = Path("out.jsonl").read_bytes()
    assert batch("--resume")[0] == 0
    assert Path("out.jsonl").read_bytes() == kept


def test_refused_lines_have_a_file_of_their_own(batch):
    Path("in.jsonl").write_text("\n".join([line("a"), line("b", body={"prompt": 3}), line("c")]))
    code, said = batch("--error-file", "errors.jsonl")
    assert (code, ids(), ids("errors.jsonl")) == (1, ["a", "c"], ["b"])
    assert "errors.jsonl" in said
    Path("in.jsonl").write_text("\n".join([line("a"), line("b"), line("c")]))
    assert batch("--error-file", "errors.jsonl", "--resume")[0] == 0
    assert (ids(), ids("errors.jsonl")) == (["a", "b", "c"], [])


def test_where_no_process_starts_it_ends_and_says_why(batch, monkeypatch):
    """After some tries, since processes of others may end; what was answered is kept."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}}}
    chat = line("b", "/v1/chat/completions", {"messages": HELLO, "response_format": form, **GREEDY})
    Path("in.jsonl").write_text("\n".join([line("a"), chat]))
    refused = refuse_processes(monkeypatch, "grammar_worker.py")
    monkeypatch.setattr(batch_lines, "START_TRIES", 2)
    code, said = batch("--slots", "1")
    assert code == 2
    assert "its process cannot be started (" in said.splitlines()[-1]
    assert ids() == ["a"]
    assert "1 of 2 answers are written; --resume goes on" in said
    assert len(refused) >= 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "in.jsonl: has no requests"),
        (f"{line('a')}\n{line('b')}\n{line('a')}", "line 3: custom_id 'a' is that of line 1"),
        ("[1, 2]", "line 1: Expected `object`, got `array`"),
        ('{"messages": []}', "has no field `custom_id`; a line is such as {"),
        ("what?", "line 1: is no JSON object"),
        (line("a")[:50], "line 1: is no JSON object"),
        (line(""), "custom_id is empty"),
        (line("a", "/v1/chat"), "url is '/v1/chat', not one of /v1/chat/completions"),
        (line("a").replace("POST", "GET"), "method is 'GET', not POST"),
        (line("a", body={"prompt": "x" * (8 << 20)}), "the body has more than 8,388,608 bytes"),
    ],
    ids=range(10),
)
def test_a_file_of_other_lines_is_refused(batch, text, problem):
    """Before the model is opened, and before a file of answers is begun."""
    Path("in.jsonl").write_text(text)
    code, said = batch()
    assert code == 2
    assert problem in said
    assert not Path("out.jsonl").exists()


def test_requests_that_can_be_read_once_are_refused(batch, tmp_path):
    """They are checked first, and nothing would be left to answer."""
    os.mkfifo("pipe")
    for name in ("pipe", ".", "/dev/null"):
        assert f"{name}: is no file" in batch("-i", name)[1]
    assert "none: cannot read: No such file" in batch("-i", "none")[1]


def test_files_of_others_stay(batch, tmp_path):
    """A file of answers is not replaced, and not mixed with other requests."""
    Path("in.jsonl").write_text(line("a"))
    assert "in.jsonl is read or written, too" in batch("-o", "in.jsonl")[1]
    assert "/dev/full is no file" in batch("-o", "/dev/full", "--resume")[1]
    answer = '{"custom_id": "z", "response": {"status_code": 200}}\n'
    for there, problem in (
        (answer, "answers 'z', which is not"),
        ("notes\n", "is no answer"),
        ("notes without an end", "is no answer"),
    ):
        Path("out.jsonl").write_text(there)
        assert "out.jsonl is there; --resume goes on with it" in batch()[1]
        assert f"out.jsonl: line 1 {problem}" in batch("--resume")[1]
        assert Path("out.jsonl").read_text() == there
    Path("out.jsonl").write_text("")
    with Path("out.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "out.jsonl is written by another process" in batch()[1]
    assert batch()[0] == 0
    assert ids() == ["a"]


def test_a_file_that_a_process_replaced_as_it_ended_is_not_written(batch, monkeypatch):
    """What is written to the one before would be lost."""
    Path("in.jsonl").write_text(line("a"))
    flock = fcntl.flock

    def replace(file: Any, how: int) -> None:
        os.replace("new.jsonl", "out.jsonl")
        flock(file, how)

    for resume in ((), ("--resume",)):
        Path("new.jsonl").write_text("")
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", replace)
            code, told = batch(*resume)
        assert (code, "out.jsonl is written by another process" in told) == (2, True)
    assert batch()[0] == 0


def test_a_file_that_is_removed_as_it_is_opened_is_not_written(batch, monkeypatch):
    Path("in.jsonl").write_text(line("a"))
    monkeypatch.setattr(fcntl, "flock", lambda file, how: os.unlink("out.jsonl"))
    code, told = batch()
    assert (code, "out.jsonl is written by another process" in told) == (2, True)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_takes_answers(number, batch, monkeypatch):
    def refuse(file: Any, how: int) -> None:
        raise OSError(number, os.strerror(number))

    Path("in.jsonl").write_text(line("a"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert batch()[0] == 0
    assert ids() == ["a"]


def test_a_file_of_answers_stays_where_and_whose_it_is(batch):
    """A link to a file that nobody else may read, whose lines are put in order."""
    Path("in.jsonl").write_text("\n".join(map(line, "abc")))
    Path("kept.jsonl").touch(0o600)
    Path("out.jsonl").symlink_to("kept.jsonl")
    assert batch()[0] == 0
    a, b, c = Path("out.jsonl").read_text().splitlines()
    Path("out.jsonl").write_text("\n".join((c, a, b[:9])))
    assert batch("--resume")[0] == 0
    assert ids("kept.jsonl") == ["a", "b", "c"]
    assert Path("out.jsonl").is_symlink()
    assert Path("kept.jsonl").stat().st_mode & 0o777 == 0o600


def test_requests_that_are_added_meanwhile_are_not_answered(batch, monkeypatch):
    Path("in.jsonl").write_text(line("a"))
    begin = _Written.begin

    def growing(self: _Written, progress: Progress) -> None:
        with Path("in.jsonl").open("a") as file:
            file.write(f"\n{line('b')}")
        begin(self, progress)

    monkeypatch.setattr(_Written, "begin", growing)
    assert (batch()[0], ids()) == (0, ["a"])


def test_a_full_disk_ends_the_batch_and_loses_nothing(batch):
    """Lines that were written are whole, and the rest is computed later."""
    names = [f"r{number}" for number in range(8)]
    body = {"prompt": "a", "logprobs": 20, "max_tokens": 60, "ignore_eos": True}
    Path("in.jsonl").write_text("\n".join(line(name, body=body) for name in names))
    assert batch()[0] == 0
    whole = Path("out.jsonl").stat().st_size
    Path("out.jsonl").unlink()
    with largest_file(whole // 2):
        code, said = batch()
    assert code == 1
    assert "out.jsonl: cannot write: File too large" in said
    assert "of 8 answers are written; --resume goes on" in said
    kept = Path("out.jsonl").read_bytes()
    assert kept.endswith(b"\n")
    assert 0 < len(ids()) < 8
    assert batch("--resume")[0] == 0
    assert ids() == names
    assert set(kept.splitlines()) <= set(Path("out.jsonl").read_bytes().splitlines())


def test_ctrl_c_ends_the_batch_and_loses_nothing(batch, monkeypatch):
    names = [f"r{number}" for number in range(9)]
    Path("in.jsonl").write_text("\n".join(map(line, names)))
    add = _Written.add

    def interrupted(self: _Written, request: BatchRequest, answer: BatchAnswer) -> None:
        add(self, request, answer)
        if self.done == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Written, "add", interrupted)
        code, said = batch()
    assert code == 130
    assert "of 9 answers are written; --resume goes on" in said
    kept = set(Path("out.jsonl").read_bytes().splitlines())
    assert 3 <= len(kept) < 9
    assert batch("--resume")[0] == 0
    assert ids() == names
    assert kept <= set(Path("out.jsonl").read_bytes().splitlines())


def test_requests_under_way_end_with_the_batch(server, tmp_path):
    """The engine works for nobody afterwards."""
    path, service = tmp_path / "in.jsonl", server.service
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
    path.write_text("\n".join(line(f"r{number}", body=body) for number in range(3)))

    def asked() -> Iterator[BatchRequest]:
        yield from read_batch(path, 1 << 20)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Batch(service).run(asked(), lambda request, answer: None)
    now = service.model.driver.call(lambda engine: engine.statistics)
    assert (now.running, now.waiting) == (0, 0)


def test_a_full_queue_is_waited_for(serve, tmp_path):
    """Requests with more choices than fit in the queue together are no error of the batch."""
    path, found = tmp_path / "in.jsonl", []
    body = {"prompt": "a", "n": 5, "max_tokens": 3}
    path.write_text("\n".join(line(f"r{number}", body=body) for number in range(12)))
    with serve(queue_depth=6, slots=2) as running:
        batch = Batch(running.service)
        batch.run(read_batch(path, 1 << 20), lambda request, answer: found.append(answer))
    assert [answer.refused for answer in found] == [None] * 12
