"""A disk that becomes full."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """No file of this process can grow beyond ``nbytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    # Python does not look whether all of the code of a module was written.
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
