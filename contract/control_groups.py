"""The control groups of this process, by which Linux limits its processors and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def own_groups(controller: str, groups: Path = GROUPS, own: Path = OWN_GROUPS) -> Iterator[Path]:
    """Yield the folders of the groups that may limit what ``controller`` controls: this process's
    group and those it is in."""
    try:
        lines = own.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    for line in lines or ["0::/"]:
        match line.split(":", 2):
            case [_, "", path]:
                roots = {groups}
            case [_, controllers, path] if controller in controllers.split(","):
                # Version 1. The folder may have another order, but there is a link.
                roots = {groups / controllers, groups / controller}
            case _:
                continue
        for root in roots:
            folder = root / path.strip("/")
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(root))
