"""Benchmarks of serving: what requests of several tenants get when they share a model."""
