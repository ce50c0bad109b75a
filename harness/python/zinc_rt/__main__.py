"""``python -m zinc_rt`` is ``zinc-rt``."""

from harness.cli.main import entry

if __name__ == "__main__":
    entry()
