"""What tests put in the place of the project's own functions, methods and tables."""

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

PACKAGES = ("accel", "contract", "harness", "reference", "zinc_rt")
Namespace = Mapping[str, Any]


class Originals:
    """The attributes of every module of the project and of its classes, as they were when
    ``note`` first saw the module."""

    def __init__(self, packages: tuple[str, ...] = PACKAGES) -> None:
        self._packages = packages
        self._noted: set[str] = set()
        self._told: set[str] = set()
        self._originals: list[tuple[str, Namespace, Namespace]] = []
        self._tables: list[tuple[str, Namespace, Namespace]] = []

    def note(self) -> None:
        """Take in the modules that were imported since the last call."""
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in self._packages and name not in self._noted:
                self._noted.add(name)
                for owner, space, attributes in _namespaces(name, module):
                    self._originals.append((owner, space, attributes))
                    for one, value in attributes.items():
                        if one.isupper() and one[0] != "_" and isinstance(value, Mapping):
                            self._tables.append((f"{owner}.{one}", value, dict(value)))

    def newly_replaced(self) -> list[str]:
        """What is not as it was, and was at the last call, as ``module.name`` each."""
        replaced = self._replaced()
        new, self._told = sorted(replaced - self._told), replaced
        return new

    def _replaced(self) -> set[str]:
        found = {
            f"{owner}.{name}"
            for owner, space, attributes in self._originals
            for name in _changed(space, attributes)
        }
        return found | {
            name
            for name, table, entries in self._tables
            if len(table) != len(entries) or _changed(table, entries)
        }


def _changed(now: Namespace, before: Namespace) -> list[str]:
    """The names that had another value, or any."""
    return [name for name, value in before.items() if now.get(name) is not value]


def _namespaces(name: str, module: ModuleType) -> Iterator[tuple[str, Namespace, Namespace]]:
    """A module and each class that it defines: its name, all it has, and of that what may be called
    or is a constant. What a class counts by an attribute is neither."""
    own = {one: value for one, value in vars(module).items() if callable(value) or one.isupper()}
    yield name, vars(module), own
    for one, value in own.items():
        if isinstance(value, type) and value.__module__ == name:
            members = {
                key: member
                for key, member in vars(value).items()
                if key.isupper() or (hasattr(member, "__get__") and key[:2] != "__")
            }
            yield f"{name}.{one}", vars(value), members
