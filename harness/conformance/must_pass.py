"""The cases that must pass: generated from the source and compared with stored digests.

The stored file has a line for each group of cases: its name, its number of cases, and the SHA-256
of their sorted names. The groups are ``parity/OPCODE`` and the other kinds of cases, such as
``goldens``."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from contract.errors import ConfigError, system_words
from harness.conformance.cases import known_cases

DIGESTS = "must_pass_digests.txt"
REGENERATE = f"python -m harness.conformance --digests > harness/conformance/{DIGESTS}"


def must_pass_ids() -> tuple[str, ...]:
    """The names of the cases that this source generates."""
    return tuple(known_cases())


def load_must_pass(path: Path | None = None) -> tuple[str, ...]:
    """The case names in the file ``path``, one per line; those of this source when it is None.
    Raises ConfigError for a file that cannot be read, is empty or names a case twice, and when this
    source's cases are not the stored ones."""
    if path is None:
        ids = must_pass_ids()
        check_digests(digest_lines(ids), _stored_digests())
        return ids
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {system_words(error)}") from None
    return checked_list(str(path), [line for line in lines if line])


def checked_list(where: str, ids: Sequence[str]) -> tuple[str, ...]:
    """``ids``. Raises ConfigError for an id that occurs twice, naming its entry, and for none."""
    seen: set[str] = set()
    for number, name in enumerate(ids, 1):
        if name in seen:
            raise ConfigError(f"{where}: entry {number}: {name} occurs twice")
        seen.add(name)
    if not ids:
        raise ConfigError(f"{where}: holds no case")
    return tuple(ids)


def digest_lines(ids: Iterable[str]) -> dict[str, str]:
    """For each group of cases, its count and the SHA-256 of its sorted names, as in the file."""
    groups: dict[str, list[str]] = {}
    for name in ids:
        groups.setdefault(_group(name), []).append(name)
    return {group: _count_and_digest(names) for group, names in sorted(groups.items())}


def check_digests(generated: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Raise ConfigError naming the groups whose cases differ from the stored ones."""
    different = [
        f"{group} (generated: {generated.get(group, 'none')}; stored: {stored.get(group, 'none')})"
        for group in sorted(generated.keys() | stored.keys())
        if generated.get(group) != stored.get(group)
    ]
    if different:
        raise ConfigError(
            f"the cases of {', '.join(different)} are not the stored ones; "
            f"if that is meant, run: {REGENERATE}"
        )


def _stored_digests() -> dict[str, str]:
    file = resources.files(__package__).joinpath(DIGESTS)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: cannot be read: {system_words(error)}; run: {REGENERATE}"
        ) from None


def _group(name: str) -> str:
    """The group of a case: of ``parity/add-3x257-normal`` it is ``parity/add``."""
    kind = name.split("/", 1)[0]
    return name.split("-", 1)[0] if kind == "parity" else kind


def _count_and_digest(names: Sequence[str]) -> str:
    text = "".join(f"{name}\n" for name in sorted(names))
    return f"{len(names)} {hashlib.sha256(text.encode()).hexdigest()}"
