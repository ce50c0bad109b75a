"""The chat and operator pages: files read once, served with a strict content security policy."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.serve.http_answer import HttpAnswer

FOLDER = Path(__file__).with_name("page")
DOCUMENTS = {"index.html": "/", "operator.html": "/operator"}
"""The HTML files with their paths; the path of any other file begins with ``/page/``."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""No content of other origins, nothing inline, no frames; HTML only from the sanitizer."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent."""

    content: bytes
    content_type: str

    def answer(self, environ: Mapping[str, Any]) -> HttpAnswer:
        """The answer to a request. Browsers ask again whether a file of theirs is the same, so the
        modules of a page always belong to one version."""
        tag = f'"{hashlib.sha256(self.content).hexdigest()[:40]}"'
        headers = HEADERS | {"ETag": tag, "Cache-Control": "no-cache"}
        known = environ.get("HTTP_IF_NONE_MATCH", "").split(",")
        if tag in [one.strip().removeprefix("W/") for one in known]:
            return HttpAnswer(b"", "", 304, headers)
        return HttpAnswer(self.content, self.content_type, headers=headers)


def read_page(folder: Path = FOLDER) -> Mapping[str, PageFile]:
    """The files below ``folder`` by URL path; links are not followed."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            name = path.relative_to(folder).as_posix()
            files[DOCUMENTS.get(name, f"/page/{name}")] = PageFile(
                path.read_bytes(), _content_type(path)
            )
    return files


def _content_type(path: Path) -> str:
    # The system's table of types may call JavaScript plain text, which browsers do not run.
    if path.suffix == ".js":
        return "text/javascript; charset=utf-8"
    kind = mimetypes.guess_type(path.name)[0] or "text/plain"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
