"""Conformance packages: a fixed list of cases run on one device, and the archive of its results."""
