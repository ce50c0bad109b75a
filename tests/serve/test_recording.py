"""What a server computed for many at once, done again from its trace."""

import stat
import threading

import pytest

from contract.errors import ConfigError
from harness import replay
from tests.serve.http import Http


def test_a_server_leaves_a_trace_that_replays(serve, tmp_path, capsys):
    """Of requests that came together; one byte of it changed is noticed."""
    folder = tmp_path / "traces"
    with serve(record=folder) as server:
        http = Http(server.url)
        threads = [
            threading.Thread(
                target=http.post,
                args=("/v1/completions", {"prompt": f"text {i}", "max_tokens": 12, "seed": i}),
            )
            for i in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        named = http.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).json["x_zinc"]
    (trace,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert trace.name.endswith("-tiny.trace")
    assert named["trace"] == trace.name
    assert replay.main([str(trace), "--tier", "cpu"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("identical: ")
    assert "cut off" not in told.err
    content = bytearray(trace.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    trace.write_bytes(content)
    assert replay.main([str(trace), "--tier", "cpu"]) != 0


def test_a_folder_that_cannot_be_made(serve, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot record there"), serve(record=file / "traces"):
        pass
