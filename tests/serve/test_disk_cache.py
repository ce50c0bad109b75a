"""A server that is restarted tells what came from disk."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from harness.host import disk as disk_module
from harness.serve.run import Running
from reference.memory import row_copies
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.python.conftest import CONTEXT
from tests.serve.conftest import wait_for_rest
from tests.serve.engine_child import flush_disk
from tests.serve.http import Http, bearer
from tests.serve.tenants import write_tenants
from tests.serve.test_process import process
from zinc_rt import LLM, SamplingParams

PROMPT = "The quick brown fox jumps over the lazy dog and comes back again. " * 2
BODY = {"prompt": PROMPT, "max_tokens": 6, "seed": 5, "logits_digest": True}


def ask(http: Http, key: str = "") -> dict[str, Any]:
    return http.post("/v1/completions", BODY, **(bearer(key) if key else {})).answer


def digest(answer: dict[str, Any]) -> Any:
    return answer["choices"][0]["text"], answer["x_zinc"]["logits_sha256"]


def metric(http: Http, name: str) -> float:
    found = re.search(rf"^zinc_rt:{name}\S* (\S+)$", http.get("/metrics").body.decode(), re.M)
    assert found is not None, name
    return float(found[1])


def flush(server: Running) -> None:
    """Wait for what was computed to be on disk."""
    driver = server.service.model.driver
    wait_until(lambda: driver.call(flush_disk) > 0)


@pytest.mark.parametrize("pages", [1, 1 << 20])
def test_an_answer_says_what_came_from_disk(serve, tmp_path, pages, monkeypatch):
    """Also where more pages are on disk than are read before it has a slot."""
    monkeypatch.setattr(disk_module, "READ_BYTES", pages)
    monkeypatch.setattr(row_copies, "BLOCK_ROWS", min(pages, row_copies.BLOCK_ROWS))
    with serve() as plain:
        expected = ask(Http(plain.url))
        assert "disk_cache" not in Http(plain.url).get("/health").json
        assert b"disk_cache" not in Http(plain.url).get("/metrics").body
    with serve(disk_cache=tmp_path) as first:
        http = Http(first.url)
        answer = ask(http)
        assert answer["x_zinc"]["cached"] == {"tokens": 0}
        assert digest(answer) == digest(expected)
        flush(first)
    with serve(disk_cache=tmp_path) as second:
        http = Http(second.url)
        answer = ask(http)
        tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert tokens >= len(PROMPT) // 3 // 16 * 16 > 0
        assert answer["x_zinc"]["cached"] == {"tokens": tokens, "from_disk": tokens}
        assert digest(answer) == digest(expected)
        again = ask(http)["x_zinc"]["cached"]
        assert again.keys() == {"tokens"}, "now it is in memory"
        assert again["tokens"] >= tokens
        wait_for_rest(second)
        health = http.get("/health").json["disk_cache"]
        assert health["tokens"] == metric(http, "disk_cache_hits_total") == tokens
        assert health["read_bytes"] == metric(http, "disk_cache_read_bytes_total") > 0
        assert health["ignored"] == metric(http, "disk_cache_ignored_total") == 0
        assert health["problem"] == ""


def test_a_damaged_file_is_counted_where_operators_look(serve, tmp_path):
    with serve(disk_cache=tmp_path) as first:
        expected = ask(Http(first.url))
        flush(first)
    pages = list(tmp_path.rglob("*.page"))
    assert pages
    for page in pages:
        page.write_bytes(page.read_bytes()[:-1] + b"\0" * 2)
    with serve(disk_cache=tmp_path) as second:
        http = Http(second.url)
        answer = ask(http)
        assert digest(answer) == digest(expected)
        assert answer["x_zinc"]["cached"] == {"tokens": 0}
        wait_for_rest(second)
        assert metric(http, "disk_cache_ignored_total") >= 1
        assert http.get("/health").json["disk_cache"]["ignored"] >= 1


def test_tenants_share_nothing_on_disk(serve, tmp_path):
    file, folder = write_tenants(tmp_path, {"ann": "ann", "bob": "bob"}), tmp_path / "cache"
    with serve(disk_cache=folder, tenants=file) as first:
        ask(Http(first.url), "ann")
        flush(first)
        assert Http(first.url).get("/health").json == {"status": "ok"}
    with serve(disk_cache=folder, tenants=file) as second:
        cached = [ask(Http(second.url), name)["x_zinc"]["cached"] for name in ("bob", "ann")]
        assert cached[0] == {"tokens": 0}
        assert cached[1]["from_disk"] > 0


def write_grouped(folder: Path, *grouped: str) -> Path:
    """A file of three tenants, each with its name as key; those of ``grouped`` share a group."""
    names, group = ("ann", "bob", "carl"), {"isolation_group": 7}
    return write_tenants(
        folder, dict(zip(names, names, strict=True)), **dict.fromkeys(grouped, group)
    )


def test_a_later_group_of_the_same_number_finds_nothing(tiny_model_path, serve, tmp_path):
    """The file is changed while a server is down that was killed, and while one runs."""
    file, folder = write_grouped(tmp_path, "ann", "bob"), tmp_path / "cache"
    words = ("--disk-cache", str(folder), "--tenants", str(file))
    with process(tiny_model_path, tmp_path, *words) as (server, http):
        ask(http, "ann")
        wait_until(lambda: len(list(folder.rglob("*.page"))) >= len(PROMPT) // 3 // 16)
        server.kill()
    with serve(disk_cache=folder, tenants=file) as second:
        assert ask(Http(second.url), "bob")["x_zinc"]["cached"]["from_disk"] > 0
    write_grouped(tmp_path, "bob", "carl")
    with serve(disk_cache=folder, tenants=file) as third:
        assert ask(Http(third.url), "carl")["x_zinc"]["cached"] == {"tokens": 0}
        for names in (("ann",), ("bob", "carl")):
            write_grouped(tmp_path, *names)
            third.models.accounts.reload(third.models.change_tenants)
        assert ask(Http(third.url), "bob")["x_zinc"]["cached"] == {"tokens": 0}
        flush(third)
    with serve(disk_cache=folder, tenants=file) as fourth:
        assert ask(Http(fourth.url), "carl")["x_zinc"]["cached"]["from_disk"] > 0


def test_the_queue_is_written_before_a_signal_ends_the_server(tiny_model_path, serve, tmp_path):
    words = ("--disk-cache", str(tmp_path / "cache"), "--disk-cache-size", "50MB")
    with process(tiny_model_path, tmp_path, *words) as (server, http):
        expected = ask(http)
        server.send_signal(signal.SIGINT)
        server.wait(PATIENCE_SECONDS)
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()
    with serve(disk_cache=tmp_path / "cache", sampling={}) as later:
        answer = ask(Http(later.url))
        assert digest(answer) == digest(expected)
        assert answer["x_zinc"]["cached"]["from_disk"] > 0


def test_an_llm_finds_what_an_earlier_one_computed(tiny_model_path, tmp_path):
    outputs = []
    for _ in range(2):
        with LLM(
            tiny_model_path, tier="cpu", context=CONTEXT, disk_cache=tmp_path, disk_cache_size="1GB"
        ) as llm:
            outputs += llm.generate([PROMPT[:80]], SamplingParams(max_tokens=4))
    assert outputs[0].cached_tokens == 0
    assert outputs[1].cached_tokens > 0
    assert outputs[0].tokens == outputs[1].tokens
