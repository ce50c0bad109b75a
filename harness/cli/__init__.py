"""The ``zinc-rt`` command line: one module per command, wired together by ``main``."""
