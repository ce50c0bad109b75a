"""Packs and unpacks the archive: a gzipped tar whose bytes depend only on its members.

``manifest.json`` holds the size and SHA-256 of every other member. Apart from the compression,
given members have exactly one archive, so any change to a file is detected."""

import gzip
import hashlib
import io
import json
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from contract.cached_files import replacing
from contract.errors import ConfigError, system_errors_as, system_words

FORMAT = 1
FOLDER = "zinc-rt-conformance"
"""The folder in the archive that contains all members."""
MANIFEST = "manifest.json"
MEMBERS = ("run.json", "must_pass.txt", "results.jsonl", "waivers.toml", "log.txt")
ARCHIVE_BYTES_MAX = 1 << 26
CONTENT_BYTES_MAX = 1 << 28
GZIP_WRAPPER = 16
"""The flag of zlib for gzip's header and trailer."""
GZIP_HEADER = bytes.fromhex("1f8b08000000000002ff")
"""A gzip header: no name, no time, best compression, unknown system."""


def pack(members: Mapping[str, bytes]) -> bytes:
    """The archive of all MEMBERS."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=9, mtime=0) as file:
        file.write(tar_of(FOLDER, {MANIFEST: _manifest(members), **_ordered(members)}))
    return buffer.getvalue()


def unpack(path: Path) -> dict[str, bytes]:
    """The members of an archive, checked against its manifest. Raises ConfigError for a file that
    is truncated, was edited or lacks a member."""
    found = _untar(path, _decompressed(path))
    expected = (MANIFEST, *MEMBERS)
    for name in expected:
        if name not in found:
            raise _refused(path, f"{name} is missing")
    manifest = found.pop(MANIFEST)
    try:
        document = json.loads(manifest)
        version, entries = document["format"], document["members"]
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _refused(path, f"{MANIFEST} cannot be understood") from None
    if version != FORMAT:
        raise _refused(path, f"package format {version!r}, this source reads {FORMAT}")
    for name in MEMBERS:
        if listed.get(name) != (len(found[name]), hashlib.sha256(found[name]).hexdigest()):
            raise _refused(path, f"{name} is not what {MANIFEST} says")
    if manifest != _manifest(found):
        raise _refused(path, f"{MANIFEST} is not as this format writes it")
    return found


def _ordered(members: Mapping[str, bytes]) -> dict[str, bytes]:
    assert set(members) == set(MEMBERS)
    return {name: members[name] for name in MEMBERS}


def write_archive(out: Path, archive: bytes) -> None:
    """Write the file, whole or not at all. Raises ConfigError."""
    with system_errors_as(f"{out}: cannot be written"), replacing(out) as file:
        file.write(archive)


def _manifest(members: Mapping[str, bytes]) -> bytes:
    entries = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in _ordered(members).items()
    }
    return (json.dumps({"format": FORMAT, "members": entries}, indent=1) + "\n").encode()


def tar_of(folder: str, files: Mapping[str, bytes]) -> bytes:
    """A tar archive of files in a folder, which depends on them alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _decompressed(path: Path) -> bytes:
    with system_errors_as(f"{path}: cannot be read"):
        if path.stat().st_size > ARCHIVE_BYTES_MAX:
            raise _refused(path, f"larger than {ARCHIVE_BYTES_MAX:,} bytes")
        data = path.read_bytes()
    if data[: len(GZIP_HEADER)] != GZIP_HEADER:
        raise _refused(path, "does not start as a package does")
    stream = zlib.decompressobj(zlib.MAX_WBITS | GZIP_WRAPPER)
    try:
        content = stream.decompress(data, CONTENT_BYTES_MAX)
    except zlib.error as error:
        raise _refused(path, f"damaged ({system_words(error)})") from None
    if stream.unconsumed_tail:
        raise _refused(path, f"holds more than {CONTENT_BYTES_MAX:,} bytes")
    # The gzip module would accept padding after the end.
    if not stream.eof or stream.unused_data:
        raise _refused(path, "data after its end" if stream.eof else "truncated")
    return content


def _untar(path: Path, content: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                name = member.name.removeprefix(f"{FOLDER}/")
                if name not in (MANIFEST, *MEMBERS) or name in found or not member.isreg():
                    raise _refused(path, f"unexpected member {member.name!r}")
                file = archive.extractfile(member)
                assert file is not None
                found[name] = file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise _refused(path, f"truncated or damaged ({system_words(error)})") from None
    if tar_of(FOLDER, found) != content:
        raise _refused(path, "is not laid out as this format is")
    return found


def _refused(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: not a conformance package: {problem}")
