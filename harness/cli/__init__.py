"""The ``zinc-rt`` command line: one module per command; ``main`` finds the command."""
