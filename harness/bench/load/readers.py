"""``python -m harness.bench.load.readers URL``: for each line of standard input, a JSON list of
request bodies, send all at once and print the seconds until every answer is read.

The process stands for clients on other machines. The kernel collects the answers and wakes a reader
only for 64 KiB or the end, so that reading takes no time from the measured server."""

import json
import socket
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

LAST = b"data: [DONE]\n\n"
AT_ONCE_BYTES = 64 << 10
RECEIVE_BYTES = 4 * AT_ONCE_BYTES


def read_all(url: str, bodies: list[Any]) -> float:
    """Seconds until all answers are read. Raises ValueError for an incomplete one."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    where = address.hostname, address.port
    answers: list[bytes] = []

    def read(body: Any) -> None:
        with socket.create_connection(where) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, AT_ONCE_BYTES)
            connection.sendall(_request(address.netloc, body))
            answer = b""
            while part := connection.recv(RECEIVE_BYTES):
                answer += part
            answers.append(answer)

    began = time.perf_counter()
    threads = [threading.Thread(target=read, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    whole = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200") and LAST in answer]
    if len(whole) != len(bodies):
        raise ValueError("an answer was not whole")
    return took


def _request(host: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


if __name__ == "__main__":
    for line in sys.stdin:
        print(read_all(sys.argv[1], json.loads(line)), flush=True)
