"""Benchmarks of speed and memory, side by side with a peer on the same file."""
