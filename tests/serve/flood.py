"""Clients that ask again and again: ``python -m tests.serve.flood URL KEY CLIENTS TOKENS``.

One that is refused waits as long as it is told to, as OpenAI's client does. Ends when its standard
input does, and then tells what was answered."""

import asyncio
import json
import re
import sys
from collections import Counter
from contextlib import suppress
from urllib.parse import urlsplit


def request_bytes(key: str, tokens: int) -> bytes:
    """A streamed request, on a connection of its own."""
    asked = {"prompt": "flood", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def ask(host: str, port: int, request: bytes, told: Counter[str]) -> None:
    """One client: what it was answered, by status; refusals with and without Retry-After."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request)
            answer = await reader.read()
            writer.close()
            head = answer.partition(b"\r\n\r\n")[0]
            status = head.split(b" ")[1].decode() if b" " in head else "none"
            wait = re.search(rb"\r\nRetry-After: (\d+)", head)
            if status in ("429", "503") and wait is None:
                status += " without Retry-After"
            if status == "200" and b"[DONE]" not in answer[-64:]:
                status = "200 without an end"
            told[status] += 1
            await asyncio.sleep(float(wait[1]) if wait else 0)


async def flood(url: str, key: str, clients: int, tokens: int) -> Counter[str]:
    """Until standard input ends."""
    parts = urlsplit(url)
    told: Counter[str] = Counter()
    request = request_bytes(key, tokens)
    assert parts.hostname is not None
    assert parts.port is not None
    crowd = [
        asyncio.create_task(ask(parts.hostname, parts.port, request, told)) for _ in range(clients)
    ]
    await asyncio.to_thread(sys.stdin.read)
    for client in crowd:
        client.cancel()
    return told


if __name__ == "__main__":
    answered = asyncio.run(flood(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    print(json.dumps(answered))
