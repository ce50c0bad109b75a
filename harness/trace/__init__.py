"""Traces of what a tier was told to do, and timelines of what an engine decided.

A trace (``record``) holds every submission, write and read of a run and the digests of what came
out; ``play`` does the same on another tier and compares. A timeline (``timeline``) is for looking
at: slots, steps and tenants over time. See docs/tools.md.
"""
