"""Serving many at once, measured: what requests of several tenants get when they share a model."""
