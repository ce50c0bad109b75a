"""Benchmarks of a server under load, measured by its clients."""
