"""Waivers: failures that a person has examined and accepts. None are expected.

A TOML file of tables ``[[waiver]]``, each with ``case`` and ``device`` (patterns with ``*`` and
``?``, of case ids and of the device's name) and a ``reason``."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from contract.errors import ConfigError

FIELDS = ("case", "device", "reason")


@dataclass(frozen=True, slots=True)
class Waiver:
    """One accepted failure."""

    case: str
    device: str
    reason: str

    def covers(self, case: str, device: str) -> bool:
        """Whether the waiver applies to this case on this device."""
        return fnmatchcase(case, self.case) and fnmatchcase(device, self.device)


def parse_waivers(text: str, where: str) -> tuple[Waiver, ...]:
    """Parse a file's text. Raises ConfigError naming ``where`` and the entry."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: is not TOML: {error}") from None
    entries = document.pop("waiver", [])
    if document or not isinstance(entries, list):
        raise ConfigError(f"{where}: holds something else than tables [[waiver]]")
    waivers = []
    for number, entry in enumerate(entries, 1):
        valid = isinstance(entry, dict) and set(entry) == set(FIELDS)
        if not valid or not all(isinstance(v, str) and v.strip() for v in entry.values()):
            raise ConfigError(f"{where}: waiver {number} needs the texts {', '.join(FIELDS)}")
        waivers.append(Waiver(**entry))
    return tuple(waivers)


def find_waiver(waivers: Iterable[Waiver], case: str, device: str) -> Waiver | None:
    """The first waiver that applies to the case, or None."""
    return next((waiver for waiver in waivers if waiver.covers(case, device)), None)
