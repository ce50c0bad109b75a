"""Traces of a tier's operations, and timelines of an engine's decisions.

A trace (``record``) holds every submission, write and read of a run and digests of the results;
``play`` repeats them on another tier and compares. A timeline (``timeline``) shows slots, steps and
tenants over time. See docs/tools.md."""
