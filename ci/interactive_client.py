"""Measures what a client of an interactive tenant sees beside 15 busy slots of a batch tenant: the
99th percentile of the intervals between its tokens over their median, at its socket.

    PYTHONPATH=.:harness/python python ci/interactive_client.py --tier cuda --model 8b.gguf

The server is a process of its own, and so are the clients of the batch tenant. Text is sampled, so
drafts are right as seldom as in other text; tokens are counted, since an event may hold several."""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from harness.bench.load.servers import attended
from harness.serve.keys import key_digest, new_key

SLOTS = 16
PROMPT, ANSWER = 32, 32
"""A quarter of the longest prompts and answers of the batch tenant, in tokens."""
SKIPPED, COUNTED = 128, 512
"""Intervals that are not counted, while the server learns what steps cost, and those that are."""
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
TENANT = """[tenant.{name}]
id = {id}
qos = "{name}"
max_slots = 16
decode_tokens_per_s = 1000000000
prefill_tokens_per_s = 1000000000
keys = ["{digest}"]
"""


@contextmanager
def server(model: Path, tier: str, more: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Run a server; its address and the keys of its tenants."""
    with tempfile.TemporaryDirectory() as folder:
        tenants, keys = Path(folder) / "tenants.toml", {}
        text = ""
        for number, name in enumerate(("interactive", "batch"), 1):
            keys[name] = new_key()
            text += TENANT.format(name=name, id=number, digest=key_digest(keys[name]))
        tenants.write_text(text)
        words = ["serve", "--model", str(model), "--tier", tier, "--port", "0", "--quiet"]
        words += ["--slots", str(SLOTS), "--context", "1024", "--tenants", str(tenants)]
        words += ["--ledger", str(Path(folder) / "ledger.sqlite"), *more]
        with attended("harness", words) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"listening on http://(\S+)", line):
                    yield found[1], keys
                    return
        raise SystemExit("the server did not start")


def answered(address: str, key: str, prompt: int, answer: int, **more: Any) -> Iterator[bytes]:
    """The lines of an answer, as they come."""
    connection = http.client.HTTPConnection(address, timeout=60)
    text = " ".join(random.choices(LETTERS, k=prompt))
    body = {"prompt": text, "max_tokens": answer, "ignore_eos": True, "temperature": 1.0, **more}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    yield from response
    connection.close()


def keep_busy(address: str, key: str, stop: Event) -> None:
    """Let requests hold all slots but one; half of the answers are streams."""

    def one(slot: int) -> None:
        for number in range(slot, sys.maxsize):
            if stop.is_set():
                return
            lengths = PROMPT * (1 + number % 4), ANSWER * (1 + number * 3 % 4)
            for _ in answered(address, key, *lengths, stream=slot % 2 == 0):
                pass

    threads = [threading.Thread(target=one, args=(slot,)) for slot in range(SLOTS - 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def intervals(address: str, key: str) -> list[float]:
    """Seconds between the counted tokens of one interactive stream."""
    times: list[float] = []
    tokens = SKIPPED + COUNTED + 1
    for line in answered(address, key, PROMPT, tokens, stream=True, return_token_ids=True):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                times += [time.perf_counter()] * len(choice.get("token_ids", ()))
    return [after - before for before, after in pairwise(times[SKIPPED:])]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a run is beyond the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--most", type=float, default=1.3)
    args, more = parser.parse_known_args(argv)
    processes = get_context("spawn")
    with server(args.model, args.tier, more) as (address, keys):
        stop = processes.Event()
        others = processes.Process(target=keep_busy, args=(address, keys["batch"], stop))
        others.start()
        intervals(address, keys["interactive"])
        ratios = []
        for _ in range(args.runs):
            half, most = np.percentile(intervals(address, keys["interactive"]), [50, 99])
            ratios.append(most / half)
            print(f"median {1e3 * half:.2f} ms, 99th percentile {ratios[-1]:.2f} of it", flush=True)
        stop.set()
        others.join()
    met = sum(ratio <= args.most for ratio in ratios)
    print(f"{met} of {len(ratios)} runs at most {args.most}")
    return int(met < len(ratios))


if __name__ == "__main__":
    sys.exit(main())
