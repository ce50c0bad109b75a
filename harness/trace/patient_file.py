"""A new file that keeps bytes in memory while its disk is full."""

from __future__ import annotations

from pathlib import Path

BUFFER_BYTES = 1 << 16
MOST_WAITING_BYTES = 256 << 20
"""Most bytes that may wait in memory; with more, a failed write is an error."""


class PatientFile:
    """Appends to a new file. ``problem`` says why bytes wait in memory, None when none do."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises OSError when that fails or the file exists."""
        self._raw = path.open("xb", buffering=0)
        self._waiting = bytearray()
        self.name = str(path)
        self.problem: str | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._raw.closed

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises OSError when too many wait in memory."""
        self._waiting += data
        most = BUFFER_BYTES if self.problem is None else MOST_WAITING_BYTES
        if len(self._waiting) > most:
            self.flush()

    def flush(self) -> None:
        """Write the waiting bytes, as many as the disk takes. Raises OSError when too many wait."""
        while self._waiting:
            try:
                written = self._raw.write(self._waiting)
            except OSError as error:
                self.problem = error.strerror or str(error)
                if len(self._waiting) > MOST_WAITING_BYTES:
                    raise
                return
            del self._waiting[:written]
        self.problem = None

    def close(self) -> None:
        """Close the file. Bytes the disk has no room for are lost."""
        if not self._raw.closed:
            self.flush()
            self._raw.close()
