"""Prove an answer of a server: `zinc-rt verify` computes it again and compares every bit."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

from zinc_rt import serve

REQUEST = {"prompt": "The sky is", "max_tokens": 16, "seed": 7, "logits_digest": True}


def verify(request: bytes, response: bytes) -> str:
    """What the command prints: identical, or where the answers first differ."""
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("request.json", "response.json")]
        for path, content in zip(files, (request, response), strict=True):
            path.write_bytes(content)
        command = [sys.executable, "-m", "harness", "verify", *files]  # zinc-rt verify
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


asked = json.dumps(REQUEST).encode()
headers = {"Content-Type": "application/json"}
with serve(port=0) as server:
    post = urllib.request.Request(f"{server.url}/v1/completions", asked, headers)
    with urllib.request.urlopen(post) as reply:
        answered = reply.read()

text = json.loads(answered)["choices"][0]["text"]
print(REQUEST["prompt"] + text)
print("the answer:", verify(asked, answered))
changed = json.loads(answered)
changed["choices"][0]["text"] = text + "!"
print("with one character more:", verify(asked, json.dumps(changed).encode()))
