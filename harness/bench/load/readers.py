"""``python -m harness.bench.load.readers URL``: for each line of standard input, a JSON list of
bodies, send them all at once and print the seconds until every answer has been read."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

LAST = b"data: [DONE]\n\n"


def read_all(url: str, bodies: list[Any]) -> float:
    """Seconds until all answers are there. Raises ValueError for one that is not whole."""
    answers: list[bytes] = []

    def read(body: Any) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        with closing(http.client.HTTPConnection(address.hostname, address.port)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answers.append(connection.getresponse().read())

    began = time.perf_counter()
    threads = [threading.Thread(target=read, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    if len(answers) != len(bodies) or not all(answer.endswith(LAST) for answer in answers):
        raise ValueError("an answer was not whole")
    return took


if __name__ == "__main__":
    for line in sys.stdin:
        print(read_all(sys.argv[1], json.loads(line)), flush=True)
