"""Tries a wheel as a new user does: ``python ci/try_wheel.py WHEEL PYTHON...``.

For each interpreter an empty environment gets the wheel and the extra ``server``. There the default
model answers, a server answers, ``verify`` replays that answer and refuses a changed one, and the C
program of docs/examples decodes, all on the native tier, in a folder without the sources, and with
no program on the path but the environment's own; only the C program takes this machine's compiler.
Where this account is root, another one does it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

NOBODY_ID = 65534
"""The user and group of ``nobody`` on Linux."""
QUESTION = "Why is the sky blue?"
ASKED = {"prompt": QUESTION, "max_tokens": 8, "seed": 7, "ignore_eos": True}
SECONDS = 600


class Trial:
    """One environment, and how commands run in it."""

    def __init__(self, interpreter: str, wheel: Path, folder: Path) -> None:
        self._home = folder / "home"
        self._bin = folder / "venv" / "bin"
        self._home.mkdir()
        subprocess.run([interpreter, "-m", "venv", "--copies", folder / "venv"], check=True)
        python = str(self._bin / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        subprocess.run([*pip, f"{wheel}[server]"], check=True, cwd=self._home)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "PATH": str(self._bin),
            "HOME": str(self._home),
            "XDG_CACHE_HOME": str(folder.parent / "cache"),
        }
        self.prefix: list[str] = []

    def drop_root(self, cache: Path) -> None:
        """Runs the commands that follow as nobody, who can read the environment."""
        setpriv = shutil.which("setpriv")
        if os.getuid() != 0 or setpriv is None:
            return
        for path in (self._home, cache):
            subprocess.run(["chown", "-R", f"{NOBODY_ID}:{NOBODY_ID}", path], check=True)
        user = [f"--reuid={NOBODY_ID}", f"--regid={NOBODY_ID}", "--clear-groups"]
        self.prefix = [setpriv, *user]

    def command(self, *words: object) -> list[str]:
        """A command line of the installed program."""
        return [*self.prefix, str(self._bin / "zinc-rt"), *map(str, words)]

    def run(self, *words: object, code: int = 0) -> str:
        """What a command prints, after it exited with ``code``."""
        done = subprocess.run(
            self.command(*words),
            cwd=self._home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode != code:
            raise SystemExit(
                f"{words[0]} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def lacks(self, module: str) -> bool:
        """Whether the environment has no such module."""
        found = (
            f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        )
        return subprocess.run([self._bin / "python", "-c", found], cwd=self._home).returncode == 1

    def decode_in_c(self) -> None:
        """A C program, compiled with the installed header and library, has the same digest."""
        words = ("--tokens", "1,2,3", "--tier", "native", "--context", "512")
        digest = self.run("logits", *words).splitlines()[0]
        said = self.run("export-plan", "model.plan", "--context", "512")
        found = re.search(r"^compile .* (\S+) -I (\S+) ", said, re.MULTILINE)
        compiler, program = shutil.which("cc"), self._bin.parent / "decode"
        if found is None or compiler is None:
            raise SystemExit(f"there is no C compiler, or export-plan does not name one: {said}")
        sources = [Path(__file__).parents[1] / "docs" / "examples" / "decode.c", found[1]]
        options = ("-I", found[2], "-pthread", "-o", program)
        subprocess.run([compiler, *sources, *options], check=True)
        command = [*self.prefix, str(program), "model.plan", "1,2,3", "8"]
        done = subprocess.run(
            command, cwd=self._home, env={}, capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode or done.stdout.splitlines()[0] != digest:
            raise SystemExit(f"{digest} is not what the C program prints: {done}")
        print(f"in C: {digest}")

    def serve_and_verify(self) -> None:
        """A server's answer replays, and a changed one does not."""
        words = ("serve", "--tier", "native", "--port", "0", "--context", "512")
        with subprocess.Popen(
            self.command(*words),
            cwd=self._home,
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
        ) as server:
            try:
                assert server.stderr is not None
                while not (found := re.search(r"listening on (http\S+)", server.stderr.readline())):
                    if server.poll() is not None:
                        raise SystemExit(f"the server ended with {server.returncode}")
                request = urllib.request.Request(
                    f"{found[1]}/v1/completions",
                    json.dumps(ASKED).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                    answer = json.load(reply)
            finally:
                server.kill()
        files = [self._home / name for name in ("request.json", "response.json")]
        files[0].write_text(json.dumps(ASKED))
        for changed in (False, True):
            if changed:
                answer["choices"][0]["text"] += "!"
            files[1].write_text(json.dumps(answer))
            verify = ("verify", *files, "--tier", "native", "--context", "512")
            print(self.run(*verify, code=int(changed)).splitlines()[0])


def main() -> None:
    """Tries the wheel with each interpreter in turn."""
    wheel = Path(sys.argv[1]).resolve()
    for interpreter in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as top:
            folder, cache = Path(top) / "try", Path(top) / "cache"
            Path(top).chmod(0o755)
            for path in (folder, cache):
                path.mkdir()
            trial = Trial(interpreter, wheel, folder)
            if not trial.lacks("ziglang"):
                raise SystemExit("the environment has a compiler")
            trial.run("model", "pull")
            trial.drop_root(cache)
            print(trial.run("run", QUESTION, "--tier", "native", "--max-tokens", "16").strip())
            trial.decode_in_c()
            trial.serve_and_verify()
            who = "nobody" if trial.prefix else "this account"
            print(f"{interpreter}: {who}: answers, serves, verifies")


if __name__ == "__main__":
    main()
